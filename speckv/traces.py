"""Rollout traces: what a model pair did and would have done, position by position (rule R3).

A *rollout trace* follows the target's own greedy path. For each position it keeps what the draft model
proposes there and, where that proposal is wrong, how the draft would have gone on off the path. That tree
answers, for any policy, what a live decoder would have drafted, accepted and seen.

On disk a dataset is a folder: `manifest.json` and Parquet shards with one row a sequence. In memory it is
`Rollouts`, dense arrays with one row a sequence and one column a position.
"""

import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.files import check_version, open_parquet, read_json, write_atomically, write_json
from speckv.vocabulary import Vocabulary

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "speckv-rollout"
SCHEMA_VERSION = 1

#: Signals of one drafted token: name -> unit. Each is recorded on the path and off it.
DRAFT_SIGNALS = {
    "draft_entropy": "nats",
    "draft_top1": "probability",
    "draft_top2": "probability",
    "draft_top10": "probability mass of the ten likeliest tokens",
}
#: Signals of the target at each position of its path: name -> unit.
TARGET_SIGNALS = {
    "target_entropy": "nats",
    "target_margin": "logits between the likeliest and the second likeliest token",
}

#: By how much float32 sums of probabilities are off at most.
_ROUNDING = 1e-4
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rollout:
    """One recorded sequence of T committed tokens.

    Attributes:
        id, task, compression: prompt identifier, task category, how the target's weights are stored.
        prompt_tokens: (prompt length,) token ids, chat template included.
        tokens: (T,) token ids of the target's greedy path.
        draft_tokens: (T,) the draft's greedy proposal at each position, given the path before it.
        signals: draft and target signals by name, each (T,) float32; units in `DRAFT_SIGNALS` and
            `TARGET_SIGNALS`.
        off_lengths: (T,) how many tokens of the draft's continuation after a wrong proposal are kept;
            0 where the proposal is right.
        off_tokens: (sum of off_lengths,) those continuations, one behind the other.
        off_signals: draft signals by name of those continuations, each (sum of off_lengths,) float32.
        ended: True if the path ended with an end-of-sequence token, False if the budget ended it.
    """

    id: str
    task: str
    compression: str
    prompt_tokens: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    draft_tokens: npt.NDArray[np.int32]
    signals: dict[str, npt.NDArray[np.float32]]
    off_lengths: npt.NDArray[np.int32]
    off_tokens: npt.NDArray[np.int32]
    off_signals: dict[str, npt.NDArray[np.float32]]
    ended: bool


@dataclass(frozen=True)
class Manifest:
    """What all sequences of a dataset have in common, and where they came from.

    `gamma_max`, `max_new_tokens` and `settings` must be equal for sequences to stand in one dataset. `runs` tells the
    reader how they were made: the command and the machine of each recording.
    """

    gamma_max: int
    max_new_tokens: int
    settings: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def same_settings(self, other: "Manifest") -> bool:
        """Whether sequences of both may stand in one dataset."""
        return replace(self, runs=[]) == replace(other, runs=[])

    def with_runs(self, other: "Manifest") -> "Manifest":
        """This manifest and the runs of another."""
        return replace(self, runs=self.runs + [run for run in other.runs if run not in self.runs])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "gamma_max": self.gamma_max,
            "max_new_tokens": self.max_new_tokens,
            "settings": self.settings,
            "runs": self.runs,
            "units": DRAFT_SIGNALS | TARGET_SIGNALS,
        }

    @classmethod
    def read(cls, path: pathlib.Path) -> Self:
        value = read_json(path, "the manifest of a rollout dataset")
        if value.get("format") != FORMAT:
            raise SpecKVError(f"{path}: is not the manifest of a {FORMAT} dataset")
        check_version(value.get("schema_version"), SCHEMA_VERSION, path)
        for key in ("gamma_max", "max_new_tokens"):
            if not isinstance(value.get(key), int) or value[key] < 1:
                raise SpecKVError(f"{path}: {key} must be a whole number from 1; record or merge the dataset again")
        if not isinstance(value.get("settings"), dict) or not isinstance(value.get("runs"), list):
            raise SpecKVError(f"{path}: settings or runs are missing; record or merge the dataset again")
        return cls(value["gamma_max"], value["max_new_tokens"], value["settings"], value["runs"])


