"""Comparing policies on held-out prompts, in tokens per second (rule R5)."""

import contextlib
import copy
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar, get_args

import joblib
import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FloatArray, IntArray
from speckv.files import check_version, read_json
from speckv.policy import Clairvoyant, Policy
from speckv.replaying import Replay, known_controller, measure_controller, replay
from speckv.traces import Rollouts, TraceDataset

BASELINE = "best-fixed"
#: Policies that every comparison holds: baselines, the reference and the bound.
REQUIRED = ("none", "fixed-4", BASELINE, "perfect-judge", "oracle")
RESAMPLES = 9_999
#: What is held out together: prompts, in folds, or all prompts of a task.
HoldOut = Literal["prompt", "task"]
FORMAT = "speckv-comparison"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One policy at one compression under one cost model, over all held-out prompts.

    Attributes:
        costs, compression, policy: names; compression is `all` for the sum over compressions.
        throughput: committed tokens a second, decisions of the policy included.
        gain: throughput over that of the policy compared with (the best fixed gamma, if not told otherwise), minus 1.
        gain_ci: its 95 % interval (paired bootstrap over prompts), None for that policy itself and of a single prompt.
        p: of no difference to that policy (paired permutation over prompts), Holm-corrected for the number of
            policies in this table; None for itself, for the clairvoyant bounds and of a single prompt.
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
class TaskCell:
    """One policy on the prompts of one task.

    Attributes:
        costs, compression, task, policy: names; compression is `all` for the sum over compressions.
        throughput, gain, gain_ci: as of `Cell`; of a single prompt there is no interval.
    """

    costs: str
    compression: str
    task: str
    policy: str
    throughput: float
    gain: float
    gain_ci: tuple[float, float] | None


@dataclass(frozen=True)
class Change:
    """How far a policy's decisions differ between two machines.

    Attributes:
        policy: its label.
        costs, other_costs: names of the two cost models.
        share: of the steps that start at the same token under both, those that draft another number of tokens. It is 0
            for a policy that looks at acceptance alone.
    """

    policy: str
    costs: str
    other_costs: str
    share: float


@dataclass(frozen=True)
class Comparison:
    """The table of a comparison, the same by task, how it was made, and what changes from one machine to the next."""

    cells: list[Cell]
    by_task: list[TaskCell]
    settings: dict[str, Any]
    changes: list[Change] = field(default_factory=list)

    @property
    def against(self) -> str:
        """Label of the policy that gains, intervals and p values compare with."""
        return str(self.settings["against"])

    @property
    def bounds(self) -> set[str]:
        """Labels of the policies that look at the future."""
        return {cell.policy for cell in self.cells if cell.compression == "all" and cell.p is None} - {self.against}

    @property
    def compressions(self) -> list[str]:
        """Those of the cells, without the sum over all."""
        return sorted({cell.compression for cell in self.cells} - {"all"})

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, "settings": self.settings,
                "cells": [asdict(cell) for cell in self.cells],
                "by_task": [asdict(cell) for cell in self.by_task],
                "changes": [asdict(change) for change in self.changes]}  # fmt: skip

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Read what `speckv compare --json` wrote.

        Raises:
            SpecKVError: the file is not one, is damaged, or is of a newer schema version.
        """
        path = pathlib.Path(path)
        value = read_json(path, "the result of a comparison")
        if value.get("format") != FORMAT:
            raise SpecKVError(f"{path}: is not the result of a comparison; make one with `speckv compare --json`")
        check_version(value.get("schema_version"), SCHEMA_VERSION, path)
        try:
            settings = {key: value["settings"][key] for key in _NEEDED}
            cells = [_from_row(Cell, row) for row in value["cells"]]
            by_task = [_from_row(TaskCell, row) for row in value["by_task"]]
            changes = [_from_row(Change, row) for row in value.get("changes", [])]
        except (KeyError, TypeError, ValueError) as error:
            raise SpecKVError(f"{path}: not a whole result of a comparison ({error!r}); compare again") from None
        return cls(cells, by_task, value["settings"] | settings, changes)


#: Settings without which nothing can be made of a result.
_NEEDED = ("policies", "costs", "traces", "prompts", "sequences", "tokens", "folds", "hold_out", "against", "seed")
_Row = TypeVar("_Row", Cell, TaskCell, Change)


def _from_row(kind: type[_Row], row: dict[str, Any]) -> _Row:
    """A cell from JSON; KeyError, TypeError or ValueError if a value is missing or of another type."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        value = row[item.name]
        if isinstance(value, str) != (item.type is str) or (value is None and type(None) not in get_args(item.type)):
            raise TypeError(f"{item.name} is {value!r}")
        if not (value is None or isinstance(value, str) or np.isfinite(np.asarray(value, dtype=float)).all()):
            raise ValueError(f"{item.name} is {value!r}")
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


