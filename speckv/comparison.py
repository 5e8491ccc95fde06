"""Comparing policies on held-out prompts, in tokens per second (rule R5)."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FloatArray, IntArray
from speckv.policy import Clairvoyant, Policy
from speckv.replaying import Replay, measure_controller, replay
from speckv.traces import Rollouts, TraceDataset

BASELINE = "best-fixed"
#: Policies that every comparison holds: baselines, the reference and the bound.
REQUIRED = ("none", "fixed-4", BASELINE, "perfect-judge", "oracle")
RESAMPLES = 9_999


@dataclass(frozen=True)
class Cell:
    """One policy at one compression under one cost model, over all held-out prompts.

    Attributes:
        costs, compression, policy: names; compression is `all` for the sum over compressions.
        throughput: committed tokens a second, decisions of the policy included.
        gain: throughput over that of the best fixed gamma, minus 1.
        gain_ci: its 95 % interval (paired bootstrap over prompts), None for the baseline itself.
        p: of no difference to the best fixed gamma (paired permutation over prompts), Holm-corrected for the
            number of policies in this table; None for the baseline and for the clairvoyant bounds.
        gap_closed, judge_gap_closed: share of the way from the best fixed gamma to the oracle and to the perfect
            judge; None where they are less than 0.1 % ahead.
        tokens_per_step: committed tokens a step.
        gamma_share: share of the steps by gamma, from 0.
        switches: changes of gamma from one step of a sequence to the next, per 1,000 steps.
        decision_us: microseconds of the policy's decisions in a step.
    """

    costs: str
    compression: str
    policy: str
    throughput: float
    gain: float
    gain_ci: tuple[float, float] | None
    p: float | None
    gap_closed: float | None
    judge_gap_closed: float | None
    tokens_per_step: float
    gamma_share: tuple[float, ...]
    switches: float
    decision_us: float


@dataclass(frozen=True)
class Comparison:
    """The table of a comparison, and how it was made."""

    cells: list[Cell]
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"format": "speckv-comparison", "schema_version": 1, "settings": self.settings,
                "cells": [asdict(cell) for cell in self.cells]}  # fmt: skip


@dataclass
class _Tally:
    """Sums over the held-out steps of one policy, by sequence."""

    seconds: FloatArray
    controller: FloatArray
    steps: IntArray
    switches: IntArray
    gammas: IntArray

    @classmethod
    def empty(cls, sequences: int, gamma_max: int) -> "_Tally":
        return cls(
            np.zeros(sequences),
            np.zeros(sequences),
            np.zeros(sequences, dtype=np.int64),
            np.zeros(sequences, dtype=np.int64),
            np.zeros((sequences, gamma_max + 1), dtype=np.int64),
        )

    def add(self, run: Replay, rows: IntArray) -> None:
        """Count the steps of a replay of the sequences at `rows`."""
        sequence = rows[run.sequence]
        np.add.at(self.seconds, sequence, run.seconds)
        np.add.at(self.controller, sequence, run.controller_seconds)
        np.add.at(self.steps, sequence, 1)
        np.add.at(self.gammas, (sequence, run.gamma), 1)
        changed = (np.diff(run.sequence) == 0) & (np.diff(run.gamma) != 0)
        np.add.at(self.switches, sequence[1:][changed], 1)


def compare(
    policies: Sequence[Policy],
    traces: Rollouts | TraceDataset,
    costs: Sequence[CostModel],
    folds: int = 5,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Cross-validate policies by prompt and compare their throughput.

    Every prompt is held out once, at all its compressions together; whatever a policy learns or tunes comes from
    the other folds. The folds hold each task in equal shares. An online policy starts each fold with the memory that
    `fit` left it, and carries it through the fold's sequences in their order.

    Args:
        policies: unfitted; their labels must differ and include `REQUIRED`.
        traces: recorded sequences.
        costs: the comparison is made under each of these cost models.
        folds: number of folds.
        seed: of the folds, the fits and the resampling. The same seed gives the same result, as long as `costs`
            knows the decision times of all policies; those it does not know are measured here.
        jobs: processes to work in.
        progress: called with how many policies have been fitted and replayed, and how many there are, counting each
            cost model.

    Raises:
        SpecKVError: fewer prompts than folds, or a cost model lacks a compression.
    """
    traces = traces.load() if isinstance(traces, TraceDataset) else traces
    labels = [policy.label for policy in policies]
    if missing := [name for name in REQUIRED if name not in labels]:
        raise SpecKVError(f"the comparison lacks {', '.join(missing)}, which every honest one holds; add them")
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise SpecKVError(f"two policies of the comparison are called {twice[0]}; leave one out")
    fold_of = _folds(traces, folds, seed)
    costs, timed_here = _with_decision_times(policies, traces, costs)
    tasks = [(model, policy) for model in costs for policy in policies]
    work = joblib.Parallel(n_jobs=jobs, return_as="generator")(
        joblib.delayed(_held_out)(policy, traces, model, fold_of, folds, seed) for model, policy in tasks
    )
    results: dict[tuple[str, str], _Tally] = {}
    for (model, policy), tally in zip(tasks, work, strict=True):
        results[model.name, policy.label] = tally
        progress(len(results), len(tasks))
    bounds = {policy.label for policy in policies if isinstance(policy, Clairvoyant)}
    cells: list[Cell] = []
    for model in costs:
        tallies = {label: results[model.name, label] for label in labels}
        for compression in ("all", *np.unique(traces.compressions)):
            mask = np.ones(len(traces), dtype=bool) if compression == "all" else traces.compressions == compression
            cells.extend(_cells(model.name, str(compression), tallies, traces, mask, bounds, seed))
    settings = {
        "policies": {policy.label: repr(policy) for policy in policies},
        "costs": [model.name for model in costs],
        "traces": traces.manifest.settings,
        "prompts": len(np.unique(traces.ids)),
        "sequences": len(traces),
        "tokens": int(traces.lengths.sum()),
        "folds": folds,
        "seed": seed,
        "resamples": RESAMPLES,
        "decision_times_measured_here": timed_here,
    }
    return Comparison(cells, settings)


