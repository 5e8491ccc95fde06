"""Steps per second of a replay, against a plain loop over steps, in one run: `make bench`.

The sequences of the shipped recording are tiled to 10,000. The figures are printed beside pytest-benchmark's table.
"""

import time

import numpy as np
import pytest

from speckv import Policy, Rollouts, replay
from speckv.costs import CostModel, StepCosts
from speckv.plugins import policy_class
from speckv.shipped import shipped_costs, shipped_traces

SEQUENCES = 10_000
#: What the project promises on a machine with two cores, steps per second.
PROMISED = {"fixed": 1_000_000, "mlp": 200_000}


@pytest.fixture(scope="module")
def costs() -> CostModel:
    return shipped_costs()[0]


@pytest.fixture(scope="module")
def recorded() -> Rollouts:
    return shipped_traces().load()


@pytest.mark.parametrize("name", ["fixed", "mlp", "mlp-throughput", "heuristic", "confidence", "hazard"])
def test_replay(benchmark, capsys, recorded: Rollouts, costs: CostModel, name: str) -> None:
    policy = policy_class(name)().fit(recorded, costs)
    tiled = recorded.take(np.resize(np.arange(len(recorded)), SEQUENCES))
    result = benchmark.pedantic(replay, (policy, tiled, costs), rounds=5, warmup_rounds=1)
    rate = len(result.gamma) / benchmark.stats.stats.median
    few = recorded.take(np.arange(20))
    start = time.perf_counter()
    steps = plain_loop(policy, few, costs)
    plain = steps / (time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{name}: {rate:,.0f} steps/s replayed, {plain:,.0f} in a plain loop, {rate / plain:.0f} times")
    assert rate > plain
    assert rate >= PROMISED.get(name, 0)


def plain_loop(policy: Policy, traces: Rollouts, costs: CostModel) -> int:
    """Decode one sequence after the other, one step after the other; only the decisions are the policy's own."""
    steps = 0
    for row in range(len(traces)):
        steps += len(replay(policy, traces.take([row]), costs).gamma)
    return steps


def test_oracle(benchmark, recorded: Rollouts, costs: CostModel) -> None:
    from speckv import oracle

    bound = benchmark.pedantic(oracle, (recorded, costs), rounds=3)
    assert (bound.seconds > 0).all()


def test_step_costs(benchmark, recorded: Rollouts, costs: CostModel) -> None:
    table = StepCosts(costs, recorded.compressions, 17, 512)
    rows = np.resize(np.arange(len(recorded)), SEQUENCES)
    seconds = benchmark(table.seconds, rows, np.full(SEQUENCES, 200), np.ones(SEQUENCES, dtype=int), 4, 4)
    assert (seconds > 0).all()
