"""What every policy must keep to, wherever it runs."""

import contextlib
import copy
import functools
import inspect
import json
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from speckv import saving
from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.features import FEATURES, Features, FloatArray, When, check_features
from speckv.plugins import policy_class
from speckv.policy import Clairvoyant, Outcome, Policy, State, as_booleans, as_integers
from speckv.replaying import Replay, measure_controller, replay
from speckv.testing.checks import Check, CheckFailed, CheckSkipped, expecting, make_checks, require, require_package
from speckv.testing.futures import change_future, copy_of, overwrite
from speckv.testing.recordings import dense, make_costs, make_rollouts, spelled
from speckv.traces import Rollout, Rollouts, arrays_of
from speckv.training import TrainedPolicy

#: Each decision of a step, and the kind of the features that it is made from.
DECISIONS: dict[str, When] = {"choose_gamma": "before", "draw_token": "distribution", "keep_drafting": "drawn"}
#: A decision may take this share of a target forward before `decides_in_time` warns.
TIME_SHARE = 0.02

_GAMMA_MAX, _BUDGET = 16, 32
_COLUMNS = ("sequence", "position", "gamma", "accepted", "forwards")


def policy_checks(
    policy: Policy,
    *,
    traces: Rollouts | None = None,
    costs: CostModel | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of a policy. None of them changes it: they work on clones, which they fit themselves.

    Args:
        policy: with the parameters to be checked.
        traces, costs: what it is fitted on and played on; by default a small recording made up by the kit.
        expected_failed_checks: name of a check -> why it fails.

    Raises:
        SpecKVError: no check has such a name.
    """
    case = _Case(policy, traces, costs)
    of_all: list[Callable[[_Case], None]] = [
        stores_parameters,
        describes_itself,
        asks_for_known_features,
        refuses_in_one_line,
        answers_in_range,
    ]
    if isinstance(policy, Clairvoyant):
        of_its_kind = [foresees_in_range]
    else:
        of_all += [decides_something, keeps_state_by_sequence]
        of_online, of_others = [serves_a_batch, keeps_its_memory_layout], [decides_each_row_alone, can_be_interleaved]
        of_its_kind = [
            reads_its_features,
            *(of_online if policy.online else of_others),
            *([states_its_propensity] if policy.overrides("choose_gamma") else []),
            *([draws_blindly] if policy.overrides("draw_token") else []),
            sees_no_future,
            copes_with_no_rows,
            decides_in_time,
            decodes_live_as_replayed,
            decodes_losslessly,
        ]
    if policy.online or type(policy).fit is not Policy.fit:
        of_its_kind += [fits_by_seed, fits_anew, fits_without_changing_parameters]
    of_its_kind += [
        keeps_nothing_hidden,
        leaves_the_recording_alone,
        survives_saving,
        saves_no_pickle,
        copes_with_extreme_signals,
        copes_with_short_texts,
        copes_with_gamma_max_1,
        copes_with_every_compression,
        copes_with_unknown_costs,
    ]
    functions = [*of_all, *map(_if_it_plays, of_its_kind)]
    return expecting(make_checks(policy.label, functions, case), expected_failed_checks)


class _Case:
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
        return make_rollouts(prompts=4, gamma_max=_GAMMA_MAX, budget=_BUDGET, compressions=compressions, seed=seed)

    def alone(self, *sequences: Rollout) -> Rollouts:
        """Sequences at the first of the compressions, as dense arrays."""
        known = [replace(sequence, compression=self.compressions[0]) for sequence in sequences]
        return dense(*known, gamma_max=_GAMMA_MAX)

    def ask_all(self, policy: Policy, rows: int) -> Iterator[tuple[str, npt.ArrayLike, State]]:
        """Ask a policy once for each of its decisions, and let it observe: what it answers, and its state behind it."""
        state = policy.new_state(rows)
        for number, (method, when) in enumerate(DECISIONS.items()):
            if policy.overrides(method):
                known = tuple(name for name in policy.features if _exists(name, when))
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
        return _fit(self.clone(), self.traces, self.costs)

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


_Function = Callable[[_Case], None]


def _if_it_plays(function: _Function) -> _Function:
    """The check, skipped where the policy can't be replayed: that has a check of its own."""

    @functools.wraps(function)
    def check(case: _Case) -> None:
        assert case.run
        function(case)

    return check


def _fit(policy: Policy, traces: Rollouts, costs: CostModel, seed: int = 0) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that does not converge on so little
        if isinstance(policy, TrainedPolicy):
            policy.steps = min(policy.steps, 640)  # what it learns is not what is checked
        return policy.fit(traces, costs, seed=seed)


def _require_same(one: Replay, other: Replay, when: str) -> None:
    """Raise CheckFailed if two replays differ, at the first step where they do."""
    steps = [list(zip(*(getattr(run, name).tolist() for name in _COLUMNS), strict=True)) for run in (one, other)]
    for mine, theirs in zip(*steps, strict=False):
        require(mine == theirs, f"{when}, {_told(theirs)} instead of {_told(mine)}")
    require(len(steps[0]) == len(steps[1]), f"{when}, it takes {len(steps[1])} steps instead of {len(steps[0])}")


def _told(step: tuple[int, ...]) -> str:
    return "in sequence {} at position {} it drafts {} tokens, of which {} stand, in {} forwards".format(*step)


def _require_one_line(error: Exception) -> None:
    require(str(error) and "\n" not in str(error), f"an error must be one line: {str(error)!r}")


@contextlib.contextmanager
def _may_refuse() -> Iterator[None]:
    """What is done here may work, or raise a SpecKVError of one line."""
    try:
        yield
    except SpecKVError as error:
        _require_one_line(error)


def _require_answers(case: _Case, rows: int) -> None:
    """Raise SpecKVError if an answer has another dtype, shape or range than it must."""
    for method, answer, _ in case.ask_all(case.fitted(), rows):
        if method != "observe":
            check = as_integers if method == "choose_gamma" else as_booleans
            check(answer, rows, method)


def _exists(name: str, when: When) -> bool:
    order = list(DECISIONS.values())
    return order.index(FEATURES[name].when) <= order.index(when)


class _Watched(Policy):
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


# What it is


def stores_parameters(case: _Case) -> None:
    """The constructor stores each parameter under its name, and does nothing else; a clone is made from them."""
    for parameter in inspect.signature(type(case.policy)).parameters.values():
        named = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        require(named, f"the constructor takes {parameter}; every parameter must have a name of its own")
        require(parameter.default is not parameter.empty, f"the parameter {parameter.name!r} has no default")
    parameters = case.policy.get_params()
    _require_equal_parameters(parameters, case.clone().get_params(), "a clone")
    for name, value in type(case.policy)().get_params().items():
        default = inspect.signature(type(case.policy)).parameters[name].default
        _require_equal_parameters({name: default}, {name: value}, "the constructor")


def _require_equal_parameters(one: dict[str, Any], other: dict[str, Any], who: str) -> None:
    for name, value in one.items():
        same = json.dumps(value, default=repr) == json.dumps(other[name], default=repr)  # a tuple is saved as a list
        require(
            same, f"{who} turns the parameter {name!r} from {value!r} into {other[name]!r}; it must be stored as is"
        )


def describes_itself(case: _Case) -> None:
    """It has a name that the command line can take, a docstring, and a source."""
    policy = case.policy
    name = policy.name
    plain = isinstance(name, str) and name and not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-_.+")
    require(plain, f"its name is {name!r}; it must consist of lower-case letters, digits and -_.+")
    require(inspect.getdoc(type(policy)) != inspect.getdoc(Policy), "it has no docstring that says what it does")
    require(isinstance(policy.source, str) and policy.source.strip(), "its `source` does not say where it comes from")


def decides_something(case: _Case) -> None:
    """It overrides one of the decisions."""
    decides = any(case.policy.overrides(method) for method in DECISIONS)
    require(decides, f"it decides nothing: override one of {', '.join(DECISIONS)}")


def asks_for_known_features(case: _Case) -> None:
    """`features` is a tuple of names in `speckv.features.FEATURES`, each once."""
    names = case.policy.features
    require(isinstance(names, tuple), f"`features` is a {type(names).__name__}; it must be a tuple of names")
    check_features(names)
    require(len(set(names)) == len(names), "`features` names one twice")


class _Reading(_Watched):
    """Notes which features are read."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.read: set[str] = set()

    def shown(self, method: str, features: Features) -> Features:
        return _Noting(dict(features), features.rows, DECISIONS[method], self.read)


class _Noting(Features):
    def __init__(self, values: dict[str, FloatArray], rows: int, when: When, read: set[str]) -> None:
        super().__init__(values, rows, when)
        self._read = read

    def __getitem__(self, name: str) -> FloatArray:
        self._read.add(name)
        return super().__getitem__(name)


def reads_its_features(case: _Case) -> None:
    """Every feature that it declares is read."""
    policy = _Reading(case.fitted())
    for traces in (case.traces, _extreme(case, "1", 0.5), _extreme(case, "0", 1.0)):
        replay(policy, traces, case.costs)
    unread = set(policy.policy.features) - policy.read
    require(not unread, f"it declares the feature {min(unread, default='')!r} and does not read it")


def keeps_state_by_sequence(case: _Case) -> None:
    """`new_state` makes arrays with a row for each sequence, and the decisions keep names and rows."""
    policy = case.fitted()
    for rows in (1, 5):
        new = _layout(policy.new_state(rows), rows)
        for method, _, state in case.ask_all(policy, rows):
            now = _layout(state, rows)
            require(now == new, f"behind {method} its state holds {', '.join(now) or 'nothing'} instead of "
                    f"{', '.join(new) or 'nothing'}")  # fmt: skip


def _layout(state: State, rows: int) -> list[str]:
    for name, array in state.items():
        require(isinstance(array, np.ndarray), f"its state {name!r} is no array, but a {type(array).__name__}")
        require(array.shape[:1] == (rows,), f"its state {name!r} has shape {array.shape} for {rows} sequences")
    return sorted(state)


# How it decides


def answers_in_range(case: _Case) -> None:
    """Every decision has the dtype, shape and range of the contract, in a replay and for 1 and 7 rows."""
    if isinstance(error := case._first_run, Exception):
        raise CheckFailed(f"{type(error).__name__}: {error}") from error
    chances = case.run.propensity
    known = chances[~np.isnan(chances)]
    require(((known > 0) & (known <= 1)).all(), f"its propensity is {known.min(initial=1)} to {known.max(initial=0)}; "
            "it must be above 0 and at most 1, or NaN where it is not known")  # fmt: skip
    if not isinstance(case.policy, Clairvoyant):
        for rows in (1, 7):
            _require_answers(case, rows)


def foresees_in_range(case: _Case) -> None:
    """A bound plans gammas that can be played, and as many draft forwards or one more."""
    policy = case.fitted()
    assert isinstance(policy, Clairvoyant)
    gammas, forwards = policy.foresee(case.traces, case.costs)
    shape = case.traces.tokens.shape
    for name, plan in (("gammas", gammas), ("forwards", forwards)):
        fits = plan.dtype.kind in "iu" and plan.shape[0] == shape[0] and plan.shape[1] >= shape[1]
        require(fits, f"its {name} must be integers of shape {shape} and are {plan.dtype} of shape {plan.shape}")
    gammas, forwards = gammas[:, : shape[1]], forwards[:, : shape[1]]
    inside = np.arange(shape[1]) < case.traces.lengths[:, None]
    require(gammas[inside].min() >= 0, "it plans a gamma below 0")
    more = np.unique((forwards - gammas)[inside])
    require(set(more.tolist()) <= {0, 1}, f"it plans {more.max()} draft forwards more than tokens; at most one is one")


def states_its_propensity(case: _Case) -> None:
    """Asked again and again with other lots, it chooses each gamma as often as it says that it does."""
    policy, calls = case.fitted(), 400
    replay(policy, case.traces, case.costs)  # what learns as it runs has its first tries behind it
    before = tuple(name for name in policy.features if _exists(name, "before"))
    features = case.random_features(before, 1, "before")
    stated: dict[int, list[float]] = {}
    for seed in range(calls):
        if "random_state" in policy.get_params():
            policy.random_state = seed  # type: ignore[attr-defined]
        state = policy.new_state(1)
        gamma = int(np.ravel(policy.choose_gamma(features, state))[0])
        stated.setdefault(gamma, []).append(float(np.ravel(policy.propensity(state))[0]))
    for gamma, chances in stated.items():
        share, chance = len(chances) / calls, float(np.mean(chances))
        wrong = abs(share - chance) > 5 * np.sqrt(max(chance * (1 - chance), 0) / calls) + 1e-9
        require(not wrong, f"it chooses gamma {gamma} in {share:.1%} of {calls} calls, and says that its propensity is "
                f"{chance:.3g}; NaN says that it is not known")  # fmt: skip


def decides_each_row_alone(case: _Case) -> None:
    """What it decides for many sequences at once is what it decides for each alone, in any order and number."""
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(case.traces)), 3))
    together = replay(case.fitted(), case.traces.take(order), case.costs)
    for row in range(len(case.traces)):
        alone = _part(replay(case.fitted(), case.traces.take([row]), case.costs), 0, row)
        for place in np.flatnonzero(order == row):
            _require_same(alone, _part(together, int(place), row), f"among {len(order)} sequences")


def _part(run: Replay, row: int, name: int) -> Replay:
    """The steps of one sequence, under another number."""
    mine = run.sequence == row
    columns = {column: getattr(run, column)[mine] for column in _COLUMNS}
    return replace(run, **columns | {"sequence": np.full(mine.sum(), name)})


class _OneByOne(_Watched):
    """Asks about each sequence in a call of its own, with a state of its own, as a host of several requests does."""

    def new_state(self, rows: int) -> State:
        self.states = {self.started + row: self.policy.new_state(1) for row in range(rows)}
        self.started += rows
        return {self._ROW: np.arange(self.started - rows, self.started)}

    def propensity(self, state: State) -> npt.ArrayLike:
        return np.array([np.ravel(self.policy.propensity(self.states[row]))[0] for row in state[self._ROW]])

    def observe(self, outcome: Outcome, state: State) -> None:
        for place, row in enumerate(state[self._ROW]):
            at = slice(place, place + 1)
            part = Outcome(outcome.drafted[at], outcome.accepted[at], outcome.seconds[at])
            self.policy.observe(part, self.states[row])

    def _pass_on(self, method: str, features: Features, state: State) -> npt.ArrayLike:
        answers = []
        for place, row in enumerate(state[self._ROW]):
            part = Features({name: array[place : place + 1] for name, array in features.items()}, 1, DECISIONS[method])
            answers.append(np.ravel(getattr(self.policy, method)(part, self.states[row]))[0])
        return np.array(answers)


def can_be_interleaved(case: _Case) -> None:
    """Sequences whose steps take turns, each with the state that it was given, are decided on as in one call."""
    interleaved = replay(_OneByOne(case.fitted()), case.traces, case.costs)
    _require_same(case.run, interleaved, "when the steps of several sequences take turns")


class _Together(_Watched):
    """An online policy that is asked about all sequences at once."""

    @property
    def online(self) -> bool:
        return False


def serves_a_batch(case: _Case) -> None:
    """A live decoder may ask an online policy about several sequences at once."""
    policy = _Together(case.fitted())
    replay(policy, case.traces, case.costs)
    _require_numbers("memory", policy.policy.memory)


def _require_numbers(what: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    for name, array in arrays.items():
        require(not np.isnan(array).any(), f"its {what} {name!r} holds NaN")


def keeps_its_memory_layout(case: _Case) -> None:
    """Names, dtypes and shapes of the memory are those of `new_memory`, however much was decoded."""
    policy = case.fitted()
    new = {name: (array.dtype, array.shape) for name, array in policy.new_memory().items()}
    for traces in (case.traces, case.others):
        replay(policy, traces, case.costs)
        now = {name: (array.dtype, array.shape) for name, array in policy.memory.items()}
        require(now == new, f"its memory was {new} when it was new, and is {now}")


def keeps_nothing_hidden(case: _Case) -> None:
    """It plays the same again, also when another recording was played in between; an online one, from the memory that
    `fit` left it."""
    policy = case.fitted()
    memory = copy.deepcopy(policy.memory)
    for traces, when in ((None, "the second time"), (case.others, "after another recording")):
        replay(policy, case.traces if traces is None else traces, case.costs)
        policy.memory = copy.deepcopy(memory)
        _require_same(case.run, replay(policy, case.traces, case.costs), when)


def draws_blindly(case: _Case) -> None:
    """Whether to draw a token does not depend on which one would be drawn, whatever it is shown."""
    rows, answers = 40, []
    for seed in (1, 2):
        policy = case.fitted()
        state = policy.new_state(rows)
        before = tuple(name for name in FEATURES if _exists(name, "before"))
        if policy.overrides("choose_gamma"):
            policy.choose_gamma(case.random_features(before, rows, "before"), state)
        shown = dict(case.random_features(tuple(FEATURES), rows, "drawn"))
        shown["draft_probability"] = np.random.default_rng(seed).random(rows)
        asked = {name: values for name, values in shown.items() if name in (*policy.features, "draft_probability")}
        answer = policy.draw_token(Features(asked, rows, "drawn"), state)
        answers.append(as_booleans(answer, rows, "draw_token"))
    require((answers[0] == answers[1]).all(), "draw_token depends on the probability of the token that is to be drawn")


# What it may look at


class _Logged(_Watched):
    """Notes every answer, and when it was given.

    Attributes:
        answers: row -> answers in their order.
        moments: row -> tokens committed and drafted at each.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, ("position", "draft_index"))
        self.answers: dict[int, list[int]] = {}
        self.moments: dict[int, list[tuple[int, int]]] = {}

    def answered(self, method: str, answer: npt.ArrayLike, features: Features, state: State) -> None:
        answers = np.broadcast_to(answer, (features.rows,)).tolist()
        position = features["position"].astype(int).tolist()
        drafted = [0] * features.rows if method == "choose_gamma" else features["draft_index"].astype(int).tolist()
        for row, said, *moment in zip(state[self._ROW].tolist(), answers, position, drafted, strict=True):
            self.answers.setdefault(row, []).append(said)
            self.moments.setdefault(row, []).append((moment[0], moment[1]))


