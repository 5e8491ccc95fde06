"""The best constant gamma for each compression."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State
from speckv.tuning import fastest_by_compression
from speckv_policies.fixed import Fixed


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

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.fitted["gamma"][features["compression"].astype(np.int64)]
