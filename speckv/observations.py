"""Features as the vector that an agent observes: the same code in the environments and in the policies they train."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.features import FEATURES, FloatArray

Observations = npt.NDArray[np.float32]

#: Features that exist before the draft of a step, and those of a drafted token but its id, which is no quantity.
BEFORE = tuple(name for name, feature in FEATURES.items() if feature.when == "before")
TOKEN = tuple(name for name, feature in FEATURES.items() if feature.when != "before" and feature.unit != "id")

_UNBOUNDED = float(np.finfo(np.float32).max)
#: Of a distribution over at most 2^24 tokens, the largest vocabulary that a recording can hold.
_LARGEST_ENTROPY = 24 * np.log(2)


def nothing_drafted(rows: int) -> dict[str, FloatArray]:
    """What stands for the features of a drafted token as long as there is none, each (rows,)."""
    return dict.fromkeys(TOKEN, np.zeros(rows))


class Layout:
    """Which number of an observation is which. Every feature is one, but the compression, which is one-hot.

    The numbers are in the units of `speckv.features.FEATURES`, not scaled, and none is below 0.

    Args:
        features: their names.

    Attributes:
        names: of the numbers; those of the one-hot are `compression=` and the name of the compression.
    """

    def __init__(self, features: Sequence[str]) -> None:
        self._columns: dict[str, int] = {}
        names: list[str] = []
        for name in features:
            self._columns[name] = len(names)
            names += [f"{name}={value}" for value in COMPRESSIONS] if name == "compression" else [name]
        self.names = tuple(names)

    def largest(self, gamma_max: int, max_new_tokens: int) -> Observations:
        """(len(names),) upper bounds, which depend on nothing but the limits of a draft and of a text, so that an
        agent can move to another recording or cost model."""
        limits = {"position": max_new_tokens} | dict.fromkeys(("last_gamma", "last_accepted", "draft_index"), gamma_max)
        of_unit = {"probability": 1.0, "0 or 1": 1.0, "code": 1.0, "nats": _LARGEST_ENTROPY}
        units = [FEATURES[name.partition("=")[0]].unit for name in self.names]
        bounds = [limits.get(name, of_unit.get(unit, _UNBOUNDED)) for name, unit in zip(self.names, units, strict=True)]
        return np.array(bounds, dtype=np.float32)

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