@dataclass
class _Tally:
    """Sums over the held-out steps of one policy, by sequence."""

    seconds: FloatArray
    controller: FloatArray
    steps: IntArray
    switches: IntArray
    gammas: IntArray
    #: (S, T) tokens drafted by the step that starts at a position, -1 where none starts.
    played: IntArray

    @classmethod
    def empty(cls, traces: Rollouts) -> "_Tally":
        sequences = len(traces)
        return cls(
            np.zeros(sequences),
            np.zeros(sequences),
            np.zeros(sequences, dtype=np.int64),
            np.zeros(sequences, dtype=np.int64),
            np.zeros((sequences, traces.gamma_max + 1), dtype=np.int64),
            np.full(traces.tokens.shape, -1),
        )

    def add(self, run: Replay, rows: IntArray) -> None:
        """Count the steps of a replay of the sequences at `rows`."""
        sequence = rows[run.sequence]
        np.add.at(self.seconds, sequence, run.seconds)
        np.add.at(self.controller, sequence, run.controller_seconds)
        np.add.at(self.steps, sequence, 1)
        np.add.at(self.gammas, (sequence, run.gamma), 1)
        self.played[sequence, run.position] = run.gamma
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
    hold_out: HoldOut = "prompt",
    against: str = BASELINE,
) -> Comparison:
    """Cross-validate policies by prompt and compare their throughput.

    Every prompt is held out once, at all its compressions together; whatever a policy learns or tunes comes from
    the other folds. The folds hold each task in equal shares. An online policy starts each fold with the memory that
    `fit` left it, and carries it through the fold's sequences in their order.

    Args:
        policies: unfitted; their labels must differ and include `REQUIRED`.
        traces: recorded sequences.
        costs: the comparison is made under each of these cost models, whose names must differ. Under one of a batch,
            all of its sequences are taken to play alike, as they do with one gamma for all.
        folds: number of folds, from 2.
        seed: of the folds, the fits and the resampling, from 0 to 2**32 - 1. The same seed gives the same result, as
            long as `costs` knows the decision times of all policies; those it does not know are measured here.
        jobs: processes to work in.
        progress: called with how many policies have been fitted and replayed, and how many there are, counting each
            cost model.
        hold_out: `task` holds out all prompts of a task at once, each task in turn, instead of `folds` of all tasks:
            how a policy does on text of another kind than it has learned from.
        against: label of the policy that gains, intervals and p values compare with.

    Raises:
        SpecKVError: an argument is none of these, fewer prompts than folds, fewer than two tasks to hold out,
            `against` is not among the policies, or a cost model lacks a compression.
    """
    traces = traces.load() if isinstance(traces, TraceDataset) else traces
    labels = [policy.label for policy in policies]
    if missing := [name for name in REQUIRED if name not in labels]:
        raise SpecKVError(f"the comparison lacks {', '.join(missing)}, which every honest one holds; add them")
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise SpecKVError(f"two policies of the comparison are called {twice[0]}; leave one out")
    if against not in labels:
        raise SpecKVError(f"there is no {against!r} in the comparison to compare with; add it to the policies")
    machines = [model.name for model in costs]
    if twice := [name for name in machines if machines.count(name) > 1]:
        raise SpecKVError(f"two of the cost models are called {twice[0]!r}; rename one")
    fold_of = folds_of(traces, folds, seed, hold_out)
    folds = int(fold_of.max()) + 1
    timed = {policy.label: with_decision_times(policy, traces, costs) for policy in policies}
    timed_here = sorted(label for label, models in timed.items() if models != list(costs))
    tasks = [(timed[policy.label][number], policy) for number in range(len(costs)) for policy in policies]
    work = joblib.Parallel(n_jobs=jobs, return_as="generator")(
        joblib.delayed(play_held_out)(policy, traces, model, fold_of, folds, seed) for model, policy in tasks
    )
    results: dict[tuple[str, str], _Tally] = {}
    for (model, policy), tally in zip(tasks, work, strict=True):
        results[model.name, policy.label] = tally
        progress(len(results), len(tasks))
    bounds = {policy.label for policy in policies if isinstance(policy, Clairvoyant)}
    cells: list[Cell] = []
    by_task: list[TaskCell] = []
    for model in costs:
        tallies = {label: results[model.name, label] for label in labels}
        for compression in ("all", *np.unique(traces.compressions)):
            mask = np.ones(len(traces), dtype=bool) if compression == "all" else traces.compressions == compression
            cells.extend(_cells(model.name, str(compression), tallies, traces, mask, bounds, seed, against))
            for task in np.unique(traces.tasks[mask]):
                of_task = mask & (traces.tasks == task)
                by_task.extend(
                    _task_cells(model.name, str(compression), str(task), tallies, traces, of_task, seed, against)
                )
    settings = {
        "policies": {policy.label: repr(policy) for policy in policies},
        "costs": machines,
        "batch_sizes": [model.batch_size for model in costs],
        "traces": traces.manifest.settings,
        "prompts": len(np.unique(traces.ids)),
        "sequences": len(traces),
        "tokens": int(traces.lengths.sum()),
        "folds": folds,
        "hold_out": hold_out,
        "against": against,
        "seed": seed,
        "resamples": RESAMPLES,
        "decision_times_measured_here": timed_here,
    }
    changes = [
        Change(label, one.name, other.name, _changed(results[one.name, label], results[other.name, label]))
        for one, other in itertools.combinations(costs, 2)
        for label in labels
    ]
    return Comparison(cells, by_task, settings, changes)


