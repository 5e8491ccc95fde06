"""Features as the vector that an agent observes."""

from collections.abc import Mapping, Sequence

import gymnasium
import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.features import FEATURES, FloatArray
from speckv_envs.games import Observations

#: Features that exist before the draft of a step, and those of a drafted token.
BEFORE = tuple(name for name, feature in FEATURES.items() if feature.when == "before")
TOKEN = tuple(name for name, feature in FEATURES.items() if feature.when != "before")

_UNBOUNDED = float(np.finfo(np.float32).max)
#: Of a distribution over at most 2^24 tokens, the largest vocabulary that a recording can hold.
_LARGEST_ENTROPY = 24 * np.log(2)


class Layout:
    """Which number of an observation is which. Every feature is one, but the compression, which is one-hot.

    The numbers are in the units of `speckv.features.FEATURES`, not scaled, and none is below 0. Their bounds depend on
    nothing but the two arguments, so that an agent can move to another recording or cost model.

    Args:
        features: their names.
        gamma_max, max_new_tokens: limits of a draft and of a text.

    Attributes:
        names: of the numbers; those of the one-hot are `compression=` and the name of the compression.
        space: (len(names),) float32.
    """

    def __init__(self, features: Sequence[str], gamma_max: int, max_new_tokens: int) -> None:
        self._columns: dict[str, int] = {}
        names: list[str] = []
        for name in features:
            self._columns[name] = len(names)
            names += [f"{name}={value}" for value in COMPRESSIONS] if name == "compression" else [name]
        self.names = tuple(names)
        largest = {"position": max_new_tokens, "last_gamma": gamma_max, "last_accepted": gamma_max}
        largest |= {"draft_index": gamma_max}
        of_unit = {"probability": 1.0, "0 or 1": 1.0, "code": 1.0, "nats": _LARGEST_ENTROPY}
        units = [FEATURES[name.partition("=")[0]].unit for name in names]
        high = [largest.get(name, of_unit.get(unit, _UNBOUNDED)) for name, unit in zip(names, units, strict=True)]
        self.space = gymnasium.spaces.Box(np.zeros(len(high), np.float32), np.array(high, np.float32))

    def vectors(self, features: Mapping[str, FloatArray], rows: int) -> Observations:
        """(rows, len(names)) from features by name, each (rows,)."""
        vectors = np.empty((rows, len(self.names)), dtype=np.float32)
        for name, column in self._columns.items():
            if name == "compression":
                codes = np.arange(len(COMPRESSIONS))
                vectors[:, column : column + len(codes)] = features[name][:, None] == codes
            else:
                vectors[:, column] = features[name]
        return vectors
