"""The conformance kit: small named checks of what plugins bring, and three ways to run them.

`policy_checks`, `env_checks`, `drafter_checks`, `trace_checks`, `exporter_checks` and `plugin_checks` each list the
checks of one thing. Run them

- with `check_policy(…)` and its like, which raise at the first failure,
- as tests of pytest, with `@parametrize(policy_checks(…))`,
- with `report(policy_checks(…))`, which makes them all and tells what came of them.

Importing this package imports neither pytest nor torch.
"""

from collections.abc import Callable
from typing import ParamSpec

from speckv.testing.checks import Check, CheckFailed, CheckSkipped, Report, Result, parametrize, raise_first, report
from speckv.testing.drafters import drafter_checks
from speckv.testing.environments import env_checks
from speckv.testing.exporters import exporter_checks
from speckv.testing.plugins import plugin_checks
from speckv.testing.policies import policy_checks
from speckv.testing.traces import trace_checks

__all__ = [
    "Check",
    "CheckFailed",
    "CheckSkipped",
    "Report",
    "Result",
    "check_drafter",
    "check_env",
    "check_exporter",
    "check_plugin",
    "check_policy",
    "check_trace",
    "drafter_checks",
    "env_checks",
    "exporter_checks",
    "parametrize",
    "plugin_checks",
    "policy_checks",
    "report",
    "trace_checks",
]

P = ParamSpec("P")


def _raising(checks_of: Callable[P, list[Check]], name: str) -> Callable[P, Report]:
    """A function that makes the checks one after the other, and raises CheckFailed at the first failure."""

    def check(*args: P.args, **kwargs: P.kwargs) -> Report:
        return raise_first(checks_of(*args, **kwargs))

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Make `{checks_of.__name__}`, and raise CheckFailed at the first that fails. Args: as of those."
    return check


check_policy = _raising(policy_checks, "check_policy")
check_env = _raising(env_checks, "check_env")
check_drafter = _raising(drafter_checks, "check_drafter")
check_trace = _raising(trace_checks, "check_trace")
check_exporter = _raising(exporter_checks, "check_exporter")
check_plugin = _raising(plugin_checks, "check_plugin")
