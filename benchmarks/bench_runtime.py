"""Seconds of a decision by `speckv.runtime`, against the paper's way with scikit-learn, in one run.

The policy is the paper's: a network of 16 units, four gammas. The figures are printed beside pytest-benchmark's table.
"""

import numpy as np
import pytest

from speckv.costs import CostModel
from speckv.paper.timing import time_predictor
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import measure_controller
from speckv.runtime import Bundle
from speckv.shipped import shipped_costs, shipped_traces
from speckv.traces import Rollouts

#: What the project promises of the paper's network on a machine with two cores, seconds.
PROMISED = 10e-6
SIGNALS = {"draft_entropy": 0.4, "draft_top1": 0.8, "draft_top2": 0.1, "draft_top10": 0.98}
DECISIONS = [
    ("mlp", "choose_gamma"),
    ("hazard", "choose_gamma"),
    ("hazard", "draw_token"),
    ("confidence", "keep_drafting"),
    ("heuristic", "choose_gamma"),
]


@pytest.fixture(scope="module")
def costs() -> CostModel:
    return shipped_costs()[0]


@pytest.fixture(scope="module")
def traces() -> Rollouts:
    traces = shipped_traces().load()
    return traces.take(np.isin(traces.ids, np.unique(traces.ids)[:12]))


@pytest.fixture(scope="module")
def fitted(traces: Rollouts, costs: CostModel) -> dict[str, Policy]:
    return {name: make_policy(name).fit(traces, costs) for name in {name for name, _ in DECISIONS}}


@pytest.mark.parametrize(("name", "decision"), DECISIONS, ids=[" ".join(pair) for pair in DECISIONS])
def test_decision(benchmark, fitted: dict[str, Policy], name: str, decision: str) -> None:
    sequence = Bundle(name, fitted[name].program()).start(100, "bf16")
    sequence.choose_gamma()
    sequence.draw_token(**SIGNALS)
    sequence.observe(1, 1, 0.3, 2.0)
    arguments = SIGNALS if decision == "draw_token" else {}

    def begin() -> None:
        if arguments:  # else the draft would only get longer
            sequence.choose_gamma()

    benchmark.pedantic(getattr(sequence, decision), kwargs=arguments, setup=begin, rounds=5000, warmup_rounds=100)
    if name == "mlp":
        assert benchmark.stats.stats.median <= PROMISED


def test_against_scikit_learn(benchmark, capsys, fitted: dict[str, Policy], traces: Rollouts, costs: CostModel) -> None:
    """The same network: scikit-learn once a gamma, the policy in NumPy for n sequences, and the bundle."""
    from sklearn.neural_network import MLPRegressor

    policy, random = fitted["mlp"], np.random.default_rng(0)
    inputs = random.normal(size=(500, 6))  # what it has learned makes no difference to the time
    model = MLPRegressor(hidden_layer_sizes=(16,), max_iter=500, tol=1e-2, random_state=42).fit(inputs, inputs[:, 0])
    sequence = Bundle("mlp", policy.program()).start(100, "bf16")
    benchmark.pedantic(sequence.choose_gamma, rounds=5000, warmup_rounds=100)
    ours = benchmark.stats.stats.median
    published_way, vectorised = time_predictor(model, inputs), measure_controller(policy, traces, costs)[0]
    with capsys.disabled():
        print(
            f"\nmlp, microseconds a decision: {ours * 1e6:.1f} in speckv.runtime, {vectorised * 1e6:.1f} as a policy, "
            f"{published_way * 1e6:.0f} with scikit-learn's predict ({published_way / ours:.0f} times as long)"
        )
    assert ours < vectorised < published_way