def _schema() -> "pa.Schema":
    import pyarrow as pa

    def column(name: str, kind: pa.DataType, unit: str = "") -> pa.Field:
        return pa.field(name, kind, nullable=False, metadata={"unit": unit} if unit else None)

    ids, reals = pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            column("id", pa.string()),
            column("task", pa.string()),
            column("compression", pa.string()),
            column("prompt_tokens", ids, "token id"),
            column("tokens", ids, "token id"),
            column("draft_tokens", ids, "token id"),
            *(column(name, reals, unit) for name, unit in (DRAFT_SIGNALS | TARGET_SIGNALS).items()),
            column("off_lengths", ids, "tokens"),
            column("off_tokens", ids, "token id"),
            *(column(f"off_{name}", reals, unit) for name, unit in DRAFT_SIGNALS.items()),
            column("ended", pa.bool_()),
        ],
        metadata={"format": FORMAT, "schema_version": str(SCHEMA_VERSION)},
    )


def _to_row(rollout: Rollout) -> dict[str, Any]:
    row = {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name not in {"signals", "off_signals"}}
    return row | rollout.signals | {f"off_{name}": values for name, values in rollout.off_signals.items()}


def _from_row(row: dict[str, Any], where: str) -> Rollout:
    """The sequence of one row. Raises SpecKVError if it can't be."""

    def fault(reason: str) -> SpecKVError:
        return SpecKVError(f"{where}: {reason}; record it again")

    def values(name: str, kind: type, most: float) -> npt.NDArray[Any]:
        """A list of numbers from 0 to `most`, both with the rounding of a sum."""
        try:
            array: npt.NDArray[Any] = np.asarray(row[name], dtype=kind)
        except TypeError:
            raise fault(f"{name} holds an empty cell") from None
        if not (array.min(initial=0) >= -_ROUNDING and array.max(initial=0) <= most):  # NaN is neither
            position = int(np.flatnonzero(~((array >= -_ROUNDING) & (array <= most)))[0])
            found = array[position] if np.isfinite(array[position]) else "not a finite number"
            raise fault(f"{name} is {found} at position {position}")
        return array

    def ids(name: str) -> npt.NDArray[np.int32]:
        return values(name, np.int32, _LARGEST)

    def reals(name: str, unit: str, length: int) -> npt.NDArray[np.float32]:
        array = values(name, np.float32, 1 + _ROUNDING if unit.startswith("probability") else _LARGEST)
        if len(array) != length:
            raise fault(f"{name} has {len(array)} values for {length} tokens")
        return array

    for name, value in row.items():
        if value is None:
            raise fault(f"{name} holds an empty cell")
    for name in ("id", "prompt_tokens"):
        if not row[name]:
            raise fault(f"{name} is empty")
    if row["compression"] not in COMPRESSIONS:
        raise SpecKVError(f"{where}: compression {row['compression']!r} is unknown; this speckv is older than the file")
    tokens, draft_tokens = ids("tokens"), ids("draft_tokens")
    off_lengths, off_tokens = ids("off_lengths"), ids("off_tokens")
    if len(tokens) == 0 or not (len(draft_tokens) == len(off_lengths) == len(tokens)):
        raise fault("its columns have different lengths")
    if off_lengths.sum() != len(off_tokens):
        raise fault("off_lengths do not add up to the off-path tokens")
    if len(needless := np.flatnonzero((off_lengths > 0) & (draft_tokens == tokens))):
        raise fault(f"a continuation stands behind the right proposal at position {needless[0]}")
    signals = DRAFT_SIGNALS | TARGET_SIGNALS
    return Rollout(
        id=row["id"],
        task=row["task"],
        compression=row["compression"],
        prompt_tokens=ids("prompt_tokens"),
        tokens=tokens,
        draft_tokens=draft_tokens,
        signals={name: reals(name, unit, len(tokens)) for name, unit in signals.items()},
        off_lengths=off_lengths,
        off_tokens=off_tokens,
        off_signals={name: reals(f"off_{name}", unit, len(off_tokens)) for name, unit in DRAFT_SIGNALS.items()},
        ended=row["ended"],
    )


