"""The paper's study, repeated on a recording of ours.

A rollout trace knows what would have come of every gamma at every position. So the profiling grid of the paper (each
gamma played throughout, each task, each compression) is a replay, and so is the check that the paper's data does not
allow: what really comes of the gammas that its policy chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speckv.comparison import BASELINE, REQUIRED, Cell, compare
from speckv.costs import CostModel
from speckv.evaluation.recording import join, names_of, to_steps
from speckv.features import FloatArray, IntArray
from speckv.paper import protocol
from speckv.paper.data import GAMMAS, Steps
from speckv.plugins import make_policy
from speckv.traces import Rollouts

_BITS = 1 / np.log(2)


@dataclass(frozen=True)
class Grid:
    """The profiling grid of a recording.

    Attributes:
        steps: n rows, in the form of the paper's step log.
        sequence, position: (n,) where in the recording each step starts.
        seconds: cost model -> (n,) durations.
    """

    steps: Steps
    sequence: IntArray
    position: IntArray
    seconds: dict[str, FloatArray]


def profile(traces: Rollouts, costs: Sequence[CostModel]) -> Grid:
    """The step log of each gamma of the paper played throughout, on every sequence, by replay."""
    logs = {
        model.name: join(
            {
                str(gamma): to_steps(make_policy(f"fixed:gamma={gamma}"), traces, model, features=("position",))
                for gamma in GAMMAS
            }
        )
        for model in costs
    }
    log = logs[costs[0].name]
    runs = [f"{name}, {gamma}" for gamma in GAMMAS for name in names_of(traces)]
    run_of = {name: index for index, name in enumerate(runs)}
    run = np.array([run_of[name] for name in log.sequence.tolist()])
    sequence, position = run % len(traces), log.signals["position"].astype(np.int64)
    drafting = log.gamma > 0  # the budget may have left room for the target's own token alone
    steps = Steps(
        compression=traces.compressions[sequence],
        task=traces.tasks[sequence],
        prompt=traces.ids[sequence],
        gamma=np.array(GAMMAS)[run // len(traces)],
        drafted=log.gamma,
        accepted=log.accepted,
        run=run,
        number=log.step,
        signals=_block_signals(traces, sequence, position, log.gamma),
    )
    seconds = {name: np.asarray(of.seconds)[drafting] for name, of in logs.items()}
    return Grid(_take(steps, drafting), sequence[drafting], position[drafting], seconds)


def _take(steps: Steps, mask: Any) -> Steps:
    return Steps(**{name: values[mask] for name, values in vars(steps).items()})


def _block_signals(traces: Rollouts, sequence: IntArray, position: IntArray, drafted: IntArray) -> FloatArray:
    """(steps, 4) what the paper logs of each drafted block, entropies in bits."""
    index = np.arange(max(GAMMAS))
    inside = index < drafted[:, None]
    entropy, confidence = (
        traces.drafted_signal(
            name, sequence[:, None], position[:, None], np.minimum(index, np.maximum(drafted[:, None] - 1, 0))
        ).astype(float)
        for name in ("draft_entropy", "draft_top1")
    )
    count = np.maximum(drafted, 1)
    return np.column_stack(
        [
            (entropy * inside).sum(axis=1) / count * _BITS,
            (confidence * inside).sum(axis=1) / count,
            np.where(inside, entropy, -np.inf).max(axis=1) * _BITS,
            np.where(inside, confidence, np.inf).min(axis=1),
        ]
    )


def repeat_study(
    traces: Rollouts,
    costs: Sequence[CostModel],
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The paper's tables from a recording, under the paper's protocol and from what happens.

    Args:
        traces: recorded up to gamma 8 or more.
        costs: the first also says which gamma the paper's task oracle plays.
        jobs: processes to replay in.
        progress: as of `speckv.compare`.
    """
    grid = profile(traces, costs)
    steps = grid.steps
    optimal = _find_optimal_gammas(grid)
    oracle = {(row["compression"], row["task"]): row["by_seconds"][costs[0].name] for row in optimal}
    _, test = protocol.split(steps)
    judge = protocol.make_predictors()[protocol.FAST].fit(protocol.anticipating_inputs(steps), steps.acceptance)
    judged = protocol.simulate(steps, oracle, test, {"SpecKV-fast": judge})
    happened = protocol.Simulation(test, judged.choices, _play(traces, grid, judged))
    intervals, _ = protocol.bootstrap(judged)
    return {
        "pair": {name: traces.manifest.settings.get(name, "") for name in ("target", "draft")},
        "prompts": len(np.unique(traces.ids)),
        "records": len(steps),
        "correlations": protocol.correlate(steps),
        "optimal_gamma": optimal,
        "gamma_8_share": round(float(np.mean(judged.choices["SpecKV-fast"] == max(GAMMAS))), 3),
        "judged": {
            "table1": protocol.make_table1(steps, judged),
            "table2": protocol.make_table2(steps, judged),
            "improvement_pct": judged.improvement_pct,
            "intervals": intervals,
        },
        "happened": {
            "table1": protocol.make_table1(steps, happened),
            "table2": protocol.make_table2(steps, happened),
            "improvement_pct": happened.improvement_pct,
        },
        "difference": {
            "judged, steps resampled": _interval(judged, np.arange(len(test))),
            "happened, steps resampled": _interval(happened, np.arange(len(test))),
            "happened, prompts resampled": _interval(happened, np.unique(steps.prompt[test], return_inverse=True)[1]),
        },
        "replayed": _replay_held_out(traces, costs, jobs, progress),
    }


