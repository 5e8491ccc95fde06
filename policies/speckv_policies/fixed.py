"""Constant numbers of tokens: none, one that the user chose, and the best."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.evaluation.ranking import throughput_by_compression
from speckv.runtime.programs import Program, Table
from speckv.steplogs import StepLog
from speckv.tuning import fastest_by_compression


class NoSpeculation(Policy):
    """Never drafts: the target decodes one token a step. The baseline that speculation has to beat."""

    name = "none"
    source = "plain autoregressive decoding"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 0

    def program(self) -> Program:
        return Program(Table(np.zeros(len(COMPRESSIONS))))


class Fixed(Policy):
    """Drafts the same number of tokens in every step.

    Args:
        gamma: tokens; 4 is the common default.
    """

    name = "fixed"
    source = "Leviathan et al., 2023 (arXiv 2211.17192); gamma 4 is what decoders commonly default to"

    def __init__(self, gamma: int = 4) -> None:
        super().__init__()
        if not isinstance(gamma, int | np.integer) or isinstance(gamma, bool) or gamma < 0:
            raise ValueError(f"gamma is {gamma}; it must be a whole number from 0")
        self.gamma = gamma

    @property
    def label(self) -> str:
        return f"fixed-{self.gamma}"

    @property
    def required_gamma(self) -> int:
        return self.gamma

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.gamma

    def program(self) -> Program:
        return Program(Table(np.full(len(COMPRESSIONS), self.gamma)))


class BestFixed(Policy):
    """Drafts a constant number of tokens: the fastest on the training prompts, for each compression.

    This is the baseline that an adaptive policy has to beat (0, no speculation, is among its choices).
    """

    name = "best-fixed"
    features = ("compression",)
    source = "a sweep over all gammas on the training prompts under the cost model at hand"

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        candidates = [Fixed(gamma) for gamma in range(traces.gamma_max + 1)]
        self.fitted = {"gamma": fastest_by_compression(candidates, traces, costs)}
        return self

    def fit_steps(self, log: StepLog, costs: CostModel, seed: int = 0) -> Self:
        """Of the gammas up to the largest in the log, the one with the most tokens a second as estimated there."""
        most = int(log.gamma.max(initial=0))
        reached = [throughput_by_compression(Fixed(gamma), log, costs, most) for gamma in range(most + 1)]
        self.fitted = {"gamma": np.argmax(reached, axis=0)}
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.fitted["gamma"][features["compression"].astype(np.int64)]

    def program(self) -> Program:
        return Program(Table(self.fitted["gamma"]))
