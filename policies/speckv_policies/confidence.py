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
        threshold: probability in [0, 1]; 0 never stops. None for the fastest on the training prompts.
        cap: most tokens in a draft; 0 is no speculation. None for the fastest on the training prompts.

    What is None is tuned for each compression, which makes this the tuned confidence rule that other adaptive
    policies have to beat.
    """

    name = "confidence"
    features = ("compression", "draft_probability")
    source = (
        "transformers, `assistant_confidence_threshold`, read in its source (threshold 0.4, cap 20); the tuning for "
        "each compression is ours"
    )

    THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    CAPS = (0, 1, 2, 3, 4, 6, 8, 12, 16)

    def __init__(self, threshold: float | None = None, cap: int | None = None) -> None:
        super().__init__()
        self.threshold, self.cap = threshold, cap
        if threshold is not None and cap is not None:
            self.fitted = {"threshold": np.full(len(COMPRESSIONS), threshold), "cap": np.full(len(COMPRESSIONS), cap)}

    @property
    def required_gamma(self) -> int:
        return self.cap or 0

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        if self.threshold is not None and self.cap is not None:
            return self
        thresholds = self.THRESHOLDS if self.threshold is None else (self.threshold,)
        caps = [cap for cap in self.CAPS if cap <= traces.gamma_max] if self.cap is None else [self.cap]
        candidates = [(threshold, cap) for cap in caps for threshold in (thresholds if cap > 1 else thresholds[:1])]
        best = fastest_by_compression([Confidence(*candidate) for candidate in candidates], traces, costs)
        self.fitted = {
            "threshold": np.array([candidates[index][0] for index in best]),
            "cap": np.array([candidates[index][1] for index in best]),
        }
        return self

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.fitted["cap"][features["compression"].astype(np.int64)]

    def keep_drafting(self, features: Features, state: State) -> npt.ArrayLike:
        return features["draft_probability"] >= self.fitted["threshold"][features["compression"].astype(np.int64)]
