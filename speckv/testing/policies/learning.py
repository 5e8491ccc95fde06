"""What a policy learns, and how it is kept."""

import contextlib
import copy
import json
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import numpy.typing as npt

from speckv import saving
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.plugins import policy_class
from speckv.policy import Policy, State, check_playable
from speckv.replaying import replay
from speckv.steplogs import StepLog
from speckv.testing.checks import require
from speckv.testing.policies.cases import (
    GAMMA_MAX,
    Case,
    fit_quietly,
    may_refuse,
    require_equal_parameters,
    require_same,
)


def fits_by_seed(case: Case) -> None:
    """The same seed gives the same policy."""
    _require_same_learned(
        case.fitted(), fit_quietly(case.clone(), case.traces, case.costs), "fitted again with the same seed"
    )


def fits_anew(case: Case) -> None:
    """Fitting twice is fitting once: nothing is left of an earlier fit, nor of what was played."""
    policy = fit_quietly(case.clone(), case.others, case.costs)
    replay(policy, case.others, case.costs)
    _require_same_learned(case.fitted(), fit_quietly(policy, case.traces, case.costs), "fitted behind another fit")
    require_same(case.run, replay(policy, case.traces, case.costs), "fitted behind another fit")


def _require_same_learned(one: Policy, other: Policy, when: str) -> None:
    for what in ("fitted", "memory"):
        mine, theirs = getattr(one, what), getattr(other, what)
        require(mine.keys() == theirs.keys(), f"{when}, {what} holds {sorted(theirs)} instead of {sorted(mine)}")
        for name, array in mine.items():
            same = np.asarray(array).dtype == np.asarray(theirs[name]).dtype and np.array_equal(array, theirs[name])
            require(same, f"{when}, {what}[{name!r}] is {theirs[name]!r} instead of {array!r}"[:300])


def fits_without_changing_parameters(case: Case) -> None:
    """`fit` returns the policy itself, with the parameters that it had."""
    policy = case.clone()
    _require_itself(case, policy, fit_quietly(policy, case.traces, case.costs), "fit")


def _require_itself(case: Case, policy: Policy, returned: Policy, method: str) -> None:
    require(returned is policy, f"{method} must return the policy itself")
    for name, value in case.policy.get_params().items():
        found = policy.get_params()[name]
        same = json.dumps(found, default=repr) == json.dumps(value, default=repr)
        require(
            same,
            f"{method} changes the parameter {name!r} from {value!r} to {found!r}; what it learns goes to `fitted`",
        )


class _Lots(Policy):
    """Draws each gamma equally often."""

    name = "lots"
    features = ("position",)

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return np.random.default_rng(int(features["position"].sum())).integers(GAMMA_MAX + 1, size=features.rows)

    def propensity(self, state: State) -> npt.ArrayLike:
        return 1 / (GAMMA_MAX + 1)


def _logged(case: Case) -> StepLog:
    """A log that no policy can ask more of: every gamma, and every feature that is known before a step."""
    from speckv.evaluation import to_steps

    return to_steps(_Lots(), case.others, case.costs)


def _fit_to_log(policy: Policy, log: StepLog, case: Case) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how little the log tells
        return policy.fit_steps(log, case.costs, seed=0)


def fits_step_logs(case: Case) -> None:
    """What holds for `fit` holds for `fit_steps` on a step log, which stays as it is; what it learned can be saved."""
    log, policy = _logged(case), case.clone()
    given = copy.deepcopy(log)
    try:
        _require_itself(case, policy, _fit_to_log(policy, given, case), "fit_steps")
        check_playable(policy, policy.required_gamma)
    except SpecKVError as error:
        require(False, f"behind fit_steps on a log of all gammas and features: {error}")
    for name, column in log.columns.items():
        same = np.array_equal(column, given.columns[name], equal_nan=column.dtype.kind == "f")
        require(same, f"fit_steps changes {name} of the log that it is given")
    _require_same_learned(policy, _fit_to_log(case.clone(), log, case), "fitted to the same log with the same seed")
    first = copy.deepcopy(policy)
    _require_same_learned(first, _fit_to_log(policy, log, case), "fitted to a log behind another fit")
    with _saved(policy) as path:
        loaded = saving.load_policy(path)
        _require_same_learned(policy, loaded, "loaded")
        one, other = (replay(known, case.traces, case.costs) for known in (policy, loaded))
        require_same(one, other, "loaded")


def refuses_useless_logs(case: Case) -> None:
    """A log without steps, signals or compression is fitted to, or refused by `fit_steps` in one line."""
    log = _logged(case)
    nothing = StepLog.from_columns({name: column[:0] for name, column in log.columns.items()}, {})
    unnamed = np.full(len(log), "")
    for useless in (
        nothing,
        replace(log, signals={}),
        replace(log, compression=None),
        replace(log, compression=unnamed),
    ):
        with may_refuse():
            _fit_to_log(case.clone(), useless, case)


@contextlib.contextmanager
def _saved(policy: Policy) -> Iterator[pathlib.Path]:
    """The policy in a folder, from which it can be loaded whether it is registered or not."""

    def find(name: str) -> type[Policy]:
        return type(policy) if name == policy.name else policy_class(name)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saving, "policy_class", find):
        path = pathlib.Path(folder) / "saved"
        saving.save_policy(policy, path)
        yield path


def survives_saving(case: Case) -> None:
    """Loaded, it has the parameters, fitted arrays and memory that it was saved with, and plays the same."""
    policy = case.fitted()
    replay(policy, case.others, case.costs)
    with _saved(policy) as path:
        loaded = saving.load_policy(path)
        require_equal_parameters(policy.get_params(), loaded.get_params(), "loading")
        _require_same_learned(policy, loaded, "loaded")
        one, other = (replay(known, case.traces, case.costs) for known in (policy, loaded))
        require_same(one, other, "loaded")


def saves_no_pickle(case: Case) -> None:
    """None of its arrays is a pickle in disguise."""
    for name, array in (case.fitted().fitted | case.fitted().memory).items():
        start = np.ravel(array)[:2].tobytes() if np.asarray(array).dtype.itemsize == 1 else b""
        disguised = len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5
        require(not disguised, f"its array {name!r} is a pickled object; keep numbers that the policy itself can read")
