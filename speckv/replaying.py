"""Replay: any policy on recorded sequences, exactly as a live decoder would run it (rule R3)."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel, StepCosts
from speckv.features import BoolArray, Features, FeatureTracker, IntArray, When
from speckv.policy import Clairvoyant, Outcome, Policy, State, as_integers, ask, check_playable, select_rows
from speckv.traces import Rollouts, TraceDataset


@dataclass(frozen=True)
class Replay:
    """Every step of every sequence, and the sums.

    Attributes:
        sequence, position, gamma, accepted: (steps,) integers: row of the sequence, tokens committed before
            the step, tokens verified, tokens accepted. Sorted by sequence and position.
        forwards: (steps,) draft forwards, gamma or one more (a distribution that nothing was drawn from).
        seconds: (steps,) duration, decisions of the policy included.
        controller_seconds: (steps,) the policy's part of it.
        chosen: (steps,) tokens that the policy chose before the step: gamma, or more where the text's end left room for
            fewer or the policy itself stopped inside the draft.
        propensity: (steps,) chance with which it chose so.
        tokens: (S,) committed tokens of each sequence.
        features: name -> (steps,) what was known before the draft of each step, if `replay` was asked for it.
    """

    sequence: IntArray
    position: IntArray
    gamma: IntArray
    accepted: IntArray
    forwards: IntArray
    seconds: npt.NDArray[np.float64]
    controller_seconds: npt.NDArray[np.float64]
    chosen: IntArray
    propensity: npt.NDArray[np.float64]
    tokens: IntArray
    features: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    @property
    def sequence_seconds(self) -> npt.NDArray[np.float64]:
        """(S,) seconds of each sequence."""
        return np.bincount(self.sequence, weights=self.seconds, minlength=len(self.tokens)).astype(float)

    @property
    def throughput(self) -> float:
        """Committed tokens a second: the ratio of the sums."""
        return float(self.tokens.sum() / self.seconds.sum())


def replay(
    policy: Policy,
    traces: Rollouts | TraceDataset,
    costs: CostModel,
    controller: tuple[float, float] | None = None,
    features: Sequence[str] = (),
) -> Replay:
    """Run `policy` on every recorded sequence.

    Sequences are independent and run in lockstep, unless the policy is online. Then they run one after the other in
    the order of their rows, as a live decoder would serve them, from the memory that the policy has; afterwards it
    has that of all of them.

    Args:
        policy: fitted, if it learns.
        traces: what was recorded.
        costs: how long forwards take; those of a batch say its size, which policies see as the feature `batch_size`.
        controller: seconds of the policy's work once a step and of one decision inside the draft. By default what
            `costs` says of this policy, and nothing for one it does not know: see `known_controller`.
        features: names of features that exist before the draft, to be kept for every step: what learners train on.

    Raises:
        SpecKVError: the policy asks for an unknown feature, answers out of range or plays a larger gamma than was
            recorded, or the costs lack a compression.
    """
    traces = traces.load() if isinstance(traces, TraceDataset) else traces
    if controller is None:
        controller = known_controller(policy, costs) or (0.0, 0.0)
    check_playable(policy, traces.gamma_max)
    if isinstance(policy, Clairvoyant):
        policy, controller = _Plan(*policy.foresee(traces, costs)), (0.0, 0.0)
    return _Run(policy, traces, costs, controller, features).run()


class _Plan(Policy):
    """Plays what was fixed beforehand for each sequence and position."""

    name = "plan"
    features = ("position", "draft_index")

    def __init__(self, gammas: IntArray, forwards: IntArray) -> None:
        super().__init__()
        self.gammas, self.forwards = gammas, forwards

    def new_state(self, rows: int) -> State:
        return {"row": np.arange(rows)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return np.asarray(self.forwards[state["row"], features["position"].astype(np.int64)])

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        gammas = self.gammas[state["row"], features["position"].astype(np.int64)]
        return np.asarray(features["draft_index"] <= gammas)


class Session:
    """Recorded sequences being decoded in lockstep, one step of each at a time; all of them, until told otherwise.

    Args:
        traces: what was recorded.
        costs: how long forwards take.
        features: names of the features to build.

    Attributes:
        rows: (n,) rows of `traces` that have not ended yet.
        positions: (n,) tokens that each has committed.
        tracker: builds their features.
    """

    def __init__(self, traces: Rollouts, costs: CostModel, features: Sequence[str]) -> None:
        self.traces = traces
        size = int(traces.lengths.max())
        longest = int(traces.prompt_lengths.max()) + size
        self._batch_size = costs.batch_size
        self._costs = StepCosts(costs, traces.compressions, max(traces.gamma_max, size) + 1, longest)
        codes = {name: code for code, name in enumerate(COMPRESSIONS)}
        ratios = {str(name): costs.cost_ratio(str(name)) for name in np.unique(traces.compressions)}
        self._features = features
        self._codes = np.array([codes[name] for name in traces.compressions], dtype=np.int64)
        self._ratios = np.array([ratios[name] for name in traces.compressions])
        self.start(np.arange(len(traces)))

    def start(self, rows: IntArray) -> None:
        """Start the sequences at `rows`, and drop what was being decoded."""
        self.tracker = FeatureTracker(
            self._features, self.traces.prompt_lengths[rows], self._codes[rows], self._ratios[rows], self._batch_size
        )
        self.rows = rows
        self.positions = np.zeros(len(rows), dtype=np.int64)
        self._lags = np.ones(len(rows), dtype=np.int64)

    def take(self, at: IntArray) -> Self:
        """A session of the sequences at the indices `at` alone; what it plays does not show in this one."""
        part = copy.copy(self)
        part.tracker = copy.copy(self.tracker)
        part._select(at)
        return part

    def put(self, at: IntArray, other: "Session") -> None:
        """Replace the sequences at the indices `at` by all those of `other`, a session of the same traces."""
        for name in ("rows", "positions", "_lags"):
            array = getattr(self, name).copy()
            array[at] = getattr(other, name)
            setattr(self, name, array)
        self.tracker.put(at, other.tracker)

    def restart(self, at: IntArray, rows: IntArray) -> None:
        """Start the sequences at `rows` in place of those at the indices `at`; the others go on."""
        fresh = copy.copy(self)
        fresh.start(rows)
        self.put(at, fresh)

    def _select(self, keep: npt.NDArray[Any]) -> None:
        self.rows, self.positions, self._lags = self.rows[keep], self.positions[keep], self._lags[keep]
        self.tracker.select(keep)

    @property
    def limits(self) -> IntArray:
        """(n,) how many tokens each sequence can draft in its next step."""
        return self.traces.limit[self.rows, self.positions]

    def token_signals(self, going: IntArray, index: IntArray | int) -> dict[str, npt.NDArray[np.float32]]:
        """Features of drafted token number `index` (from 1) in the sequences at `going`, by name."""
        rows, positions = self.rows[going], self.positions[going]
        return {
            feature: self.traces.drafted_signal(signal, rows, positions, index - 1)
            for feature, signal in self.tracker.token_signals.items()
        }

    def play(
        self, gammas: IntArray, forwards: IntArray, controller: npt.NDArray[np.float64] | float = 0.0
    ) -> tuple[IntArray, npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Verify `gammas` tokens of each draft, and drop the sequences that have ended.

        Args and returns: as of `advance`.
        """
        accepted, seconds, going = self.advance(gammas, forwards, controller)
        if not going.all():
            self._select(going)
        return accepted, seconds, going

    def advance(
        self, gammas: IntArray, forwards: IntArray, controller: npt.NDArray[np.float64] | float = 0.0
    ) -> tuple[IntArray, npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Verify `gammas` tokens of each draft. Those that have ended stay: drop or restart them before the next step.

        Args:
            gammas: (n,) at most `limits`.
            forwards: (n,) draft forwards, gammas or one more.
            controller: (n,) seconds of the policy's decisions.

        Returns:
            accepted: (n,) tokens.
            seconds: (n,) duration of the step.
            going: (n,) whether the sequence goes on.
        """
        rows, positions = self.rows, self.positions
        accepted = np.minimum(gammas, self.traces.run[rows, positions])
        contexts = self.traces.prompt_lengths[rows] + positions
        seconds = self._costs.seconds(rows, contexts, self._lags, forwards, gammas) + controller
        self._track(gammas, accepted)
        # The draft has seen its own tokens but the last; what it has seen and the target rejected is undone.
        self._lags = np.where(forwards > 0, accepted + 1 - np.minimum(accepted, forwards - 1), self._lags + 1)
        self.positions = positions + accepted + 1
        return accepted, seconds, self.positions < self.traces.lengths[rows]

    def _track(self, gammas: IntArray, accepted: IntArray) -> None:
        rows, positions = self.rows, self.positions
        signals = {}
        if self.tracker.draft_signals and (width := int(gammas.max(initial=0))):
            index = np.minimum(np.arange(width), np.maximum(gammas - 1, 0)[:, None])
            signals = {
                name: self.traces.drafted_signal(name, rows[:, None], positions[:, None], index)
                for name in self.tracker.draft_signals
            }
        last = np.minimum(positions + accepted, self.traces.tokens.shape[1] - 1)
        target = {name: self.traces.signals[name][rows, last] for name in self.tracker.target_signals}
        self.tracker.verified(gammas, accepted, signals, target)


class _Run:
    """A policy in a session, until all sequences have ended."""

    def __init__(
        self,
        policy: Policy,
        traces: Rollouts,
        costs: CostModel,
        controller: tuple[float, float] = (0.0, 0.0),
        keep: Sequence[str] = (),
    ) -> None:
        self.policy, self.controller, self.keep = policy, controller, keep
        self.session = Session(traces, costs, list(dict.fromkeys([*policy.features, *keep])))
        self.state: State = {}
        self.chooses = policy.overrides("choose_gamma")
        self.draws, self.keeps = policy.overrides("draw_token"), policy.overrides("keep_drafting")
        self.observes = policy.overrides("observe")

    def run(self) -> Replay:
        session = self.session
        rows = np.arange(len(session.traces))
        log: list[tuple[npt.NDArray[Any], ...]] = []
        for together in rows[:, None] if self.policy.online else rows[None]:
            session.start(together)
            self.state = self.policy.new_state(len(together))
            while len(session.rows):
                log.append(self._step())
        columns = [np.concatenate(column) for column in zip(*log, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        row, position, gamma, accepted, forwards, seconds, controller, chosen, propensity, *kept = (
            column[order] for column in columns
        )
        known = dict(zip(self.keep, kept, strict=True))
        tokens = session.traces.lengths.copy()
        return Replay(row, position, gamma, accepted, forwards, seconds, controller, chosen, propensity, tokens, known)

    def _step(self) -> tuple[npt.NDArray[Any], ...]:
        """One step of each sequence; what a `Replay` keeps of it, its columns in their order."""
        session = self.session
        rows, positions = session.rows, session.positions
        features = session.tracker.before(len(rows))
        kept = [features[name] for name in self.keep]
        chosen = self._choose(features)
        propensity = np.broadcast_to(np.asarray(self.policy.propensity(self.state), dtype=float), len(rows))
        asked, forwards, gammas = self._draft(features, np.minimum(chosen, session.limits))
        controller = np.asarray(
            (self.chooses or self.observes) * self.controller[0] + asked * self.controller[1], dtype=float
        )
        accepted, seconds, going = session.play(gammas, forwards, controller)
        if self.observes:
            self.policy.observe(Outcome(gammas, accepted, seconds), self.state)
        if not going.all():
            self.state = select_rows(self.state, going)
        return rows, positions, gammas, accepted, forwards, seconds, controller, chosen, propensity, *kept

    def _choose(self, features: Features) -> IntArray:
        """(n,) how many tokens the policy wants at most."""
        if not self.chooses:
            return np.full(features.rows, np.iinfo(np.int64).max)
        chosen = self.policy.choose_gamma(features, self.state)
        return as_integers(chosen, features.rows, f"{self.policy.name}.choose_gamma")

    def _draft(self, features: Features, limits: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """How often the policy was asked inside the draft, draft forwards, and tokens to verify; each (n,)."""
        n = features.rows
        if not (self.draws or self.keeps):
            return np.zeros(n, dtype=np.int64), limits, limits
        asked, forwards, gammas = (np.zeros(n, dtype=np.int64) for _ in range(3))
        going = np.flatnonzero(limits > 0)
        index = 0
        while len(going):
            index += 1
            forwards[going] += 1
            asked[going] += self.draws
            signals = self.session.token_signals(going, index)
            drawn = self._ask("draw_token", "distribution", index, going, signals)
            gammas[going] += drawn
            more = drawn & (index < limits[going])
            signals = {name: values[more] for name, values in signals.items()}
            going = going[more]
            asked[going] += self.keeps and not self.draws  # one decision a token, whichever hooks it takes
            going = going[self._ask("keep_drafting", "drawn", index, going, signals)]
        return asked, forwards, gammas

    def _ask(
        self, method: str, when: When, index: int, rows: IntArray, signals: dict[str, npt.NDArray[np.float32]]
    ) -> BoolArray:
        """A policy's answer for the sequences at `rows`, whose part of the state it may change."""
        if not len(rows) or not self.policy.overrides(method):
            return np.ones(len(rows), dtype=bool)
        features = self.session.tracker.token(index, signals, rows, when)
        return ask(self.policy, method, features, self.state, rows)


def known_controller(policy: Policy, costs: CostModel) -> tuple[float, float] | None:
    """Seconds of a policy's work once a step and of one decision inside the draft, as far as `costs` knows them: those
    in there are of default parameters, and with others (more trees, a wider network) a decision takes another time."""
    known = costs.controller.get(policy.name)
    return None if known is None or policy.changed_params else known


def measure_controller(policy: Policy, traces: Rollouts, costs: CostModel) -> tuple[float, float]:
    """Median seconds of a policy's work once a step, observing included, and of one decision inside the draft.

    For one sequence on this machine: what it costs a live decoder, the signals not included. Measured while
    replaying one sequence at a time, with a copy of the policy: what that learns meanwhile is not kept.
    """
    timed = _Timed(copy.deepcopy(policy))
    for row in range(min(len(traces), 24)):
        _Run(timed, traces.take([row]), costs).run()
    before, inside, observing = (
        float(np.median(seconds)) if seconds else 0.0 for seconds in (timed.before, timed.inside, timed.observing)
    )
    return before + observing, inside


class _Timed(Policy):
    """Passes every question on to another policy, and notes how long the answer took."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.name, self.features = policy, policy.name, policy.features  # type: ignore[misc]
        self.before: list[float] = []
        self.inside: list[float] = []
        self.observing: list[float] = []

    def overrides(self, method: str) -> bool:
        return self.policy.overrides(method)

    def new_state(self, rows):  # type: ignore[no-untyped-def]
        return self.policy.new_state(rows)

    def choose_gamma(self, features, state):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        answer = self.policy.choose_gamma(features, state)
        self.before.append(time.perf_counter() - start)
        return answer

    def draw_token(self, features, state):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        answer = self.policy.draw_token(features, state)
        self.inside.append(time.perf_counter() - start)
        return answer

    def keep_drafting(self, features, state):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        answer = self.policy.keep_drafting(features, state)
        # One decision a token, whichever hooks it takes.
        if self.policy.overrides("draw_token"):
            self.inside[-1] += time.perf_counter() - start
        else:
            self.inside.append(time.perf_counter() - start)
        return answer

    def observe(self, outcome, state):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        self.policy.observe(outcome, state)
        self.observing.append(time.perf_counter() - start)
