"""How a policy decides: within range, each sequence by itself, by what it declares."""

import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from speckv.features import FEATURES, Features
from speckv.policy import Clairvoyant, Outcome, State, as_booleans
from speckv.replaying import Replay, replay
from speckv.testing.checks import CheckFailed, require
from speckv.testing.policies.cases import (
    COLUMNS,
    DECISIONS,
    Case,
    Watched,
    exists_at,
    require_answers,
    require_numbers,
    require_same,
)


def answers_in_range(case: Case) -> None:
    """Every decision has the dtype, shape and range of the contract, in a replay and for 1 and 7 rows."""
    if isinstance(error := case._first_run, Exception):
        raise CheckFailed(f"{type(error).__name__}: {error}") from error
    chances = case.run.propensity
    known = chances[~np.isnan(chances)]
    require(((known > 0) & (known <= 1)).all(), f"its propensity is {known.min(initial=1)} to {known.max(initial=0)}; "
            "it must be above 0 and at most 1, or NaN where it is not known")  # fmt: skip
    if not isinstance(case.policy, Clairvoyant):
        for rows in (1, 7):
            require_answers(case, rows)


def foresees_in_range(case: Case) -> None:
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


def states_its_propensity(case: Case) -> None:
    """Asked again and again with other lots, it chooses each gamma as often as it says that it does."""
    policy, calls = case.fitted(), 400
    replay(policy, case.traces, case.costs)  # what learns as it runs has its first tries behind it
    before = tuple(name for name in policy.features if exists_at(name, "before"))
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


def decides_each_row_alone(case: Case) -> None:
    """What it decides for many sequences at once is what it decides for each alone, in any order and number."""
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(case.traces)), 3))
    together = replay(case.fitted(), case.traces.take(order), case.costs)
    for row in range(len(case.traces)):
        alone = _part(replay(case.fitted(), case.traces.take([row]), case.costs), 0, row)
        for place in np.flatnonzero(order == row):
            require_same(alone, _part(together, int(place), row), f"among {len(order)} sequences")


def _part(run: Replay, row: int, name: int) -> Replay:
    """The steps of one sequence, under another number."""
    mine = run.sequence == row
    columns = {column: getattr(run, column)[mine] for column in COLUMNS}
    return replace(run, **columns | {"sequence": np.full(mine.sum(), name)})


class _OneByOne(Watched):
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


def can_be_interleaved(case: Case) -> None:
    """Sequences whose steps take turns, each with the state that it was given, are decided on as in one call."""
    interleaved = replay(_OneByOne(case.fitted()), case.traces, case.costs)
    require_same(case.run, interleaved, "when the steps of several sequences take turns")


class _Together(Watched):
    """An online policy that is asked about all sequences at once."""

    @property
    def online(self) -> bool:
        return False


def serves_a_batch(case: Case) -> None:
    """A live decoder may ask an online policy about several sequences at once."""
    policy = _Together(case.fitted())
    replay(policy, case.traces, case.costs)
    require_numbers("memory", policy.policy.memory)


def keeps_its_memory_layout(case: Case) -> None:
    """Names, dtypes and shapes of the memory are those of `new_memory`, however much was decoded."""
    policy = case.fitted()
    new = {name: (array.dtype, array.shape) for name, array in policy.new_memory().items()}
    for traces in (case.traces, case.others):
        replay(policy, traces, case.costs)
        now = {name: (array.dtype, array.shape) for name, array in policy.memory.items()}
        require(now == new, f"its memory was {new} when it was new, and is {now}")


def keeps_nothing_hidden(case: Case) -> None:
    """It plays the same again, also when another recording was played in between; an online one, from the memory that
    `fit` left it."""
    policy = case.fitted()
    memory = copy.deepcopy(policy.memory)
    for traces, when in ((None, "the second time"), (case.others, "after another recording")):
        replay(policy, case.traces if traces is None else traces, case.costs)
        policy.memory = copy.deepcopy(memory)
        require_same(case.run, replay(policy, case.traces, case.costs), when)


def draws_blindly(case: Case) -> None:
    """Whether to draw a token does not depend on which one would be drawn, whatever it is shown."""
    rows, answers = 40, []
    for seed in (1, 2):
        policy = case.fitted()
        state = policy.new_state(rows)
        before = tuple(name for name in FEATURES if exists_at(name, "before"))
        if policy.overrides("choose_gamma"):
            policy.choose_gamma(case.random_features(before, rows, "before"), state)
        shown = dict(case.random_features(tuple(FEATURES), rows, "drawn"))
        shown["draft_probability"] = np.random.default_rng(seed).random(rows)
        asked = {name: values for name, values in shown.items() if name in (*policy.features, "draft_probability")}
        answer = policy.draw_token(Features(asked, rows, "drawn"), state)
        answers.append(as_booleans(answer, rows, "draw_token"))
    require((answers[0] == answers[1]).all(), "draw_token depends on the probability of the token that is to be drawn")
