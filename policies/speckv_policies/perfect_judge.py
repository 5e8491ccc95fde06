"""The perfect judge of tokens that are already drafted."""

from typing import Self

import numpy as np

from speckv import Clairvoyant, CostModel, Rollouts
from speckv.compression import COMPRESSIONS
from speckv.features import IntArray
from speckv.tuning import fastest_by_compression


class PerfectJudge(Clairvoyant):
    """Stops behind the first wrong token, or at a cap: it knows of each drafted token whether it is right, but
    nothing of the next one.

    Args:
        cap: most tokens in a draft; None for the fastest on the training prompts, for each compression.
    """

    name = "perfect-judge"
    source = "reference between the baselines and the oracle; about what a policy without foresight can reach"

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.cap = cap
        if cap is not None:
            self.fitted = {"cap": np.full(len(COMPRESSIONS), cap)}

    @property
    def required_gamma(self) -> int:
        return self.cap or 0

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        if self.cap is None:
            candidates = [PerfectJudge(cap) for cap in range(traces.gamma_max + 1)]
            self.fitted = {"cap": fastest_by_compression(candidates, traces, costs)}
        return self

    def foresee(self, traces: Rollouts, costs: CostModel) -> tuple[IntArray, IntArray]:
        codes = {name: code for code, name in enumerate(COMPRESSIONS)}
        caps = self.fitted["cap"][[codes[name] for name in traces.compressions]]
        gammas = np.minimum(traces.run[:, :-1] + 1, caps[:, None])
        return gammas, gammas