def _folds(traces: Rollouts, folds: int, seed: int) -> IntArray:
    """The fold of each sequence: all sequences of a prompt in one, each task in equal shares."""
    from sklearn.model_selection import StratifiedKFold

    prompts, first, prompt_of = np.unique(traces.ids, return_index=True, return_inverse=True)
    if len(prompts) < folds:
        raise SpecKVError(f"the traces hold {len(prompts)} prompts, too few for {folds} folds; record more")
    tasks = traces.tasks[first]
    _, counts = np.unique(tasks, return_counts=True)
    if counts.min() < folds:  # too few of a task to have some in each fold
        tasks = np.zeros(len(prompts), dtype=np.int64)
    fold_of_prompt = np.zeros(len(prompts), dtype=np.int64)
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for fold, (_, held_out) in enumerate(splitter.split(prompts, tasks)):
        fold_of_prompt[held_out] = fold
    return fold_of_prompt[prompt_of]


def _with_decision_times(
    policies: Sequence[Policy], traces: Rollouts, costs: Sequence[CostModel]
) -> tuple[list[CostModel], list[str]]:
    """The cost models, each with the decision times of all policies, and the names of those that were measured here
    because a model lacks them."""
    unknown = {
        policy.name: policy
        for policy in policies
        if not isinstance(policy, Clairvoyant) and any(policy.name not in model.controller for model in costs)
    }
    measured = {}
    for name, policy in unknown.items():
        with _naming(policy):
            measured[name] = measure_controller(copy.deepcopy(policy).forget().fit(traces, costs[0]), traces, costs[0])
    return [replace(model, controller=measured | model.controller) for model in costs], sorted(measured)