def _changed(one: _Tally, other: _Tally) -> float:
    """The share of `Change`."""
    both = (one.played >= 0) & (other.played >= 0)
    return float((one.played != other.played)[both].mean())


def folds_of(traces: Rollouts, folds: int, seed: int, hold_out: HoldOut = "prompt") -> IntArray:
    """The fold of each sequence: all sequences of a prompt in one, each task in equal shares; or one fold a task.

    Args and errors: as of `compare`.
    """
    from sklearn.model_selection import StratifiedKFold

    if not isinstance(folds, int | np.integer) or folds < 2:
        raise SpecKVError(f"folds is {folds}; it must be a whole number from 2")
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise SpecKVError(f"seed is {seed}; it must be a whole number from 0 to {2**32 - 1}")
    if hold_out not in get_args(HoldOut):
        raise SpecKVError(f"hold_out is {hold_out!r}; it must be {' or '.join(map(repr, get_args(HoldOut)))}")
    if hold_out == "task":
        known, fold_of = np.unique(traces.tasks, return_inverse=True)
        if len(known) < 2:
            raise SpecKVError("the traces hold one task only, so that none can be held out; record another")
        return fold_of
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


def with_decision_times(policy: Policy, traces: Rollouts, costs: Sequence[CostModel]) -> list[CostModel]:
    """The cost models with the decision times of this very policy under its name, whatever its parameters: where one
    does not know them, they are measured here, with a copy that is fitted on `traces`."""
    known = [known_controller(policy, model) for model in costs]
    if isinstance(policy, Clairvoyant) or None not in known:
        return list(costs)
    with naming(policy):
        measured = measure_controller(copy.deepcopy(policy).forget().fit(traces, costs[0]), traces, costs[0])
    return [
        replace(model, controller=model.controller | {policy.name: times or measured})
        for model, times in zip(costs, known, strict=True)
    ]


