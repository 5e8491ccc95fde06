"""What a policy is: parameters, a name, features that exist."""

import inspect

from speckv.features import Features, FloatArray, When, check_features
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.testing.checks import require
from speckv.testing.policies.cases import DECISIONS, Case, Watched, layout, require_equal_parameters


def stores_parameters(case: Case) -> None:
    """The constructor stores each parameter under its name, and does nothing else; a clone is made from them."""
    for parameter in inspect.signature(type(case.policy)).parameters.values():
        named = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        require(named, f"the constructor takes {parameter}; every parameter must have a name of its own")
        require(parameter.default is not parameter.empty, f"the parameter {parameter.name!r} has no default")
    parameters = case.policy.get_params()
    require_equal_parameters(parameters, case.clone().get_params(), "a clone")
    for name, value in type(case.policy)().get_params().items():
        default = inspect.signature(type(case.policy)).parameters[name].default
        require_equal_parameters({name: default}, {name: value}, "the constructor")


def describes_itself(case: Case) -> None:
    """It has a name that the command line can take, a docstring, and a source."""
    policy = case.policy
    name = policy.name
    plain = isinstance(name, str) and name and not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789-_.+")
    require(plain, f"its name is {name!r}; it must consist of lower-case letters, digits and -_.+")
    require(inspect.getdoc(type(policy)) != inspect.getdoc(Policy), "it has no docstring that says what it does")
    require(isinstance(policy.source, str) and policy.source.strip(), "its `source` does not say where it comes from")


def decides_something(case: Case) -> None:
    """It overrides one of the decisions."""
    decides = any(case.policy.overrides(method) for method in DECISIONS)
    require(decides, f"it decides nothing: override one of {', '.join(DECISIONS)}")


def asks_for_known_features(case: Case) -> None:
    """`features` is a tuple of names in `speckv.features.FEATURES`, each once."""
    names = case.policy.features
    require(isinstance(names, tuple), f"`features` is a {type(names).__name__}; it must be a tuple of names")
    check_features(names)
    require(len(set(names)) == len(names), "`features` names one twice")


class _Reading(Watched):
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


def reads_its_features(case: Case) -> None:
    """Every feature that it declares is read."""
    policy = _Reading(case.fitted())
    for traces in (case.traces, case.extreme("1", 0.5), case.extreme("0", 1.0)):
        replay(policy, traces, case.costs)
    unread = set(policy.policy.features) - policy.read
    require(not unread, f"it declares the feature {min(unread, default='')!r} and does not read it")


def keeps_state_by_sequence(case: Case) -> None:
    """`new_state` makes arrays with a row for each sequence, and the decisions keep names and rows."""
    policy = case.fitted()
    for rows in (1, 5):
        new = layout(policy.new_state(rows), rows)
        for method, _, state in case.ask_all(policy, rows):
            now = layout(state, rows)
            require(now == new, f"behind {method} its state holds {', '.join(now) or 'nothing'} instead of "
                    f"{', '.join(new) or 'nothing'}")  # fmt: skip