def sees_no_future(case: _Case) -> None:
    """No decision changes when everything that is recorded behind its moment is changed.

    What is changed is the recording that it was fitted on, in place: a policy that kept it would see the change.
    """
    rng = np.random.default_rng(0)
    recorded = copy_of(case.traces)
    first = _Logged(case.fitted())
    replay(first, case.traces, case.costs)
    try:
        for number in range(8):
            # What an online policy learns from one sequence it rightly takes to the next.
            changed = [number % len(recorded)] if case.policy.online else range(len(recorded))
            calls = {row: int(rng.integers(len(first.answers[row]))) for row in changed if row in first.answers}
            story = recorded
            for row, call in calls.items():
                story = change_future(story, row, *first.moments[row][call], rng)
            overwrite(case.traces, story)
            second = _Logged(case.fitted())
            replay(second, case.traces, case.costs)
            for row, call in calls.items():
                _require_same_answers(first, second, row, call)
    finally:
        overwrite(case.traces, recorded)


def _require_same_answers(first: _Logged, second: _Logged, row: int, call: int) -> None:
    """Raise CheckFailed unless a sequence got the same answers up to this one."""
    pairs = zip(first.answers[row][: call + 1], second.answers[row], strict=False)
    for index, (one, other) in enumerate(pairs):
        position, drafted = first.moments[row][index]
        require(
            one == other,
            f"in sequence {row}, behind {position} committed and {drafted} drafted tokens, it answers {one}, and "
            f"{other} once the recorded future is changed",
        )