def play_held_out(
    policy: Policy, traces: Rollouts, costs: CostModel, fold_of: IntArray, folds: int, seed: int
) -> _Tally:
    """Fit on all folds but one, replay on that one, for each fold; `costs` as of `with_decision_times`."""
    tally = _Tally.empty(traces)
    for fold in range(folds):
        train, test = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        with naming(policy):
            fitted = copy.deepcopy(policy).forget().fit(traces.take(train), costs, seed)
            tally.add(replay(fitted, traces.take(test), costs, costs.controller.get(policy.name)), test)
    return tally


@contextlib.contextmanager
def naming(policy: Policy) -> Iterator[None]:
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
    against: str,
) -> list[Cell]:
    by_prompt = _seconds_by_prompt(tallies, traces, mask)
    tokens = int(traces.lengths[mask].sum())
    throughput = {label: tokens / seconds.sum() for label, seconds in by_prompt.items()}
    base = throughput[BASELINE]
    alone = len(by_prompt[against]) < 2  # a prompt, which tells nothing of others
    tested = [] if alone else [label for label in tallies if label != against and label not in bounds]
    p_values = holm([permutation_p(by_prompt[label], by_prompt[against], seed) for label in tested])
    p_of = dict(zip(tested, p_values, strict=True))

    def closed(label: str, bound: str) -> float | None:
        room = throughput[bound] - base
        return (throughput[label] - base) / room if room > 0.001 * base else None

    cells = []
    for label, tally in tallies.items():
        sure = label != against and not alone
        steps = int(tally.steps[mask].sum())
        gammas = tally.gammas[mask].sum(axis=0)
        cells.append(
            Cell(
                costs=costs,
                compression=compression,
                policy=label,
                throughput=throughput[label],
                gain=throughput[label] / throughput[against] - 1,
                gain_ci=gain_interval(by_prompt[label], by_prompt[against], seed) if sure else None,
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


def _task_cells(
    costs: str,
    compression: str,
    task: str,
    tallies: dict[str, _Tally],
    traces: Rollouts,
    mask: npt.NDArray[np.bool_],
    seed: int,
    against: str,
) -> list[TaskCell]:
    by_prompt = _seconds_by_prompt(tallies, traces, mask)
    tokens = int(traces.lengths[mask].sum())
    base = by_prompt[against]
    return [
        TaskCell(
            costs=costs,
            compression=compression,
            task=task,
            policy=label,
            throughput=float(tokens / seconds.sum()),
            gain=float(base.sum() / seconds.sum() - 1),
            gain_ci=None if label == against or len(base) < 2 else gain_interval(seconds, base, seed),
        )
        for label, seconds in by_prompt.items()
    ]


def _seconds_by_prompt(
    tallies: dict[str, _Tally], traces: Rollouts, mask: npt.NDArray[np.bool_]
) -> dict[str, FloatArray]:
    """Policy -> seconds of each prompt's sequences where `mask` (S,) is True."""
    _, prompt_of = np.unique(traces.ids[mask], return_inverse=True)
    return {
        label: np.bincount(prompt_of, weights=tally.seconds[mask]).astype(float) for label, tally in tallies.items()
    }


def gain_interval(seconds: FloatArray, baseline: FloatArray, seed: int) -> tuple[float, float]:
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


def permutation_p(seconds: FloatArray, baseline: FloatArray, seed: int) -> float:
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
