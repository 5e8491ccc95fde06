"""What a policy learns, and how it is kept."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator
from unittest import mock

import numpy as np

from speckv import saving
from speckv.plugins import policy_class
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.testing.checks import require
from speckv.testing.policies.cases import Case, fit_quietly, require_equal_parameters, require_same


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
    require(fit_quietly(policy, case.traces, case.costs) is policy, "fit must return the policy itself")
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