def leaves_the_recording_alone(case: _Case) -> None:
    """Neither fitting nor playing changes the recording."""
    traces = copy_of(case.others)
    replay(_fit(case.clone(), traces, case.costs), traces, case.costs)
    for (name, one), (_, other) in zip(arrays_of(case.others), arrays_of(traces), strict=True):
        require(np.array_equal(one, other), f"it changes {name} of the recording that it is given")


# What it learns


def fits_by_seed(case: _Case) -> None:
    """The same seed gives the same policy."""
    _require_same_learned(case.fitted(), _fit(case.clone(), case.traces, case.costs), "fitted again with the same seed")


def fits_anew(case: _Case) -> None:
    """Fitting twice is fitting once: nothing is left of an earlier fit, nor of what was played."""
    policy = _fit(case.clone(), case.others, case.costs)
    replay(policy, case.others, case.costs)
    _require_same_learned(case.fitted(), _fit(policy, case.traces, case.costs), "fitted behind another fit")
    _require_same(case.run, replay(policy, case.traces, case.costs), "fitted behind another fit")


def _require_same_learned(one: Policy, other: Policy, when: str) -> None:
    for what in ("fitted", "memory"):
        mine, theirs = getattr(one, what), getattr(other, what)
        require(mine.keys() == theirs.keys(), f"{when}, {what} holds {sorted(theirs)} instead of {sorted(mine)}")
        for name, array in mine.items():
            same = np.asarray(array).dtype == np.asarray(theirs[name]).dtype and np.array_equal(array, theirs[name])
            require(same, f"{when}, {what}[{name!r}] is {theirs[name]!r} instead of {array!r}"[:300])


