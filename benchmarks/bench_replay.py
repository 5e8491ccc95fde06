"""Steps per second of a replay, against a plain loop over steps, in one run: `make bench`.

The sequences of the shipped recording are tiled to 10,000. The figures are printed beside pytest-benchmark's table.
"""

import time

import numpy as np
import pytest

from speckv import Features, Outcome, Policy, Rollouts, replay
from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel, StepCosts
from speckv.plugins import policy_class
from speckv.shipped import shipped_costs, shipped_traces

SEQUENCES = 10_000
PAPER_SIGNALS = ("last_mean_entropy", "last_max_entropy", "last_mean_top1", "last_min_top1")
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
    """What one would write without arrays: one sequence after the other, one step after the other.

    For policies that decide before the step, with the features of the paper's predictor at most; the others are
    replayed one sequence at a time.
    """
    if policy.kind != "before" or not set(policy.features) <= {*PAPER_SIGNALS, "compression"}:
        return sum(len(replay(policy, traces.take([row]), costs).gamma) for row in range(len(traces)))
    steps = 0
    draft = costs.draft.table(130, 600).tolist()
    tables = {str(name): costs.verify[str(name)].table(17, 600).tolist() for name in np.unique(traces.compressions)}
    for row in range(len(traces)):
        compression = str(traces.compressions[row])
        verify = tables[compression]
        run, limit = traces.run[row].tolist(), traces.limit[row].tolist()
        signals = {name: traces.signals[name][row].tolist() for name in ("draft_entropy", "draft_top1")}
        off = {name: traces.off_signals[name][row].tolist() for name in signals}
        state, position, lag, seconds = policy.new_state(1), 0, 1, 0.0
        features = dict.fromkeys(PAPER_SIGNALS, 0.0) | {"compression": float(list(COMPRESSIONS).index(compression))}
        while position < traces.lengths[row]:
            known = Features({name: np.array([value]) for name, value in features.items()}, 1, "before")
            chosen = int(np.asarray(policy.choose_gamma(known, state)).reshape(-1)[0])
            gamma = min(chosen, limit[position])
            accepted = min(gamma, run[position])
            context = int(traces.prompt_lengths[row]) + position
            seconds += verify[gamma + 1][context] + (
                draft[lag][context] + (gamma - 1) * draft[1][context] if gamma else 0
            )
            if gamma:
                wrong = position + run[position]
                seen = {
                    name: [
                        values[position + j] if j <= run[position] else off[name][wrong][j - run[position] - 1]
                        for j in range(gamma)
                    ]
                    for name, values in signals.items()
                }
                entropy, top1 = seen["draft_entropy"], seen["draft_top1"]
                features["last_mean_entropy"], features["last_max_entropy"] = sum(entropy) / gamma, max(entropy)
                features["last_mean_top1"], features["last_min_top1"] = sum(top1) / gamma, min(top1)
            policy.observe(Outcome(np.array([gamma]), np.array([accepted]), np.array([seconds])), state)
            lag = (2 if accepted == gamma else 1) if gamma else lag + 1
            position += accepted + 1
            steps += 1
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