def _find_optimal_gammas(grid: Grid) -> list[dict[str, Any]]:
    """The best gamma by tokens a step, and by tokens per second under each cost model, of each cell."""
    steps = grid.steps
    rows = []
    for compression in np.unique(steps.compression):
        for task in dict.fromkeys(steps.task.tolist()):
            cells = [(steps.compression == compression) & (steps.task == task) & (steps.gamma == g) for g in GAMMAS]
            tokens = np.array([steps.tokens[cell].sum() for cell in cells])
            best = {
                name: GAMMAS[int(np.argmax(tokens / [seconds[cell].sum() for cell in cells]))]
                for name, seconds in grid.seconds.items()
            }
            by_tokens = GAMMAS[int(np.argmax(tokens / [cell.sum() for cell in cells]))]
            rows.append({"compression": str(compression), "task": task, "by_tokens": by_tokens, "by_seconds": best})
    return rows


def _play(traces: Rollouts, grid: Grid, judged: protocol.Simulation) -> dict[str, FloatArray]:
    """policy -> (t,) the tokens that come of its choices in the test rows, as the recording knows."""
    where = grid.sequence[judged.test], grid.position[judged.test]
    right, limit = traces.run[where], traces.limit[where]
    return {
        policy: (np.minimum(right, np.minimum(choices, limit)) + 1).astype(float)
        for policy, choices in judged.choices.items()
    }


def _interval(simulation: protocol.Simulation, group: IntArray) -> dict[str, float]:
    """Mean difference of SpecKV-fast and gamma 4 in tokens a step, its 95 % interval by resampling whole groups."""
    difference = simulation.tokens["SpecKV-fast"] - simulation.tokens["Fixed-4"]
    sums, counts = np.bincount(group, weights=difference), np.bincount(group)
    random = np.random.default_rng(protocol.SEED)
    means = []
    for _ in range(protocol.RESAMPLES):
        drawn = random.integers(len(sums), size=len(sums))
        means.append(sums[drawn].sum() / counts[drawn].sum())
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": round(float(difference.mean()), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def _replay_held_out(
    traces: Rollouts, costs: Sequence[CostModel], jobs: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """The paper's MLP on held-out prompts, with signals of the previous block, as `speckv compare` measures it."""
    required = [make_policy("fixed:gamma=4" if name == "fixed-4" else name) for name in REQUIRED]
    result = compare([make_policy("mlp"), *required], traces, costs, jobs=jobs, progress=progress)
    shown = ("none", "fixed-4", BASELINE, "mlp")
    rows = []
    for model in costs:
        for compression in np.unique(traces.compressions).tolist():
            here = (cell for cell in result.cells if (cell.costs, cell.compression) == (model.name, compression))
            cells: dict[str, Cell] = {cell.policy: cell for cell in here}
            mlp, four = cells["mlp"], cells["fixed-4"]
            low, high = mlp.gain_ci or (0.0, 0.0)
            rows.append(
                {
                    "costs": model.name,
                    "compression": compression,
                    "tokens_per_second": {p: float(f"{cells[p].throughput:.3g}") for p in shown},
                    "tokens_per_step": {p: round(cells[p].tokens_per_step, 2) for p in shown},
                    "tokens_per_step_over_fixed_4_pct": _percent(mlp.tokens_per_step / four.tokens_per_step - 1),
                    "over_fixed_4_pct": _percent(mlp.throughput / four.throughput - 1),
                    "over_best_fixed": {"gain_pct": _percent(mlp.gain), "low": _percent(low), "high": _percent(high)},
                    "gamma_8_share": round(mlp.gamma_share[max(GAMMAS)], 3),
                }
            )
    return rows


def _percent(share: float) -> float:
    return round(100 * share, 1) + 0.0  # no negative zero