def fits_without_changing_parameters(case: _Case) -> None:
    """`fit` returns the policy itself, with the parameters that it had."""
    policy = case.clone()
    require(_fit(policy, case.traces, case.costs) is policy, "fit must return the policy itself")
    for name, value in case.policy.get_params().items():
        found = policy.get_params()[name]
        same = json.dumps(found, default=repr) == json.dumps(value, default=repr)
        require(
            same, f"fit changes the parameter {name!r} from {value!r} to {found!r}; what it learns goes to `fitted`"
        )


@contextlib.contextmanager
def _saved(policy: Policy) -> Iterator[pathlib.Path]:
    """The policy in a folder, from which it can be loaded whether it is registered or not."""

    def find(name: str) -> type[Policy]:
        return type(policy) if name == policy.name else policy_class(name)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saving, "policy_class", find):
        path = pathlib.Path(folder) / "saved"
        saving.save_policy(policy, path)
        yield path


def survives_saving(case: _Case) -> None:
    """Loaded, it has the parameters, fitted arrays and memory that it was saved with, and plays the same."""
    policy = case.fitted()
    replay(policy, case.others, case.costs)
    with _saved(policy) as path:
        loaded = saving.load_policy(path)
        _require_equal_parameters(policy.get_params(), loaded.get_params(), "loading")
        _require_same_learned(policy, loaded, "loaded")
        one, other = (replay(known, case.traces, case.costs) for known in (policy, loaded))
        _require_same(one, other, "loaded")