def _held_out(policy: Policy, traces: Rollouts, costs: CostModel, fold_of: IntArray, folds: int, seed: int) -> _Tally:
    """Fit on all folds but one, replay on that one, for each fold."""
    tally = _Tally.empty(len(traces), traces.gamma_max)
    for fold in range(folds):
        train, test = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        with _naming(policy):
            fitted = copy.deepcopy(policy).forget().fit(traces.take(train), costs, seed)
            tally.add(replay(fitted, traces.take(test), costs), test)
    return tally


@contextlib.contextmanager
def _naming(policy: Policy) -> Iterator[None]:
    """Whatever a policy raises becomes one line that names it."""
    try:
        yield
    except SpecKVError:
        raise
    except Exception as error:
        raise SpecKVError(f"policy {policy.label!r} fails: {type(error).__name__}: {error}") from error


def _cells(
    costs: str,
    compression: str,
    tallies: dict[str, _Tally],
    traces: Rollouts,
    mask: npt.NDArray[np.bool_],
    bounds: set[str],
    seed: int,
) -> list[Cell]:
    _, prompt_of = np.unique(traces.ids[mask], return_inverse=True)
    by_prompt = {
        label: np.bincount(prompt_of, weights=tally.seconds[mask]).astype(float) for label, tally in tallies.items()
    }
    tokens = int(traces.lengths[mask].sum())
    throughput = {label: tokens / seconds.sum() for label, seconds in by_prompt.items()}
    base = throughput[BASELINE]
    tested = [label for label in tallies if label != BASELINE and label not in bounds]
    p_values = holm([_permutation_p(by_prompt[label], by_prompt[BASELINE], seed) for label in tested])
    p_of = dict(zip(tested, p_values, strict=True))

    def closed(label: str, bound: str) -> float | None:
        room = throughput[bound] - base
        return (throughput[label] - base) / room if room > 0.001 * base else None

    cells = []
    for label, tally in tallies.items():
        steps = int(tally.steps[mask].sum())
        gammas = tally.gammas[mask].sum(axis=0)
        cells.append(
            Cell(
                costs=costs,
                compression=compression,
                policy=label,
                throughput=throughput[label],
                gain=throughput[label] / base - 1,
                gain_ci=None if label == BASELINE else _gain_interval(by_prompt[label], by_prompt[BASELINE], seed),
                p=p_of.get(label),
                gap_closed=closed(label, "oracle"),
                judge_gap_closed=closed(label, "perfect-judge"),
                tokens_per_step=tokens / steps,
                gamma_share=tuple((gammas / steps).tolist()),
                switches=1000 * int(tally.switches[mask].sum()) / steps,
                decision_us=1e6 * float(tally.controller[mask].sum()) / steps,
            )
        )
    return sorted(cells, key=lambda cell: -cell.throughput)


def _gain_interval(seconds: FloatArray, baseline: FloatArray, seed: int) -> tuple[float, float]:
    """95 % percentile interval of the gain; prompts are resampled, both policies on the same ones.

    Both commit the same tokens on every prompt, so that the gain is the ratio of the summed seconds.
    """
    from scipy.stats import bootstrap

    if np.array_equal(seconds, baseline):
        return 0.0, 0.0
    interval = bootstrap(
        (seconds, baseline),
        lambda a, b, axis: b.sum(axis=axis) / a.sum(axis=axis) - 1,
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _permutation_p(seconds: FloatArray, baseline: FloatArray, seed: int) -> float:
    """Two-sided p of equal throughput: which of the two policies a prompt's seconds belong to is swapped at random."""
    from scipy.stats import permutation_test

    result = permutation_test(
        (seconds, baseline),
        lambda a, b, axis: np.log(a.sum(axis=axis) / b.sum(axis=axis)),
        permutation_type="samples",
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p values that hold for all of them together."""
    p = np.asarray(p_values, dtype=float)
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(stepped, 1.0)
    return [float(value) for value in corrected]