class TraceDataset:
    """A folder of recorded sequences: `manifest.json` and Parquet shards of whole sequences.

    Args:
        path: the folder.

    Raises:
        SpecKVError: the folder is missing, has no manifest, or is of a newer schema version.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise SpecKVError(f"{self.path}: no such trace folder; make one with `speckv record`")
        self.manifest = Manifest.read(self.path / "manifest.json")

    @classmethod
    def create(cls, path: str | pathlib.Path, manifest: Manifest) -> Self:
        """Open the dataset at `path` to add to it, or start it.

        Raises:
            SpecKVError: a dataset with other settings is there already.
        """
        path = pathlib.Path(path)
        if (path / "manifest.json").exists():
            dataset = cls(path)
            if not dataset.manifest.same_settings(manifest):
                raise SpecKVError(
                    f"{path}: holds a recording with other settings, {dataset.manifest.settings}, gamma_max "
                    f"{dataset.manifest.gamma_max}, max_new_tokens {dataset.manifest.max_new_tokens}; choose another"
                )
            manifest = dataset.manifest.with_runs(manifest)
            if manifest != dataset.manifest:
                write_json(path / "manifest.json", manifest.to_json())
            return cls(path)
        leftover = path.is_dir() and all(file.name.endswith(".partial") for file in path.iterdir())
        if path.exists() and not leftover:
            raise SpecKVError(f"{path}: exists and is not a trace dataset; choose another folder")
        write_json(path / "manifest.json", manifest.to_json())
        return cls(path)

    def _shards(self) -> list[pathlib.Path]:
        return sorted(self.path.glob("*.parquet"))

    def _shard_of(self, identifier: str, compression: str) -> pathlib.Path:
        digest = hashlib.sha256(identifier.encode()).hexdigest()[:16]
        return self.path / f"{compression}-{digest}.parquet"

    def keys(self) -> set[tuple[str, str]]:
        """Identifier and compression of each sequence; the rest of them is not read."""
        columns = ["id", "compression"]
        return {(row["id"], row["compression"]) for shard in self._shards() for row in _read_rows(shard, columns)}

    def add(self, rollout: Rollout) -> None:
        """Write one finished sequence as a shard of its own, whole or not at all."""
        _write_shard(self._shard_of(rollout.id, rollout.compression), [rollout])

    def __iter__(self) -> Iterator[Rollout]:
        """Read one sequence at a time, in the order of the shards' names."""
        for shard in self._shards():
            for number, row in enumerate(_read_rows(shard)):
                yield _from_row(row, where=f"{shard}: row {number}")

    def load(self) -> "Rollouts":
        """Read everything into dense arrays."""
        sequences: dict[tuple[str, str], Rollout] = {}
        for sequence in self:
            if (key := (sequence.id, sequence.compression)) in sequences:
                raise SpecKVError(f"{self.path}: {key[0]} at {key[1]} stands there twice; remove one of the two shards")
            sequences[key] = sequence
        return Rollouts.from_sequences(list(sequences.values()), self.manifest, where=str(self.path))

    @classmethod
    def merge(cls, sources: Sequence["TraceDataset"], path: str | pathlib.Path) -> Self:
        """Write the sequences of all sources to a new dataset with one shard a compression.

        Raises:
            SpecKVError: settings differ, a sequence stands in two sources, or `path` is taken.
        """
        path = pathlib.Path(path)
        if path.exists():
            raise SpecKVError(f"{path}: exists already; choose another folder")
        manifest = sources[0].manifest
        texts: dict[int, bytes] = {}
        groups: dict[str, list[Rollout]] = {}
        seen: set[tuple[str, str]] = set()
        for source in sources:
            if not manifest.same_settings(source.manifest):
                raise SpecKVError(f"{source.path}: recorded with other settings than {sources[0].path}")
            manifest = manifest.with_runs(source.manifest)
            texts |= Vocabulary.of(source.path).tokens
            for rollout in source:
                if (key := (rollout.id, rollout.compression)) in seen:
                    raise SpecKVError(f"{source.path}: {key[0]} at {key[1]} stands in two of the datasets")
                seen.add(key)
                groups.setdefault(rollout.compression, []).append(rollout)
        if not seen:
            raise SpecKVError(f"{sources[0].path}: holds no sequence; record some first")
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        for compression, rollouts in groups.items():
            _write_shard(partial / f"{compression}.parquet", sorted(rollouts, key=lambda r: r.id))
        if texts:
            Vocabulary(texts).save(partial)
        write_json(partial / "manifest.json", manifest.to_json())
        partial.rename(path)
        return cls(path)


