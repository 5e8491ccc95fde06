"""A policy to be checked, and what several checks share."""

import contextlib
import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FEATURES, Features, When
from speckv.policy import Outcome, Policy, State, as_booleans, as_integers
from speckv.replaying import Replay, replay
from speckv.testing.checks import CheckSkipped, require
from speckv.testing.futures import copy_of
from speckv.testing.recordings import dense, make_costs, make_rollouts, spelled
from speckv.traces import Rollout, Rollouts, arrays_of
from speckv.training import TrainedPolicy

#: Each decision of a step, and the kind of the features that it is made from.
DECISIONS: dict[str, When] = {"choose_gamma": "before", "draw_token": "distribution", "keep_drafting": "drawn"}
#: A decision may take this share of a target forward before `decides_in_time` warns.
TIME_SHARE = 0.02

GAMMA_MAX, BUDGET = 16, 32
COLUMNS = ("sequence", "position", "gamma", "accepted", "forwards")


class Case:
    """A policy to be checked, and what several checks need.

    Attributes:
        traces, costs: what it is fitted on and played on.
        compressions: what they have in common with everything else that it is played on.
        others: another recording.
    """

    def __init__(self, policy: Policy, traces: Rollouts | None, costs: CostModel | None) -> None:
        self.policy = policy
        self.traces = self.recording(0, ["bf16", "nf4"]) if traces is None else copy_of(traces)
        self.compressions = sorted(set(self.traces.compressions.tolist()))
        self.others = self.recording(1, self.compressions)
        self.costs = costs or make_costs(draft=0.02, compressions=self.compressions)

    @staticmethod
    def recording(seed: int, compressions: Sequence[str]) -> Rollouts:
        return make_rollouts(prompts=4, gamma_max=GAMMA_MAX, budget=BUDGET, compressions=compressions, seed=seed)

    def alone(self, *sequences: Rollout) -> Rollouts:
        """Sequences at the first of the compressions, as dense arrays."""
        known = [replace(sequence, compression=self.compressions[0]) for sequence in sequences]
        return dense(*known, gamma_max=GAMMA_MAX)

    def extreme(self, right: str, top1: float) -> Rollouts:
        """A sequence with the same signals throughout; `right` says over and over where the draft is right."""
        length = 40
        spread = 24 * np.log(2)  # nats of a uniform distribution over the largest vocabulary that can be recorded
        signals = {
            "draft_top1": top1,
            "draft_top2": (1 - top1) / 2,
            "draft_top10": 1.0 if top1 else 0.0,
            "draft_entropy": spread * (1 - top1),
            "target_entropy": spread * (1 - top1),
            "target_margin": 1e4 * top1,
        }
        values: dict[str, Any] = {name: [value] * length for name, value in signals.items()}
        values |= {f"off_{name}": [value] * length * GAMMA_MAX for name, value in signals.items()}
        letters = (right * length)[:length]
        off = spelled(letters, gamma_max=GAMMA_MAX).off_lengths.sum()
        values = {name: array[:off] if name.startswith("off_") else array for name, array in values.items()}
        return self.alone(spelled(letters, gamma_max=GAMMA_MAX, **values))

    def ask_all(self, policy: Policy, rows: int) -> Iterator[tuple[str, npt.ArrayLike, State]]:
        """Ask a policy once for each of its decisions, and let it observe: what it answers, and its state behind it."""
        state = policy.new_state(rows)
        for number, (method, when) in enumerate(DECISIONS.items()):
            if policy.overrides(method):
                known = tuple(name for name in policy.features if exists_at(name, when))
                features = self.random_features(known, rows, when, number)
                yield method, getattr(policy, method)(features, state), state
        drafted = np.full(rows, 3)
        policy.observe(Outcome(drafted, np.arange(rows) % 4, np.full(rows, 0.1)), state)
        yield "observe", (), state

    def random_features(self, names: tuple[str, ...], rows: int, when: When, seed: int = 0) -> Features:
        """Features within their range."""
        rng = np.random.default_rng(seed)
        codes = [list(COMPRESSIONS).index(name) for name in self.compressions]
        draws: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "probability": lambda: rng.uniform(0.05, 0.95, rows),
            "0 or 1": lambda: np.zeros(rows),
            "code": lambda: rng.choice(codes, rows),
            "ratio": lambda: np.full(rows, 0.3),
            "tokens": lambda: rng.integers(1, 5, rows),
            "sequences": lambda: np.ones(rows),
        }
        of_unit = {name: draws.get(FEATURES[name].unit, lambda: rng.gamma(1.0, 1.0, rows)) for name in names}
        return Features({name: draw().astype(float) for name, draw in of_unit.items()}, rows, when)

    def clone(self) -> Policy:
        """Another policy with the same parameters."""
        return type(self.policy)(**copy.deepcopy(self.policy.get_params()))

    @functools.cached_property
    def _fitted(self) -> Policy:
        return fit_quietly(self.clone(), self.traces, self.costs)

    def fitted(self) -> Policy:
        """A clone that was fitted on the traces. What it may have kept of them is not copied: they are the same."""
        memo = {id(kept): kept for kept in (self.traces, *(array for _, array in arrays_of(self.traces)))}
        return copy.deepcopy(self._fitted, memo)

    @functools.cached_property
    def _first_run(self) -> Replay | Exception:
        try:
            return replay(self.fitted(), self.traces, self.costs)
        except Exception as error:
            return error

    @property
    def run(self) -> Replay:
        """What the fitted policy plays on the traces. Without it, most checks have nothing to say."""
        if isinstance(self._first_run, Exception):
            raise CheckSkipped("it can't be replayed: see the check 'answers_in_range'") from self._first_run
        return self._first_run


