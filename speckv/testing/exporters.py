"""What every exporter must keep to."""

import copy
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.exporting import Exporter, fidelity
from speckv.features import FEATURES, Features, IntArray
from speckv.plugins import registry
from speckv.policy import Clairvoyant, Outcome, Policy, State
from speckv.testing.checks import Check, CheckFailed, CheckSkipped, expecting, make_checks, require
from speckv.testing.recordings import make_costs, make_rollouts
from speckv.traces import Rollouts

_KINDS = ("before", "draft", "both")
#: How files begin that Python would run when it reads them: a pickle of protocol 2 to 5.
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def exporter_checks(
    exporter: Exporter,
    *,
    policies: Sequence[Policy] | None = None,
    least_equal: float = 1.0,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of an exporter.

    Args:
        exporter: with the parameters to be checked.
        policies: to be exported, fitted if they learn; by default all registered ones that learn nothing.
        least_equal: share of decisions that an exported policy must have in common with the original.
        expected_failed_checks: name of a check -> why it fails.

    Raises:
        SpecKVError: no check has such a name.
    """
    functions: list[Callable[[_Case], None]] = [
        describes_what_it_writes,
        refuses_what_it_cannot_show,
        writes_only_into_its_folder,
        leaves_the_policy_alone,
        decides_as_the_original,
        writes_no_pickle,
        refuses_what_is_no_export,
    ]
    case = _Case(exporter, policies, least_equal)
    return expecting(make_checks(exporter.name, functions, case), expected_failed_checks)


class _Case:
    """An exporter to be checked, and policies that it can hold."""

    def __init__(self, exporter: Exporter, policies: Sequence[Policy] | None, least_equal: float) -> None:
        self.exporter, self._given, self.least_equal = exporter, policies, least_equal

    @functools.cached_property
    def policies(self) -> list[Policy]:
        """Those that the exporter does not refuse."""
        known = self._given
        if known is None:
            made = (entry.value() for entry in registry().policies.values())
            known = [policy for policy in made if type(policy).fit is Policy.fit]
        taken = [policy for policy in known if self._takes(policy)]
        if not taken:
            raise CheckSkipped("it refuses every policy that it could be tried with; give it some: policies=[…]")
        return taken

    def _takes(self, policy: Policy) -> bool:
        try:
            self.exporter.check(policy)
        except SpecKVError:
            return False
        return True

    @contextmanager
    def exported(self, policy: Policy) -> Iterator[pathlib.Path]:
        """The folder that it wrote the policy to; there is nothing beside it."""
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            out.mkdir()
            self.exporter.export(copy.deepcopy(policy), out)
            yield out


@functools.cache
def _recording() -> tuple[Rollouts, CostModel]:
    return make_rollouts(prompts=4, gamma_max=16, budget=32, seed=2), make_costs(draft=0.02)


def describes_what_it_writes(case: _Case) -> None:
    """It has a name, says which decoder it writes for, and names known features and kinds of policies."""
    exporter = case.exporter
    for what in ("name", "decoder"):
        value = getattr(exporter, what, "")
        require(isinstance(value, str) and value.strip(), f"its `{what}` is {value!r}; it must be a text")
    require(exporter.__doc__ != Exporter.__doc__ and exporter.__doc__, "it has no docstring that says what it writes")
    unknown = min(exporter.observes - set(FEATURES), default="")
    require(not unknown, f"it observes {unknown!r}, which is no feature; the known ones are {', '.join(FEATURES)}")
    require(exporter.kinds, f"its `kinds` is empty; name some of {', '.join(_KINDS)}")
    strange = min(exporter.kinds - set(_KINDS), default="")
    require(not strange, f"its `kinds` name {strange!r}; they can be {', '.join(_KINDS)}")


class _Before(Policy):
    """Decides before the step."""

    name = "decides-before"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 2


class _Inside(Policy):
    """Decides inside the draft."""

    name = "decides-inside"

    def draw_token(self, features: Features, state: State) -> npt.ArrayLike:
        return True


class _Both(_Inside):
    """Decides at both times."""

    name = "decides-twice"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 2


class _Observing(_Before):
    """Would learn from outcomes."""

    name = "observes"

    def observe(self, outcome: Outcome, state: State) -> None:
        pass


class _Unfitted(_Before):
    """Has to be fitted, and is not."""

    name = "unfitted"

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> "_Unfitted":
        raise AssertionError("nobody asked for this")


class _Knowing(Clairvoyant):
    """A bound."""

    name = "knowing"

    def foresee(self, traces: Rollouts, costs: CostModel) -> tuple[IntArray, IntArray]:
        return traces.run[:, :-1], traces.run[:, :-1]


def refuses_what_it_cannot_show(case: _Case) -> None:
    """`check` refuses in one line what the decoder can't run: bounds, policies without a fit, hidden features."""
    exporter = case.exporter
    of_kind = {"before": _Before, "draft": _Inside, "both": _Both}
    impossible: list[Policy] = [_Knowing(), *(cls() for kind, cls in of_kind.items() if kind not in exporter.kinds)]
    if "before" in exporter.kinds:
        impossible.append(_Unfitted())
        if not exporter.outcomes:
            impossible.append(_Observing())
    for kind in exporter.kinds & set(of_kind):
        for name in set(FEATURES) - exporter.observes:
            policy = of_kind[kind]()
            policy.features = (name,)
            impossible.append(policy)
    for policy in impossible:
        told = f"{_in_words(policy)} and reads {', '.join(policy.features) or 'nothing'}"
        try:
            exporter.check(policy)
        except SpecKVError as error:
            require(str(error) and "\n" not in str(error), f"a refusal must be one line: {str(error)!r}")
        else:
            raise CheckFailed(f"it does not refuse a policy of this kind: {told}")


def _in_words(policy: Policy) -> str:
    """What a policy of this module is, in words."""
    return (type(policy).__doc__ or "").strip(".").lower()


def writes_only_into_its_folder(case: _Case) -> None:
    """An export is what stands in its folder, and nothing else."""
    for policy in case.policies:
        with case.exported(policy) as out:
            require(any(out.iterdir()), f"of policy {policy.label!r} it writes nothing")
            beside = sorted(path.name for path in out.parent.iterdir() if path != out)
            require(not beside, f"of policy {policy.label!r} it writes {beside} beside its folder")


def leaves_the_policy_alone(case: _Case) -> None:
    """Exporting changes neither parameters nor what was learned."""
    for policy in case.policies:
        exported = copy.deepcopy(policy)
        with tempfile.TemporaryDirectory() as folder:
            case.exporter.export(exported, pathlib.Path(folder))
        require(exported.get_params() == policy.get_params(), f"it changes the parameters of policy {policy.label!r}")
        for one, other in ((policy.fitted, exported.fitted), (policy.memory, exported.memory)):
            same = one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
            require(same, f"it changes what policy {policy.label!r} has learned")


def decides_as_the_original(case: _Case) -> None:
    """Read back, a policy that `check` lets pass decides as it did, each time that it is exported."""
    traces, costs = _recording()
    for policy in case.policies:
        first, second = (fidelity(case.exporter, copy.deepcopy(policy), traces, costs) for _ in range(2))
        equal = first.equal_decisions
        require(equal >= case.least_equal, f"exported, policy {policy.label!r} takes only {equal:.1%} of its decisions")
        require(first == second, f"policy {policy.label!r} is exported differently the second time")


def writes_no_pickle(case: _Case) -> None:
    """No file of an export is a pickle, or holds one."""
    for policy in case.policies:
        with case.exported(policy) as out:
            for path in filter(pathlib.Path.is_file, out.rglob("*")):
                content = path.read_bytes()
                unsafe = content.startswith(_PICKLES) or (content.startswith(b"PK") and b".pkl" in content)
                require(not unsafe, f"of policy {policy.label!r} it writes {path.relative_to(out)}, which is pickled")


def refuses_what_is_no_export(case: _Case) -> None:
    """An empty folder, and one with a file of nonsense in it, are refused in one line."""
    for content in (None, b"nonsense"):
        with case.exported(case.policies[0]) as out:
            for path in filter(pathlib.Path.is_file, out.rglob("*")):
                path.write_bytes(content) if content else path.unlink()
            try:
                case.exporter.load(out)
            except SpecKVError as error:
                require(str(error) and "\n" not in str(error), f"a refusal must be one line: {str(error)!r}")
            else:
                raise CheckFailed("it reads a folder that holds no export" if content is None else "it reads nonsense")
