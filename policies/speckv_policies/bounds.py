"""Bounds and references: they look at what was recorded, and no decoder can play them."""

from typing import Self

import numpy as np

from speckv import Clairvoyant, CostModel, Rollouts, oracle, replay
from speckv.compression import COMPRESSIONS
from speckv.features import IntArray
from speckv.tuning import fastest_by_compression
from speckv_policies.fixed import Fixed


class Oracle(Clairvoyant):
    """Knows the whole future and takes the fastest way through it: the exact upper bound on throughput."""

    name = "oracle"
    source = "shortest path through the recorded sequence (speckv.oracle)"

    def foresee(self, traces: Rollouts, costs: CostModel) -> tuple[IntArray, IntArray]:
        best = oracle(traces, costs)
        return best.gammas, best.forwards


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


class TaskOracle(Clairvoyant):
    """Drafts a constant number of tokens for each task and compression: the fastest on the very sequences replayed.

    What a policy could gain by knowing the task alone; chosen in hindsight, so that nothing of the kind is faster.
    """

    name = "task-oracle"
    source = "reference: a sweep over all gammas for each task and compression of the sequences at hand"

    def foresee(self, traces: Rollouts, costs: CostModel) -> tuple[IntArray, IntArray]:
        seconds = np.stack(
            [replay(Fixed(gamma), traces, costs, (0.0, 0.0)).sequence_seconds for gamma in range(traces.gamma_max + 1)]
        )
        best = np.zeros(len(traces), dtype=np.int64)
        groups = np.char.add(np.char.add(traces.tasks, "\n"), traces.compressions)
        for group in np.unique(groups):
            best[groups == group] = seconds[:, groups == group].sum(axis=1).argmin()
        gammas = np.repeat(best[:, None], traces.tokens.shape[1], axis=1)
        return gammas, gammas