def saves_no_pickle(case: _Case) -> None:
    """None of its arrays is a pickle in disguise."""
    for name, array in (case.fitted().fitted | case.fitted().memory).items():
        start = np.ravel(array)[:2].tobytes() if np.asarray(array).dtype.itemsize == 1 else b""
        disguised = len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5
        require(not disguised, f"its array {name!r} is a pickled object; keep numbers that the policy itself can read")


# What it must survive


def _extreme(case: _Case, right: str, top1: float) -> Rollouts:
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
    values |= {f"off_{name}": [value] * length * _GAMMA_MAX for name, value in signals.items()}
    letters = (right * length)[:length]
    off = spelled(letters, gamma_max=_GAMMA_MAX).off_lengths.sum()
    values = {name: array[:off] if name.startswith("off_") else array for name, array in values.items()}
    return case.alone(spelled(letters, gamma_max=_GAMMA_MAX, **values))


class _Finite(_Watched):
    """Looks for NaN behind every step."""

    def overrides(self, method: str) -> bool:
        return method == "observe" or super().overrides(method)

    def observe(self, outcome: Outcome, state: State) -> None:
        super().observe(outcome, state)
        _require_numbers("state", state)
        _require_numbers("memory", self.policy.memory)


def copes_with_extreme_signals(case: _Case) -> None:
    """Probabilities of 0 and 1, the largest entropy, all right and all wrong: no warning, no NaN."""
    for right in ("1", "0", "10", "1110"):
        for top1 in (0.0, 0.5, 1.0):
            policy = case.fitted()
            with np.errstate(all="raise", under="ignore"):
                watched = policy if isinstance(policy, Clairvoyant) else _Finite(policy)
                replay(watched, _extreme(case, right, top1), case.costs)


