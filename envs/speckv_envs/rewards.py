"""What a step is worth."""

from collections.abc import Callable, Mapping

import numpy as np

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FloatArray, IntArray

#: Name -> reward of steps from their committed and their accepted tokens, their seconds, and the rate of their
#: sequences; (n,) each.
REWARDS: dict[str, Callable[[IntArray, IntArray, FloatArray, FloatArray], FloatArray]] = {
    "throughput": lambda committed, accepted, seconds, rates: committed / seconds,
    "average": lambda committed, accepted, seconds, rates: committed - rates * seconds,
    "tokens": lambda committed, accepted, seconds, rates: committed.astype(float),
    "accepted": lambda committed, accepted, seconds, rates: accepted / seconds,
}


def check_reward(name: str) -> str:
    """Return `name`, or raise SpecKVError if there is no such reward."""
    if name not in REWARDS:
        raise SpecKVError(f"reward {name!r} is unknown; choose one of {', '.join(REWARDS)}")
    return name


def rate_of(compression: str, rate: float | Mapping[str, float] | None, costs: CostModel, context: int) -> float:
    """The rate at a compression, tokens a second: as given or, where None is, that of decoding without speculation.

    Raises:
        SpecKVError: it is not a positive number, or not given for this compression.
    """
    if rate is None:
        return costs.plain_rate(compression, context)
    if isinstance(rate, Mapping):
        if compression not in rate:
            raise SpecKVError(f"rate says nothing of {compression!r}, only of {', '.join(rate)}; add it")
        rate = rate[compression]
    if not 0 < rate < np.inf:
        raise SpecKVError(f"rate is {rate}; it must be a positive number of tokens a second")
    return float(rate)
