"""Models from features to numbers, evaluated for one sequence at a time: small networks and decision trees.

Of a few numbers Python's own arithmetic is faster than NumPy's, whose calls take about half a microsecond each.
"""

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: Features by name.
Values = Mapping[str, float]


def logit(probability: float) -> float:
    """Log odds of a probability, which is kept away from 0 and 1."""
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -500.0), 500.0)))


#: The smallest positive number of full precision, which stands for 0 in logs.
TINY = sys.float_info.min
#: What may be done to a feature before a model sees it. A feature that was rounded below its range counts as its bound.
TRANSFORMS: dict[str, Callable[[float], float]] = {
    "none": float,
    "log": lambda x: math.log(TINY if x < TINY else x),
    "log1p": math.log1p,
    "logit": logit,
    "sqrt": lambda x: math.sqrt(0.0 if x < 0 else x),
}
#: What may be done to what a model says: nothing, turn log odds into a chance, or keep it from 0 to 1.
OUTPUTS: dict[str, Callable[[float], float]] = {
    "linear": float,
    "logistic": sigmoid,
    "unit": lambda x: min(max(x, 0.0), 1.0),
}


@dataclass(frozen=True)
class Inputs:
    """What a model sees.

    Attributes:
        features: their names, one for each input.
        transforms: of each, from `TRANSFORMS`, or `=CODE` for 1 if the feature is CODE and 0 if it is not.
    """

    features: tuple[str, ...]
    transforms: tuple[str, ...]

    @cached_property
    def _parts(self) -> list[tuple[str, Callable[[float], float]]]:
        functions = [
            _indicator(float(name[1:])) if name.startswith("=") else TRANSFORMS[name] for name in self.transforms
        ]
        return list(zip(self.features, functions, strict=True))

    def of(self, values: Values) -> list[float]:
        return [function(values[name]) for name, function in self._parts]


def _indicator(code: float) -> Callable[[float], float]:
    return lambda value: 1.0 if value == code else 0.0


@dataclass(frozen=True, eq=False)
class Network:
    """Layers of weights and biases with `activation` between them.

    Attributes:
        inputs: k of them.
        weights, biases: of each layer, (units before, units) and (units,).
        activation: `relu` or `tanh`.
        output: from `OUTPUTS`.
    """

    inputs: Inputs
    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    activation: str = "relu"
    output: str = "linear"

    def __post_init__(self) -> None:
        sizes = [len(self.inputs.features), *map(len, self.biases)]
        if [weight.shape for weight in self.weights] != list(itertools.pairwise(sizes)):
            raise ValueError("a network has layers that do not fit together")

    @property
    def outputs(self) -> int:
        """How many numbers it says."""
        return int(self.weights[-1].shape[1])

    @cached_property
    def _columns(self) -> list[tuple[list[float], float]]:
        """Weights and bias of each output of a network without hidden layers."""
        return [(column.tolist(), float(bias)) for column, bias in zip(self.weights[0].T, self.biases[0], strict=True)]

    @cached_property
    def _layers(self) -> list[tuple[Array, Array]]:
        return [(np.ascontiguousarray(w.T), b) for w, b in zip(self.weights, self.biases, strict=True)]

    def of(self, values: Values) -> list[float]:
        """What it says, (outputs,)."""
        finish, x = OUTPUTS[self.output], self.inputs.of(values)
        if len(self.weights) == 1:
            return [finish(sum(map(float.__mul__, x, column), bias)) for column, bias in self._columns]
        vector, last = np.array(x), len(self._layers) - 1
        for number, (weight, bias) in enumerate(self._layers):
            vector = weight.dot(vector)
            vector += bias
            if number < last:
                vector = np.maximum(vector, 0.0) if self.activation == "relu" else np.tanh(vector)
        return [finish(y) for y in vector.tolist()]


@dataclass(frozen=True, eq=False)
class Trees:
    """Binary decision trees whose leaves are added up. Inputs are compared in single precision, as they were grown.

    Attributes:
        inputs: k of them.
        root: (trees,) node that each starts from.
        feature, threshold: (nodes,) go left if input number `feature` is at most `threshold`.
        left, right: (nodes,) children; a leaf is its own child.
        value: (nodes, outputs), of the leaves.
        start: (outputs,) what the leaves are added to.
        output: from `OUTPUTS`.
    """

    inputs: Inputs
    root: Array
    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array
    start: Array
    output: str = "linear"

    def __post_init__(self) -> None:
        nodes = np.arange(len(self.feature))
        if {len(part) for part in (self.threshold, self.left, self.right, self.value)} != {len(nodes)}:
            raise ValueError("trees have arrays of unequal lengths")
        if self.start.shape != self.value.shape[1:]:
            raise ValueError("trees have a start that does not fit their leaves")
        for child in (self.left, self.right):
            if not ((child == nodes) | ((child > nodes) & (child < len(nodes)))).all():
                raise ValueError("a tree has a node that is not below its parent")
        if not ((self.feature >= 0) & (self.feature < len(self.inputs.features))).all():
            raise ValueError("a tree looks at an input that is not there")
        inner = self.left != nodes
        reached = np.bincount(np.concatenate([self.root, self.left[inner], self.right[inner]]), minlength=len(nodes))
        if len(reached) > len(nodes) or (reached[inner | self.value.any(axis=1)] != 1).any():
            raise ValueError("a tree has a node that is not reached, or twice")

    @property
    def outputs(self) -> int:
        """How many numbers they say."""
        return int(self.value.shape[1])

    @cached_property
    def _lists(self) -> tuple[list[Any], ...]:
        arrays = (self.root, self.feature, self.threshold, self.left, self.right, self.value, self.start)
        return tuple(array.tolist() for array in arrays)

    def of(self, values: Values) -> list[float]:
        """What they say, (outputs,)."""
        root, feature, threshold, left, right, value, start = self._lists
        x = np.array(self.inputs.of(values), dtype=np.float32).tolist()
        total = list(start)
        for node in root:
            while left[node] != node:
                node = left[node] if x[feature[node]] <= threshold[node] else right[node]
            for number, leaf in enumerate(value[node]):
                total[number] += leaf
        return [OUTPUTS[self.output](y) for y in total]


Model = Network | Trees
