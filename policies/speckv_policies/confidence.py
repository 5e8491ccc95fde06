"""Stop when the draft is no longer sure of itself."""

from typing import Self

import numpy as np
import numpy.typing as npt

from speckv import CostModel, Features, Policy, Rollouts, State
from speckv.compression import COMPRESSIONS
from speckv.tuning import fastest_by_compression


class Confidence(Policy):
    """Stops behind a drafted token whose probability is below a threshold; that token is still verified.

    Args:
        threshold: probability in [0, 1]; 0 never stops.
        cap: most tokens in a draft; 0 is no speculation.

    `fit` replaces both, for each compression, by the fastest pair on the training prompts, so that this is the
    tuned confidence rule that other adaptive policies have to beat.
    """

    name = "confidence"
    features = ("compression", "draft_probability")
    source = (
        "transformers, `assistant_confidence_threshold`, read in its source (threshold 0.4, cap 20); the tuning for "
        "each compression is ours"
    )

    THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    CAPS = (0, 1, 2, 3, 4, 6, 8, 12, 16)

    def __init__(self, threshold: float = 0.4, cap: int = 20) -> None:
        super().__init__()
        self.threshold, self.cap = threshold, cap
        self.fitted = {"threshold": np.full(len(COMPRESSIONS), threshold), "cap": np.full(len(COMPRESSIONS), cap)}

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        candidates = [Confidence(threshold, cap) for cap in self.CAPS for threshold in self.THRESHOLDS]
        best = fastest_by_compression(candidates, traces, costs)
        self.fitted = {
            "threshold": np.array([candidates[index].threshold for index in best]),
            "cap": np.array([candidates[index].cap for index in best]),
        }
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.fitted["cap"][features["compression"].astype(np.int64)]

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return features["draft_probability"] >= self.fitted["threshold"][features["compression"].astype(np.int64)]