_Function = Callable[[Case], None]


def if_it_plays(function: _Function) -> _Function:
    """The check, skipped where the policy can't be replayed: that has a check of its own."""

    @functools.wraps(function)
    def check(case: Case) -> None:
        assert case.run
        function(case)

    return check


def fit_quietly(policy: Policy, traces: Rollouts, costs: CostModel, seed: int = 0) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that does not converge on so little
        if isinstance(policy, TrainedPolicy):
            policy.steps = min(policy.steps, 640)  # what it learns is not what is checked
        return policy.fit(traces, costs, seed=seed)


def require_same(one: Replay, other: Replay, when: str) -> None:
    """Raise CheckFailed if two replays differ, at the first step where they do."""
    steps = [list(zip(*(getattr(run, name).tolist() for name in COLUMNS), strict=True)) for run in (one, other)]
    for mine, theirs in zip(*steps, strict=False):
        require(mine == theirs, f"{when}, {_told(theirs)} instead of {_told(mine)}")
    require(len(steps[0]) == len(steps[1]), f"{when}, it takes {len(steps[1])} steps instead of {len(steps[0])}")


def _told(step: tuple[int, ...]) -> str:
    return "in sequence {} at position {} it drafts {} tokens, of which {} stand, in {} forwards".format(*step)


def require_one_line(error: Exception) -> None:
    require(str(error) and "\n" not in str(error), f"an error must be one line: {str(error)!r}")


@contextlib.contextmanager
def may_refuse() -> Iterator[None]:
    """What is done here may work, or raise a SpecKVError of one line."""
    try:
        yield
    except SpecKVError as error:
        require_one_line(error)


def require_answers(case: Case, rows: int) -> None:
    """Raise SpecKVError if an answer has another dtype, shape or range than it must."""
    for method, answer, _ in case.ask_all(case.fitted(), rows):
        if method != "observe":
            check = as_integers if method == "choose_gamma" else as_booleans
            check(answer, rows, method)


def exists_at(name: str, when: When) -> bool:
    order = list(DECISIONS.values())
    return order.index(FEATURES[name].when) <= order.index(when)


def layout(state: State, rows: int) -> list[str]:
    for name, array in state.items():
        require(isinstance(array, np.ndarray), f"its state {name!r} is no array, but a {type(array).__name__}")
        require(array.shape[:1] == (rows,), f"its state {name!r} has shape {array.shape} for {rows} sequences")
    return sorted(state)


def require_numbers(what: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    for name, array in arrays.items():
        require(not np.isnan(array).any(), f"its {what} {name!r} holds NaN")


def require_equal_parameters(one: dict[str, Any], other: dict[str, Any], who: str) -> None:
    for name, value in one.items():
        same = json.dumps(value, default=repr) == json.dumps(other[name], default=repr)  # a tuple is saved as a list
        require(
            same, f"{who} turns the parameter {name!r} from {value!r} into {other[name]!r}; it must be stored as is"
        )


class Watched(Policy):
    """Passes every question on to another policy, row numbers apart. Subclasses look on, or ask differently.

    Rows are numbered through all sequences that ever started.
    """

    _ROW = "speckv.testing/row"

    def __init__(self, policy: Policy, more: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.policy = policy
        self.name, self.features = policy.name, tuple(dict.fromkeys((*policy.features, *more)))  # type: ignore[misc]
        self.started = 0

    def overrides(self, method: str) -> bool:
        return self.policy.overrides(method)

    @property
    def online(self) -> bool:
        return self.policy.online

    @property
    def required_gamma(self) -> int:
        return self.policy.required_gamma

    def new_state(self, rows: int) -> State:
        self.started += rows
        return self.policy.new_state(rows) | {self._ROW: np.arange(self.started - rows, self.started)}

    def propensity(self, state: State) -> npt.ArrayLike:
        return self.policy.propensity(state)

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self._pass_on("choose_gamma", features, state)

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return self._pass_on("draw_token", features, state)

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return self._pass_on("keep_drafting", features, state)

    def observe(self, outcome: Outcome, state: State) -> None:
        own = {name: array for name, array in state.items() if name != self._ROW}
        self.policy.observe(outcome, own)
        state.update(own)

    def _pass_on(self, method: str, features: Features, state: State) -> npt.ArrayLike:
        own = {name: array for name, array in state.items() if name != self._ROW}
        known = {name: features[name] for name in self.policy.features if name in list(features)}
        asked = self.shown(method, Features(known, features.rows, DECISIONS[method]))
        answer: npt.ArrayLike = getattr(self.policy, method)(asked, own)
        state.update(own)
        self.answered(method, answer, features, state)
        return answer

    def shown(self, method: str, features: Features) -> Features:
        """The features that the policy gets."""
        return features

    def answered(self, method: str, answer: npt.ArrayLike, features: Features, state: State) -> None:
        """What the policy answered."""
