"""The policy zoo: one file a policy, registered through the same hook that outsiders use."""

from collections.abc import Callable

import speckv


@speckv.hookimpl
def speckv_register_policies(register: Callable[[type[speckv.Policy]], None]) -> None:
    from speckv_policies.best_fixed import BestFixed
    from speckv_policies.confidence import Confidence
    from speckv_policies.fixed import Fixed
    from speckv_policies.hazard import Hazard
    from speckv_policies.heuristic import Heuristic
    from speckv_policies.mlp import Mlp, MlpThroughput
    from speckv_policies.no_speculation import NoSpeculation
    from speckv_policies.oracle import Oracle
    from speckv_policies.perfect_judge import PerfectJudge

    for policy in (
        NoSpeculation, Fixed, BestFixed, Heuristic, Confidence, Mlp, MlpThroughput, Hazard, PerfectJudge, Oracle,
    ):  # fmt: skip
        register(policy)
