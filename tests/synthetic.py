"""Recordings on disk, and a plain reading of what a recording says."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from speckv.costs import CostModel, Timings
from speckv.testing.recordings import TASKS, dense, make_costs, make_rollout, make_rollouts, make_sequences, spelled
from speckv.traces import DRAFT_SIGNALS, Manifest, Rollout, TraceDataset

__all__ = [
    "TASKS", "dense", "drafted", "make_batch_costs", "make_costs", "make_rollout", "make_rollouts", "make_sequences",
    "seconds_of", "spelled", "step_seconds", "write_dataset",
]  # fmt: skip


def make_batch_costs() -> CostModel:
    """In a large batch every token of a draft takes its time, where a single sequence has some of them for free."""
    tokens = np.arange(1, 18)
    batches = {}
    for size in (4, 32):
        timings = Timings(tokens, np.array([1]), (0.05 + 0.003 * size * (tokens - 1))[:, None])
        batches[size] = replace(make_costs(), verify={"bf16": timings, "nf4": timings})
    return replace(make_costs(), batches=batches)


def write_dataset(path, sequences: Sequence[Rollout], gamma_max: int = 8, budget: int = 40, **settings) -> TraceDataset:
    """The sequences on disk, one shard each, as a recorder leaves them."""
    dataset = TraceDataset.create(path, Manifest(gamma_max, budget, {"target": "synthetic"} | settings))
    for sequence in sequences:
        dataset.add(sequence)
    return dataset


def seconds_of(timings: Timings, tokens: int, context: int) -> float:
    """Seconds of a forward by straight lines between what was measured, one number at a time."""
    grid = [int(n) for n in timings.tokens]
    columns = []
    for column in range(len(timings.contexts)):
        known = [float(row[column]) for row in timings.seconds]
        if len(grid) == 1:
            columns.append(known[0])
        elif tokens >= grid[-1]:
            slope = (known[-1] - known[-2]) / (grid[-1] - grid[-2])
            columns.append(known[-1] + slope * (tokens - grid[-1]))
        else:
            columns.append(_between(tokens, grid, known))
    return _between(min(max(context, timings.contexts[0]), timings.contexts[-1]), list(timings.contexts), columns)


def _between(x: float, grid: list, values: list) -> float:
    for n in range(len(grid) - 1):
        if grid[n] <= x <= grid[n + 1]:
            share = (x - grid[n]) / (grid[n + 1] - grid[n])
            return values[n] + share * (values[n + 1] - values[n])
    return values[0 if x <= grid[0] else -1]


def step_seconds(costs: CostModel, compression: str, context: int, lag: int, forwards: int, gamma: int) -> float:
    """Duration of one step, one number at a time."""
    seconds = seconds_of(costs.verify[compression], gamma + 1, context) + costs.overhead
    if forwards:
        seconds += seconds_of(costs.draft, lag, context) + (forwards - 1) * seconds_of(costs.draft, 1, context)
    return seconds


def drafted(rollout: Rollout, manifest: Manifest, start: int) -> list[tuple[bool, dict[str, float]]]:
    """All tokens that a step at `start` could draft: whether each is accepted, and its signals."""
    starts = np.concatenate([[0], np.cumsum(rollout.off_lengths)])
    draft: list[tuple[bool, dict[str, float]]] = []
    position, wrong = start, False
    while not wrong and position < len(rollout.tokens):
        wrong = bool(rollout.tokens[position] != rollout.draft_tokens[position])
        draft.append((not wrong, {name: float(rollout.signals[name][position]) for name in DRAFT_SIGNALS}))
        position += 1
    if wrong:
        for place in range(starts[position - 1], starts[position]):
            draft.append((False, {name: float(rollout.off_signals[name][place]) for name in DRAFT_SIGNALS}))
    return draft[: max(0, min(manifest.gamma_max, manifest.max_new_tokens - start - 1))]
