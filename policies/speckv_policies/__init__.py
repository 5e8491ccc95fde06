"""The policy zoo: one file a family, registered through the same hook that outsiders use."""

from collections.abc import Callable

import speckv


@speckv.hookimpl
def speckv_register_policies(register: Callable[[type[speckv.Policy]], None]) -> None:
    from speckv_policies.acceptance import Dsde, Goodput, Leviathan
    from speckv_policies.agents import ContextualBandit, Dqn, DqnStop, Ltd, Ppo, PpoStop
    from speckv_policies.bandits import Exp3, LinUcb, Nightjar, Thompson, Ucb1
    from speckv_policies.boosted import BoostedHazard
    from speckv_policies.bounds import Oracle, PerfectJudge, TaskOracle
    from speckv_policies.estimators import Disco, OnlineEstimator, SpecDecPlusPlus, SurvivalBudget
    from speckv_policies.fixed import BestFixed, Fixed, NoSpeculation
    from speckv_policies.forest import Forest
    from speckv_policies.hazard import Hazard, TokenHazard
    from speckv_policies.meta import Explore, Hysteresis, OffSwitch, TapOut
    from speckv_policies.mlp import Mlp, MlpThroughput
    from speckv_policies.neural import NeuralHazard
    from speckv_policies.thresholds import (
        AdaEdl,
        AdaptiveConfidence,
        Confidence,
        DraftVerify,
        Kangaroo,
        MinimumProbability,
        Svip,
    )
    from speckv_policies.windows import DraftWindow, GammaTune, Heuristic, HillClimb, Tiers

    for policy in (
        NoSpeculation, Fixed, BestFixed,
        Heuristic, GammaTune, DraftWindow, HillClimb, Tiers,
        Leviathan, Goodput, Dsde,
        Confidence, AdaptiveConfidence, MinimumProbability, Kangaroo, Svip, DraftVerify, AdaEdl,
        Disco, SpecDecPlusPlus, SurvivalBudget, OnlineEstimator,
        Hazard, TokenHazard, BoostedHazard, NeuralHazard,
        Mlp, MlpThroughput, Forest,
        Ucb1, Exp3, Thompson, LinUcb, Nightjar,
        Dqn, ContextualBandit, Ppo, DqnStop, PpoStop, Ltd,
        TapOut, Hysteresis, OffSwitch, Explore,
        PerfectJudge, TaskOracle, Oracle,
    ):  # fmt: skip
        register(policy)