def _write_shard(path: pathlib.Path, rollouts: Sequence[Rollout]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist([_to_row(rollout) for rollout in rollouts], schema=_schema())
    write_atomically(
        path, lambda partial: parquet.write_table(table, partial, compression="zstd", compression_level=15)
    )


def _read_rows(path: pathlib.Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a shard, unchecked, with these columns or all."""
    import pyarrow as pa

    file = open_parquet(path, FORMAT, SCHEMA_VERSION, "delete it and record again")
    for column in _schema():
        if column.name not in file.schema_arrow.names:
            raise SpecKVError(f"{path}: the column {column.name} is missing; record it again")
        if not file.schema_arrow.field(column.name).type.equals(column.type):
            raise SpecKVError(f"{path}: the column {column.name} is not of type {column.type}; record it again")
    try:
        for batch in file.iter_batches(batch_size=64, columns=columns):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise SpecKVError(f"{path}: cannot be read to its end ({reason}); delete it and record again") from None


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Recorded sequences as dense arrays: S sequences, at most T positions, G = gamma_max.

    Attributes:
        manifest: what the sequences have in common.
        ids, tasks, compressions: (S,) strings.
        prompt_lengths, lengths: (S,) tokens of the prompt and of the path.
        tokens, draft_tokens: (S, T) token ids; 0 past the end.
        off_tokens: (S, T, G - 1) token ids of the draft's continuation after a wrong proposal.
        run: (S, T + 1) how many consecutive proposals from a position on are right.
        limit: (S, T + 1) how many tokens a step that starts at a position can draft: bounded by G, by the
            budget (the bonus token must fit), and by an end-of-sequence token in the draft.
        signals: name -> (S, T) float32.
        off_signals: name -> (S, T, G - 1) float32, the draft's continuation after a wrong proposal.
    """

    manifest: Manifest
    ids: npt.NDArray[np.str_]
    tasks: npt.NDArray[np.str_]
    compressions: npt.NDArray[np.str_]
    prompt_lengths: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    draft_tokens: npt.NDArray[np.int32]
    off_tokens: npt.NDArray[np.int32]
    run: npt.NDArray[np.int64]
    limit: npt.NDArray[np.int64]
    signals: dict[str, npt.NDArray[np.float32]]
    off_signals: dict[str, npt.NDArray[np.float32]]

    @property
    def gamma_max(self) -> int:
        return self.manifest.gamma_max

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_sequences(cls, sequences: Sequence[Rollout], manifest: Manifest, where: str = "traces") -> Self:
        """Lay sequences out as dense arrays, and work out `run` and `limit`."""
        if not sequences:
            raise SpecKVError(f"{where}: holds no sequence; record some first")
        count, gamma_max = len(sequences), manifest.gamma_max
        length = max(len(s.tokens) for s in sequences)
        tokens = np.zeros((count, length), dtype=np.int32)
        draft_tokens = np.zeros((count, length), dtype=np.int32)
        off_tokens = np.zeros((count, length, gamma_max - 1), dtype=np.int32)
        run = np.zeros((count, length + 1), dtype=np.int64)
        limit = np.zeros((count, length + 1), dtype=np.int64)
        signals = {n: np.zeros((count, length), dtype=np.float32) for n in DRAFT_SIGNALS | TARGET_SIGNALS}
        off_signals = {n: np.zeros((count, length, gamma_max - 1), dtype=np.float32) for n in DRAFT_SIGNALS}
        for row, sequence in enumerate(sequences):
            size = len(sequence.tokens)
            if size > manifest.max_new_tokens or sequence.off_lengths.max() > gamma_max - 1:
                raise SpecKVError(
                    f"{where}: {sequence.id} at {sequence.compression} is longer than its manifest "
                    "allows; record it again"
                )
            tokens[row, :size] = sequence.tokens
            draft_tokens[row, :size] = sequence.draft_tokens
            for name, values in sequence.signals.items():
                signals[name][row, :size] = values
            kept = np.arange(gamma_max - 1) < sequence.off_lengths[:, None]
            off_tokens[row, :size][kept] = sequence.off_tokens
            for name, values in sequence.off_signals.items():
                off_signals[name][row, :size][kept] = values
            right = sequence.draft_tokens == sequence.tokens
            for position in reversed(range(size)):
                run[row, position] = run[row, position + 1] + 1 if right[position] else 0
                wrong = position + run[row, position]  # the first wrong proposal, or the end of the path
                drafted = run[row, position] + (1 + sequence.off_lengths[wrong] if wrong < size else 0)
                limit[row, position] = min(gamma_max, manifest.max_new_tokens - position - 1, drafted)
        return cls(
            manifest=manifest,
            ids=np.array([s.id for s in sequences]),
            tasks=np.array([s.task for s in sequences]),
            compressions=np.array([s.compression for s in sequences]),
            prompt_lengths=np.array([len(s.prompt_tokens) for s in sequences]),
            lengths=np.array([len(s.tokens) for s in sequences]),
            tokens=tokens,
            draft_tokens=draft_tokens,
            off_tokens=off_tokens,
            run=run,
            limit=limit,
            signals=signals,
            off_signals=off_signals,
        )

    def take(self, rows: npt.ArrayLike) -> Self:
        """The sequences at `rows`: indices (repetition allowed) or a (S,) boolean mask."""
        index = np.asarray(rows)
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                changed[item.name] = value[index]
            elif isinstance(value, dict):
                changed[item.name] = {name: array[index] for name, array in value.items()}
        return type(self)(manifest=self.manifest, **changed)

    def drafted_signal(
        self, name: str, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], index: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """Signal `name` of the draft's token number `index` (0 is the first) in steps that start at `positions`.

        Args:
            name: of `DRAFT_SIGNALS`, or `draft_token` for its id.
            rows, positions: (n,) sequence and start position of each step.
            index: scalar or (n,), each below the step's `limit`.

        Returns:
            (n,) float32, which holds ids up to 2^24 exactly: from the path up to the first wrong proposal, from the
            recorded continuation behind it.
        """
        right = self.run[rows, positions]
        on_path = np.minimum(index, right)
        behind = np.asarray(index) - right - 1
        position = np.minimum(positions + on_path, self.tokens.shape[1] - 1)
        ids = name == "draft_token"
        value = np.asarray((self.draft_tokens if ids else self.signals[name])[rows, position], dtype=np.float32)
        if self.gamma_max == 1 or (behind < 0).all():
            return value
        off = (self.off_tokens if ids else self.off_signals[name])[rows, position, np.maximum(behind, 0)]
        return np.asarray(np.where(behind < 0, value, off), dtype=np.float32)


def arrays_of(traces: Rollouts) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """All arrays of a recording, by name."""
    for item in fields(traces):
        value = getattr(traces, item.name)
        if isinstance(value, np.ndarray):
            yield item.name, value
        elif isinstance(value, dict):
            yield from ((f"{item.name} {name}", array) for name, array in value.items())
