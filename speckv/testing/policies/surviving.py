"""What a policy must survive: extreme signals, short texts, no rows, every compression, unknown costs."""

import inspect
import warnings
from typing import Any

import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.policy import Clairvoyant, Outcome, State
from speckv.replaying import measure_controller, replay
from speckv.testing.policies.cases import (
    GAMMA_MAX,
    TIME_SHARE,
    Case,
    Watched,
    fit_quietly,
    layout,
    may_refuse,
    require_answers,
    require_numbers,
    require_one_line,
)
from speckv.testing.recordings import make_costs, make_rollouts, spelled


class _Finite(Watched):
    """Looks for NaN behind every step."""

    def overrides(self, method: str) -> bool:
        return method == "observe" or super().overrides(method)

    def observe(self, outcome: Outcome, state: State) -> None:
        super().observe(outcome, state)
        require_numbers("state", state)
        require_numbers("memory", self.policy.memory)


def copes_with_extreme_signals(case: Case) -> None:
    """Probabilities of 0 and 1, the largest entropy, all right and all wrong: no warning, no NaN."""
    for right in ("1", "0", "10", "1110"):
        for top1 in (0.0, 0.5, 1.0):
            policy = case.fitted()
            with np.errstate(all="raise", under="ignore"):
                watched = policy if isinstance(policy, Clairvoyant) else _Finite(policy)
                replay(watched, case.extreme(right, top1), case.costs)


def copes_with_short_texts(case: Case) -> None:
    """In a text of one token there is no room for a draft, whatever the policy says."""
    for length in (1, 2):
        replay(case.fitted(), case.alone(spelled("1" * length, gamma_max=GAMMA_MAX)), case.costs)


def copes_with_no_rows(case: Case) -> None:
    """Asked about no sequence at all, it answers nothing."""
    layout(case.fitted().new_state(0), 0)
    require_answers(case, 0)


def copes_with_gamma_max_1(case: Case) -> None:
    """Where no more than one token can be drafted it can be fitted and played, or is refused in one line."""
    traces = make_rollouts(prompts=2, gamma_max=1, budget=12, compressions=case.compressions)
    with may_refuse():
        replay(case.fitted(), traces, case.costs)
    with may_refuse():
        replay(fit_quietly(case.clone(), traces, case.costs), traces, case.costs)


def copes_with_every_compression(case: Case) -> None:
    """Fitted on two compressions, it plays on all of them, or is refused in one line."""
    costs = make_costs(draft=0.02, compressions=list(COMPRESSIONS))
    traces = make_rollouts(prompts=2, compressions=list(COMPRESSIONS), gamma_max=GAMMA_MAX, budget=12)
    with may_refuse():
        replay(case.fitted(), traces, costs)


def copes_with_unknown_costs(case: Case) -> None:
    """Where the costs of a compression are unknown, it is refused in one line, or does not need them."""
    costs = make_costs(compressions=[name for name in COMPRESSIONS if name not in case.compressions][:1])
    with may_refuse():
        fit_quietly(case.clone(), case.others, costs)
    with may_refuse():
        replay(case.fitted(), case.others, costs)


def refuses_in_one_line(case: Case) -> None:
    """A parameter that makes no sense is taken, or refused by a SpecKVError, TypeError or ValueError of one line."""
    for name in inspect.signature(type(case.policy)).parameters:
        values: tuple[Any, ...] = (-1, float("nan"), "nonsense", None, [], 10**9)
        for value in values:
            try:
                type(case.policy)(**case.policy.get_params() | {name: value})
            except (SpecKVError, TypeError, ValueError) as error:
                require_one_line(error)


def decides_in_time(case: Case) -> None:
    """Warns of decisions that take a noticeable share of a target forward. It never fails."""
    seconds = sum(measure_controller(case.fitted(), case.traces.take([0, 1]), case.costs))
    compression = next(iter(case.costs.verify))
    forward = float(case.costs.verify[compression].seconds.min())
    if seconds > TIME_SHARE * forward:
        slow = f"slow: it decides in {seconds * 1e6:.0f} us, {seconds / forward:.1%} of a target forward"
        warnings.warn(slow, SpecKVWarning, stacklevel=2)
