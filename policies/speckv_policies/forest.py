"""The SpecKV paper's slower and more accurate predictor: a random forest."""

from typing import Any, Self

import numpy as np

from speckv import CostModel, Features, Rollouts
from speckv.features import FloatArray
from speckv.steplogs import StepLog
from speckv_policies.mlp import SIGNALS, AcceptancePredictor
from speckv_policies.parameters import check_count


class Forest(AcceptancePredictor):
    """Predicts the acceptance rate of each gamma with a random forest, and plays the most tokens a step.

    Records, inputs and choice are those of `Mlp`.

    Args:
        gammas: the choices, tokens.
        trees: of the forest, from 1.
        records: most training records, drawn at random; the paper had 4,089.
        random_state: of scikit-learn's regressor.
    """

    name = "forest"
    source = (
        "SpecKV (arXiv 2605.02888), RF-100, constants read in its source: gammas 2, 4, 6, 8, 100 trees, scikit-learn "
        "RandomForestRegressor with seed 42"
    )

    def __init__(
        self, gammas: tuple[int, ...] = (2, 4, 6, 8), trees: int = 100, records: int = 4089, random_state: int = 42
    ) -> None:
        super().__init__(gammas, records)
        check_count(1, trees=trees)
        self.trees, self.random_state = trees, random_state

    def fit(self, traces: Rollouts, costs: CostModel, seed: int = 0) -> Self:
        return self._learn(*self._records(traces, costs, seed))

    def fit_steps(self, log: StepLog, costs: CostModel, seed: int = 0) -> Self:
        return self._learn(*self._logged_records(log, seed))

    def _learn(self, inputs: FloatArray, rates: FloatArray) -> Self:
        from sklearn.ensemble import RandomForestRegressor

        model = RandomForestRegressor(n_estimators=self.trees, random_state=self.random_state).fit(inputs, rates)
        self.fitted = flatten([estimator.tree_ for estimator in model.estimators_])
        return self

    def predict(self, features: Features) -> FloatArray:
        x = np.column_stack([features[name] for name in SIGNALS])
        gammas = np.tile(self.gammas, len(x))
        inputs = np.column_stack([np.repeat(x, len(self.gammas), axis=0), gammas])
        return evaluate(self.fitted, inputs).reshape(len(x), len(self.gammas))


def flatten(trees: list[Any]) -> dict[str, Any]:
    """scikit-learn's trees one behind the other, as arrays with one entry a node.

    Returns:
        root: (trees,) its node.
        left, right: the children of a node; a leaf is its own child, so that a walk may pass over it.
        feature, threshold: go left if input number `feature` is at most `threshold`.
        value: prediction at a leaf.
        depth: of the deepest tree.
    """
    root = np.cumsum([0, *(tree.node_count for tree in trees[:-1])]).astype(np.int32)
    leaf = np.concatenate([tree.children_left < 0 for tree in trees])
    nodes = np.arange(len(leaf), dtype=np.int32)

    def children(name: str) -> Any:
        moved = np.concatenate([getattr(tree, name) + start for tree, start in zip(trees, root, strict=True)])
        return np.where(leaf, nodes, moved).astype(np.int32)

    return {
        "root": root,
        "left": children("children_left"),
        "right": children("children_right"),
        "feature": np.where(leaf, 0, np.concatenate([tree.feature for tree in trees])).astype(np.int32),
        "threshold": np.concatenate([tree.threshold for tree in trees]),
        "value": np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        "depth": np.array(max(tree.max_depth for tree in trees)),
    }


def evaluate(forest: dict[str, Any], inputs: FloatArray) -> FloatArray:
    """The forest's mean prediction for each row of `inputs`, (n,); scikit-learn compares in float32 as well."""
    values = inputs.astype(np.float32)
    row = np.arange(len(inputs))[:, None]
    node = np.broadcast_to(forest["root"], (len(inputs), len(forest["root"])))
    for _ in range(int(forest["depth"])):
        below = values[row, forest["feature"][node]] <= forest["threshold"][node]
        node = np.where(below, forest["left"][node], forest["right"][node])
    return np.asarray(forest["value"][node].mean(axis=1))
