"""What recordings and step logs must keep to, whoever wrote them."""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.replaying import replay
from speckv.steplogs import StepLog, find_faults
from speckv.testing.checks import Check, expecting, make_checks, require
from speckv.testing.constant import Constant
from speckv.testing.recordings import make_costs
from speckv.traces import DRAFT_SIGNALS, Rollouts, TraceDataset

_ROUNDING = 1e-4  # float32 sums of probabilities


def trace_checks(
    traces: TraceDataset | Rollouts | StepLog | str | pathlib.Path,
    *,
    subject: str | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> list[Check]:
    """The checks of a recording or of a step log.

    Args:
        traces: a dataset or its folder, its dense form, a step log or its Parquet file.
        subject: what reports call it; by default the name of its folder or file, or its class.
        expected_failed_checks: name of a check -> why it fails.

    Raises:
        SpecKVError: no check has such a name.
    """
    path = traces.path if isinstance(traces, TraceDataset) else traces
    if isinstance(path, str | pathlib.Path):
        subject = subject or pathlib.Path(path).name
    subject = subject or type(traces).__name__
    functions: list[Callable[[Any], None]]
    if isinstance(traces, StepLog) or (isinstance(path, str | pathlib.Path) and pathlib.Path(path).is_file()):
        functions = [holds_possible_steps, comes_back_from_disk]
        return expecting(make_checks(subject, functions, _LogCase(traces)), expected_failed_checks)
    functions = [can_be_read]
    if not isinstance(traces, Rollouts):
        functions += [stays_within_a_draft, ends_where_it_says]
    functions += [
        names_each_sequence_once,
        fits_its_manifest,
        holds_possible_signals,
        runs_follow_from_tokens,
        limits_follow_from_the_tree,
        replays_as_it_is_counted,
    ]
    return expecting(make_checks(subject, functions, _Case(traces)), expected_failed_checks)


class _Case:
    """A recording to be checked, read when it is needed."""

    def __init__(self, source: Any) -> None:
        self._source = source

    @functools.cached_property
    def dataset(self) -> TraceDataset:
        return self._source if isinstance(self._source, TraceDataset) else TraceDataset(self._source)

    @functools.cached_property
    def rollouts(self) -> Rollouts:
        return self._source if isinstance(self._source, Rollouts) else self.dataset.load()

    @property
    def inside(self) -> npt.NDArray[np.bool_]:
        """(S, T) whether a position is one of the path."""
        return np.arange(self.rollouts.tokens.shape[1]) < self.rollouts.lengths[:, None]

    def where(self, row: int, position: int) -> str:
        traces = self.rollouts
        return f"{traces.ids[row]} at {traces.compressions[row]}, position {position}"


def can_be_read(case: _Case) -> None:
    """Every shard keeps to the schema, and all arrays of the dense form have a row for each sequence."""
    traces = case.rollouts
    count, length = traces.tokens.shape
    require(count == len(traces.ids), f"there are {len(traces.ids)} sequences and {count} rows of tokens")
    for name, array in {"draft_tokens": traces.draft_tokens, **traces.signals}.items():
        require(array.shape == (count, length), f"{name} has shape {array.shape} instead of {(count, length)}")
    for name in ("run", "limit"):
        shape = getattr(traces, name).shape
        require(shape == (count, length + 1), f"{name} has shape {shape} instead of {(count, length + 1)}")
    for name, array in traces.off_signals.items():
        shape = (count, length, traces.gamma_max - 1)
        require(array.shape == shape, f"off_{name} has shape {array.shape} instead of {shape}")


def names_each_sequence_once(case: _Case) -> None:
    """No two sequences have the same identifier and compression."""
    pairs = list(zip(case.rollouts.ids.tolist(), case.rollouts.compressions.tolist(), strict=True))
    twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
    require(twice is None, f"{twice} stands there twice")


def fits_its_manifest(case: _Case) -> None:
    """No sequence is empty or longer than `max_new_tokens`, none has an empty prompt."""
    traces = case.rollouts
    for row, (length, prompt) in enumerate(zip(traces.lengths, traces.prompt_lengths, strict=True)):
        most = min(traces.manifest.max_new_tokens, traces.tokens.shape[1])
        require(1 <= length <= most, f"{traces.ids[row]} has {length} tokens; there must be 1 to {most}")
        require(prompt >= 1, f"{traces.ids[row]} has an empty prompt")


def holds_possible_signals(case: _Case) -> None:
    """Signals are finite; probabilities from 0 to 1 and in their order; entropies and margins not below 0."""
    traces = case.rollouts
    limits = np.arange(max(traces.gamma_max - 1, 0))
    behind = np.where(case.inside & (traces.run[:, :-1] == 0), traces.limit[:, :-1] - 1, 0)
    off = limits < behind[:, :, None]
    groups: list[tuple[str, dict[str, npt.NDArray[np.float32]]]] = [
        ("", {name: np.where(case.inside, array, 0) for name, array in traces.signals.items()}),
        ("off_", {name: np.where(off, array, 0) for name, array in traces.off_signals.items()}),
    ]
    for prefix, signals in groups:
        for name, array in signals.items():
            require(np.isfinite(array).all(), f"{prefix}{name} is not a finite number everywhere")
            require(array.min(initial=0) >= -_ROUNDING, f"{prefix}{name} is {array.min()}; it can't be below 0")
            if DRAFT_SIGNALS.get(name, "").startswith("probability"):
                require(array.max(initial=0) <= 1 + _ROUNDING, f"{prefix}{name} is {array.max()}, above 1")
        first, second, ten = (signals[name] for name in ("draft_top1", "draft_top2", "draft_top10"))
        require((second <= first + _ROUNDING).all(), f"{prefix}draft_top2 is somewhere above {prefix}draft_top1")
        require((first + second <= ten + _ROUNDING).all(), f"{prefix}draft_top10 is somewhere below the likeliest two")


def runs_follow_from_tokens(case: _Case) -> None:
    """`run` counts the right proposals from each position on."""
    traces = case.rollouts
    for row, length in enumerate(traces.lengths.tolist()):
        expected = 0
        for position in reversed(range(length)):
            right = traces.tokens[row, position] == traces.draft_tokens[row, position]
            expected = expected + 1 if right else 0
            found = int(traces.run[row, position])
            require(found == expected, f"{case.where(row, position)}: run is {found}, and {expected} by the tokens")


def limits_follow_from_the_tree(case: _Case) -> None:
    """Steps that reach the same wrong proposal can draft equally far behind it, up to gamma_max and the budget."""
    traces = case.rollouts
    for row, length in enumerate(traces.lengths.tolist()):
        for position in range(length):
            run, limit = int(traces.run[row, position]), int(traces.limit[row, position])
            cap = min(traces.gamma_max, traces.manifest.max_new_tokens - position - 1)
            wrong = position + run
            behind = 0
            if wrong < length:
                behind = int(traces.limit[row, wrong])
                if behind == min(traces.gamma_max, traces.manifest.max_new_tokens - wrong - 1):
                    behind = max(behind, limit - run)  # what was kept there may reach further than a step from there
            expected = min(cap, run + behind)
            told = f"{case.where(row, position)}: limit is {limit}, and {expected} by the tree behind it"
            require(limit == expected, told)


def stays_within_a_draft(case: _Case) -> None:
    """The draft's continuation off the path is no longer than a draft could be."""
    for sequence in case.dataset:
        room = np.clip(case.dataset.manifest.max_new_tokens - 2 - np.arange(len(sequence.tokens)), 0, None)
        most = np.minimum(room, case.dataset.manifest.gamma_max - 1)
        long = np.flatnonzero(sequence.off_lengths > most)
        require(not len(long), f"{sequence.id}, position {long[:1]}: the continuation is longer than a draft could be")


def ends_where_it_says(case: _Case) -> None:
    """A sequence that did not end by itself has as many tokens as the budget allows."""
    budget = case.dataset.manifest.max_new_tokens
    for sequence in case.dataset:
        length = len(sequence.tokens)
        require(
            sequence.ended or length == budget,
            f"{sequence.id} at {sequence.compression} has {length} of {budget} tokens, and is said not to have ended",
        )


def replays_as_it_is_counted(case: _Case) -> None:
    """A constant gamma replays as a plain loop over the tokens counts it."""
    traces = case.rollouts
    costs = make_costs(compressions=sorted(set(traces.compressions.tolist())))
    for gamma in sorted({0, 1, 3, traces.gamma_max}):
        run = replay(Constant(gamma), traces, costs)
        columns = (run.sequence, run.position, run.gamma, run.accepted)
        replayed = list(zip(*(column.tolist() for column in columns), strict=True))
        counted = [step for row in range(len(traces)) for step in _counted(traces, row, gamma)]
        for one, other in zip(replayed, counted, strict=False):
            require(
                one == other,
                f"gamma {gamma}: the replay has the step {one}, and counting {other}, each (sequence, position, gamma, "
                "accepted)",
            )
        require(len(replayed) == len(counted), f"gamma {gamma}: {len(replayed)} steps, and {len(counted)} by counting")


def _counted(traces: Rollouts, row: int, gamma: int) -> list[tuple[int, int, int, int]]:
    """The steps of a constant gamma in one sequence, token by token."""
    steps, position, length = [], 0, int(traces.lengths[row])
    tokens, proposals = traces.tokens[row].tolist(), traces.draft_tokens[row].tolist()
    while position < length:
        drafted = min(gamma, int(traces.limit[row, position]))
        accepted = 0
        while accepted < drafted and position + accepted < length and (
            tokens[position + accepted] == proposals[position + accepted]
        ):  # fmt: skip
            accepted += 1
        steps.append((row, position, drafted, accepted))
        position += accepted + 1
    return steps


class _LogCase:
    """A step log to be checked, read when it is needed."""

    def __init__(self, source: Any) -> None:
        self._source = source

    @functools.cached_property
    def log(self) -> StepLog:
        return self._source if isinstance(self._source, StepLog) else StepLog.load(self._source)


def holds_possible_steps(case: _LogCase) -> None:
    """No row says what can't be."""
    for row, reason in find_faults(case.log.columns):
        require(False, f"row {row}: {reason}")


def comes_back_from_disk(case: _LogCase) -> None:
    """Saved and loaded, it is the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "log.parquet"
        case.log.save(path)
        loaded = StepLog.load(path)
    one, other = case.log.columns, loaded.columns
    require(list(one) == list(other), f"loaded, it has the columns {', '.join(other)} instead of {', '.join(one)}")
    for name, values in one.items():
        numbers = values.dtype.kind == "f"
        require(np.array_equal(values, other[name], equal_nan=numbers), f"loaded, its column {name} is another one")
    require(case.log.provenance == loaded.provenance, "loaded, its provenance is another one")