def copes_with_short_texts(case: _Case) -> None:
    """In a text of one token there is no room for a draft, whatever the policy says."""
    for length in (1, 2):
        replay(case.fitted(), case.alone(spelled("1" * length, gamma_max=_GAMMA_MAX)), case.costs)


def copes_with_no_rows(case: _Case) -> None:
    """Asked about no sequence at all, it answers nothing."""
    _layout(case.fitted().new_state(0), 0)
    _require_answers(case, 0)


def copes_with_gamma_max_1(case: _Case) -> None:
    """Where no more than one token can be drafted it can be fitted and played, or is refused in one line."""
    traces = make_rollouts(prompts=2, gamma_max=1, budget=12, compressions=case.compressions)
    with _may_refuse():
        replay(case.fitted(), traces, case.costs)
    with _may_refuse():
        replay(_fit(case.clone(), traces, case.costs), traces, case.costs)


def copes_with_every_compression(case: _Case) -> None:
    """Fitted on two compressions, it plays on all of them, or is refused in one line."""
    costs = make_costs(draft=0.02, compressions=list(COMPRESSIONS))
    traces = make_rollouts(prompts=2, compressions=list(COMPRESSIONS), gamma_max=_GAMMA_MAX, budget=12)
    with _may_refuse():
        replay(case.fitted(), traces, costs)


