"""Policies on held-out prompts, step by step, and how well their chances of acceptance hold there."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speckv.comparison import HoldOut, folds_of, naming
from speckv.costs import CostModel
from speckv.features import BoolArray, Features, FloatArray, IntArray
from speckv.policy import Outcome, Policy, State
from speckv.replaying import Replay, known_controller, replay
from speckv.traces import Rollouts

BINS = 10
#: Of a policy's state that stays hidden from it.
_ROW = "speckv.report/row"


@dataclass(frozen=True)
class Reliability:
    """Chances of acceptance against how often drafted tokens were accepted, by bins of equal width.

    Attributes:
        predicted, observed: (bins,) means of the tokens in a bin; bins without any are left out.
        tokens: (bins,) how many.
        ece: expected calibration error, the mean distance of the two, weighted by tokens.
        brier: mean squared distance of chance and outcome.
    """

    predicted: FloatArray
    observed: FloatArray
    tokens: IntArray
    ece: float
    brier: float

    @classmethod
    def of(cls, chances: FloatArray, accepted: BoolArray) -> "Reliability":
        """Args: chances, accepted: (n,), of one token each."""
        at = np.minimum((chances * BINS).astype(np.int64), BINS - 1)
        tokens = np.bincount(at, minlength=BINS)
        kept = tokens > 0
        predicted, observed = (
            np.bincount(at, weights=values, minlength=BINS)[kept] / tokens[kept] for values in (chances, accepted)
        )
        ece = float(np.abs(predicted - observed) @ tokens[kept] / tokens.sum())
        return cls(predicted, observed, tokens[kept], ece, float(np.mean((chances - accepted) ** 2)))


@dataclass(frozen=True)
class HeldOut:
    """What some policies did on the prompts of one fold, fitted on the others.

    Attributes:
        rows: (n,) sequences of the fold, as rows of the whole recording.
        replays: (costs, policy) -> its steps; a replay's sequence 0 is the first of `rows`.
        reliability: (costs, policy) -> of the chances that the policy itself computed, if it has a model of them.
        draft_reliability: of the draft's own probability of its token, at every position of the path.
    """

    rows: IntArray
    replays: Mapping[tuple[str, str], Replay]
    reliability: Mapping[tuple[str, str], Reliability]
    draft_reliability: Reliability


def play(
    policies: Sequence[Policy],
    traces: Rollouts,
    costs: Sequence[CostModel],
    folds: int,
    seed: int,
    hold_out: HoldOut = "prompt",
) -> HeldOut:
    """Replay policies on the first of the folds that `compare` makes, as it does.

    Args:
        policies: unfitted.
        traces: the whole recording.
        costs: the policies are fitted and replayed under each of these.
        folds, seed, hold_out: of the comparison.
    """
    fold_of = folds_of(traces, folds, seed, hold_out)
    rows = np.flatnonzero(fold_of == 0)
    train, test = traces.take(fold_of != 0), traces.take(rows)
    replays, reliability = {}, {}
    for model in costs:
        for policy in policies:
            key = model.name, policy.label
            with naming(policy):
                fitted = copy.deepcopy(policy).forget().fit(train, model, seed)
                watched = _Watched(fitted) if policy.overrides("acceptance") else None
                replays[key] = replay(watched or fitted, test, model, known_controller(fitted, model))
            if watched and watched.log:
                reliability[key] = watched.reliability(test)
    inside = np.arange(test.tokens.shape[1]) < test.lengths[:, None]
    chances, right = test.signals["draft_top1"][inside].astype(float), (test.tokens == test.draft_tokens)[inside]
    return HeldOut(rows, replays, reliability, Reliability.of(chances, right))


class _Watched(Policy):
    """Plays what another policy plays, and notes what chance that one gives to each drafted token."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.name = policy, policy.name  # type: ignore[misc]
        self.features = tuple(dict.fromkeys([*policy.features, "position", "draft_index"]))
        self._started = 0
        #: Row, position, index in the draft, and chance, of the drafted tokens.
        self.log: list[tuple[npt.NDArray[np.float64], ...]] = []

    def overrides(self, method: str) -> bool:
        return method == "draw_token" or self.policy.overrides(method)

    def new_state(self, rows: int) -> State:
        row = self._started + np.arange(rows)  # sequences of an online policy start one at a time
        self._started += rows
        return self.policy.new_state(rows) | {_ROW: row}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self._ask("choose_gamma", features, state)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        chances = np.broadcast_to(self.policy.acceptance(features), features.rows)
        drawn = np.broadcast_to(self._ask("draw_token", features, state), features.rows)
        log = (state[_ROW], features["position"], features["draft_index"], chances)
        self.log.append(tuple(column[drawn] for column in log))
        return drawn

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self._ask("keep_drafting", features, state)

    def observe(self, outcome: Outcome, state: State) -> None:
        self._ask("observe", outcome, state)

    def _ask(self, method: str, told: Features | Outcome, state: State) -> npt.ArrayLike:
        """What the policy answers, which sees and changes its own part of the state."""
        own = {name: array for name, array in state.items() if name != _ROW}
        answer: npt.ArrayLike = getattr(self.policy, method)(told, own)
        state.update(own)
        return answer

    def reliability(self, traces: Rollouts) -> Reliability:
        """Of the tokens that were drawn behind right ones: of the others nobody asks what they would have been."""
        row, position, index, chances = (np.concatenate(column) for column in zip(*self.log, strict=True))
        run = traces.run[row, position.astype(np.int64)]
        tried = index <= run + 1
        return Reliability.of(chances[tried], (index <= run)[tried])
