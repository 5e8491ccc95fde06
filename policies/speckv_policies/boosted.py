"""A hazard of boosted trees, weighed against measured cost."""

from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.features import FloatArray
from speckv.runtime.models import Inputs, Model, Trees
from speckv_policies.estimators import logit, share_of, sigmoid
from speckv_policies.parameters import check_count, check_range
from speckv_policies.stopping import Examples, Kind, SurvivalStop


class BoostedHazard(SurvivalStop):
    """Drafts on while the next tokens are worth their time; the chances are boosted trees.

    scikit-learn's trees are kept as arrays: of each node the feature that it looks at, the threshold up to which a
    row goes left, its two children, and its value. A leaf is its own child, so that all rows walk as many steps.

    Args:
        trees: of each of the three models, from 1.
        depth: of a tree, from 1.
        learning_rate: above 0, at most 1.
    """

    name = "boosted-hazard"
    source = "gradient boosting (Friedman, 2001) as in scikit-learn; `hazard` with trees for its regressions is ours"

    def __init__(self, trees: int = 40, depth: int = 2, learning_rate: float = 0.15) -> None:
        super().__init__()
        check_count(1, trees=trees, depth=depth)
        check_range(1e-9, 1, learning_rate=learning_rate)
        self.trees, self.depth, self.learning_rate = trees, depth, learning_rate

    def learn(self, kind: Kind, examples: Examples, seed: int) -> dict[str, npt.NDArray[Any]]:
        from sklearn.ensemble import GradientBoostingClassifier

        right = examples.right
        names = [f"{kind}_{part}" for part in ("feature", "threshold", "child", "value", "start")]
        if right.all() or not right.any():  # one class only, or nothing
            start = logit(share_of(right)[None])
            nothing = (np.zeros((1, 1), np.int64), np.zeros((1, 1)), np.zeros((1, 1, 2), np.int64), np.zeros((1, 1)))
            return dict(zip(names, (*nothing, start), strict=True))
        model = GradientBoostingClassifier(
            n_estimators=self.trees,
            max_depth=self.depth,
            learning_rate=self.learning_rate,
            min_samples_leaf=max(1, min(50, len(right) // 4)),
            subsample=0.5,
            random_state=seed,
        ).fit(examples.inputs.astype(np.float32), right)
        trees = [tree.tree_ for tree in model.estimators_[:, 0]]
        most = max(tree.node_count for tree in trees)
        feature, threshold, value = (np.zeros((len(trees), most), kind) for kind in (np.int64, float, float))
        child = np.tile(np.arange(most)[:, None], (len(trees), 1, 2))
        for number, tree in enumerate(trees):
            count, inner = tree.node_count, np.flatnonzero(tree.children_left >= 0)
            feature[number, inner], threshold[number, inner] = tree.feature[inner], tree.threshold[inner]
            child[number, inner] = np.column_stack([tree.children_left, tree.children_right])[inner]
            value[number, :count] = self.learning_rate * tree.value[:, 0, 0]
        start = logit(right.mean(keepdims=True))
        return dict(zip(names, (feature, threshold, child, value, start), strict=True))

    def chance(self, kind: Kind, inputs: FloatArray) -> FloatArray:
        feature, threshold, child, value, start = (
            self.fitted[f"{kind}_{part}"] for part in ("feature", "threshold", "child", "value", "start")
        )
        rows, tree = np.arange(len(inputs))[:, None], np.arange(len(feature))
        inputs = inputs.astype(np.float32)  # as the trees were grown
        node = np.zeros((len(inputs), len(feature)), dtype=np.int64)
        for _ in range(self.depth):
            goes_right = inputs[rows, feature[tree, node]] > threshold[tree, node]
            node = child[tree, node, goes_right.astype(np.int64)]
        return sigmoid(start + value[tree, node].sum(axis=1))

    def model(self, kind: Kind, inputs: Inputs) -> Model:
        feature, threshold, child, value, start = (
            self.fitted[f"{kind}_{part}"] for part in ("feature", "threshold", "child", "value", "start")
        )
        root = np.arange(len(feature)) * feature.shape[1]  # the trees one behind the other
        left, right = (child + root[:, None, None]).reshape(-1, 2).T
        return Trees(inputs, root, feature.ravel(), threshold.ravel(), left, right, value.reshape(-1, 1), start,
                     output="logistic")  # fmt: skip
