"""The clairvoyant oracle."""

from speckv import Clairvoyant, CostModel, Rollouts, oracle
from speckv.features import IntArray


class Oracle(Clairvoyant):
    """Knows the whole future and takes the fastest way through it: the exact upper bound on throughput."""

    name = "oracle"
    source = "shortest path through the recorded sequence (speckv.oracle)"

    def foresee(self, traces: Rollouts, costs: CostModel) -> tuple[IntArray, IntArray]:
        best = oracle(traces, costs)
        return best.gammas, best.forwards