def copes_with_unknown_costs(case: _Case) -> None:
    """Where the costs of a compression are unknown, it is refused in one line, or does not need them."""
    costs = make_costs(compressions=[name for name in COMPRESSIONS if name not in case.compressions][:1])
    with _may_refuse():
        _fit(case.clone(), case.others, costs)
    with _may_refuse():
        replay(case.fitted(), case.others, costs)


def refuses_in_one_line(case: _Case) -> None:
    """A parameter that makes no sense is taken, or refused by a SpecKVError, TypeError or ValueError of one line."""
    for name in inspect.signature(type(case.policy)).parameters:
        values: tuple[Any, ...] = (-1, float("nan"), "nonsense", None, [], 10**9)
        for value in values:
            try:
                type(case.policy)(**case.policy.get_params() | {name: value})
            except (SpecKVError, TypeError, ValueError) as error:
                _require_one_line(error)


def decides_in_time(case: _Case) -> None:
    """Warns of decisions that take a noticeable share of a target forward. It never fails."""
    seconds = sum(measure_controller(case.fitted(), case.traces.take([0, 1]), case.costs))
    compression = next(iter(case.costs.verify))
    forward = float(case.costs.verify[compression].seconds.min())
    if seconds > TIME_SHARE * forward:
        slow = f"slow: it decides in {seconds * 1e6:.0f} us, {seconds / forward:.1%} of a target forward"
        warnings.warn(slow, SpecKVWarning, stacklevel=2)


