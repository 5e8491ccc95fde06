"""How long a decision takes, measured here."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from speckv.costs import CostModel
from speckv.features import FloatArray
from speckv.paper.data import GAMMAS
from speckv.plugins import make_policy
from speckv.replaying import measure_controller
from speckv.traces import Rollouts


def time_predictor(model: Any, inputs: FloatArray, repeats: int = 200) -> float:
    """Median seconds of a decision made the paper's way: scikit-learn predicts one row for each gamma in turn.

    Args:
        model: fitted.
        inputs: (n, 6) of which the first row is used.
    """
    rows = []
    for gamma in GAMMAS:
        row = inputs[:1].copy()
        row[0, -1] = gamma
        rows.append(row)
    seconds = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        for row in rows:
            model.predict(row)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[5:]))  # the first ones warm up


def time_policy(traces: Rollouts, costs: Sequence[CostModel]) -> float:
    """Median seconds of a decision of the policy `mlp`: the same network in NumPy, all gammas at once."""
    prompts = np.unique(traces.ids)[:8]
    few = traces.take(np.isin(traces.ids, prompts))
    return measure_controller(make_policy("mlp").fit(few, costs[0]), few, costs[0])[0]