# How it decodes


class _WithSeconds(_Watched):
    """Is told, step by step, that the step took as long as this."""

    def __init__(self, policy: Policy, seconds: npt.NDArray[np.float64]) -> None:
        super().__init__(policy)
        self.seconds = iter(seconds)

    def observe(self, outcome: Outcome, state: State) -> None:
        super().observe(replace(outcome, seconds=np.array([next(self.seconds)])), state)


def _live_case(case: _Case) -> tuple[Policy, Rollouts, CostModel]:
    """A policy that was fitted on the recording of the tiny pair; the recording, and costs of it."""
    require_package("transformers", "live")
    require_package("torch", "live")
    from speckv.testing.pairs import tiny_recording

    traces, costs = copy_of(tiny_recording()), make_costs(draft=0.02, compressions=["fp32"])
    return _fit(case.clone(), traces, costs), traces, costs


def decodes_live_as_replayed(case: _Case) -> None:
    """The live decoder and the replay take the same steps, on a tiny pair of models with random weights."""
    policy, traces, costs = _live_case(case)
    from speckv.live import SpeculativeDecoder
    from speckv.testing.pairs import tiny_pair, tiny_texts

    decoding = copy.deepcopy(policy)
    run = replay(policy, traces, costs)
    target, draft = tiny_pair()
    for row, identifier in enumerate(traces.ids):
        prompt, _ = tiny_texts()[int(identifier[1:])]
        mine = run.sequence == row
        told = _WithSeconds(decoding, run.seconds[mine])
        decoder = SpeculativeDecoder(target, draft, told, gamma_max=traces.gamma_max, costs=costs)
        steps = decoder.generate(prompt, traces.manifest.max_new_tokens).steps
        live = [(step.position, step.gamma, step.accepted, step.forwards) for step in steps]
        columns = (run.position, run.gamma, run.accepted, run.forwards)
        replayed = list(zip(*(column[mine].tolist() for column in columns), strict=True))
        require(
            live == replayed,
            f"sequence {row} is decoded in the steps {live}, and replayed in {replayed}, each (position, gamma, "
            "accepted, forwards)",
        )


class _Nothing(Policy):
    """Drafts nothing."""

    name = "nothing"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 0


def decodes_losslessly(case: _Case) -> None:
    """Live text is the target's own, greedy, and sampled with Gumbel noise that the policy must have no part in."""
    policy, traces, costs = _live_case(case)
    from speckv.live import Gumbel, SpeculativeDecoder
    from speckv.testing.pairs import tiny_pair, tiny_texts

    target, draft = tiny_pair()
    alone = SpeculativeDecoder(target, draft, _Nothing(), sampler=Gumbel(0.8))
    for prompt, own in tiny_texts():
        decoder = SpeculativeDecoder(target, draft, copy.deepcopy(policy), gamma_max=traces.gamma_max, costs=costs)
        said = decoder.generate(prompt, traces.manifest.max_new_tokens).tokens
        require(said == own, f"the target alone says {own}, and with the policy {said}")
        decoder.sampler = Gumbel(0.8)
        said, own = (host.generate(prompt, len(own), seed=3).tokens for host in (decoder, alone))
        require(said == own, f"sampling with the same noise, the target alone says {own}, and with the policy {said}")
