"""Step logs: what a decoder did, one row a step, whatever gamma it played (rule R3).

Production logs and published measurements are of this kind. A row tells the outcome at every gamma if fewer tokens were
accepted than drafted; otherwise it is right-censored. On disk a log is one Parquet file, or a folder of them as
`speckv.steplog_writer` leaves it.

An `Importer` turns a foreign log into a `StepLog` and lists every row that it had to leave out or to mend.
"""

import json
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import FEATURES, FloatArray, IntArray
from speckv.files import open_parquet, write_atomically

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "speckv-steps"
SCHEMA_VERSION = 1
_REQUIRED = ("sequence", "step", "gamma", "accepted")
#: Columns that a log may have or not -> unit.
_OPTIONAL = {"seconds": "seconds", "propensity": "probability", "compression": "", "task": ""}
#: In front of the names of signals, which share a table with the other columns.
SIGNAL = "signal_"


@dataclass(frozen=True, eq=False)
class StepLog:
    """n steps of a decoder. NaN stands for a number that is not known of a step, the empty text for a name.

    Attributes:
        sequence: (n,) identifiers of the sequences, not empty.
        step: (n,) number of the step in its sequence, from 0. No two rows have the same sequence and step.
        gamma: (n,) tokens drafted.
        accepted: (n,) of them, accepted before the text was cut off at its end; the step committed one more.
        seconds: (n,) duration, above 0; None if it was not logged.
        propensity: (n,) probability, above 0, with which the decoder chose this gamma; None if it was not logged.
        compression: (n,) of the target, from `speckv.compression.COMPRESSIONS`; None if it was not logged.
        task: (n,) categories; None if they were not logged.
        signals: name -> (n,). A name from `speckv.features.FEATURES` means what it means there. Any other is the
            log's own, and may be known only after the step that it stands beside.
        provenance: where the log comes from, as JSON can hold it.

    Raises:
        SpecKVError: lengths differ, or a row says what can't be.
    """

    sequence: npt.NDArray[np.str_]
    step: IntArray
    gamma: IntArray
    accepted: IntArray
    seconds: FloatArray | None = None
    propensity: FloatArray | None = None
    compression: npt.NDArray[np.str_] | None = None
    task: npt.NDArray[np.str_] | None = None
    signals: dict[str, FloatArray] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = self.columns
        for name, values in columns.items():
            if values.shape != self.sequence.shape or values.ndim != 1:
                raise SpecKVError(f"step log: {name} has shape {values.shape}, and sequence {self.sequence.shape}")
            if values.dtype.kind not in (kinds := _kinds(name)):
                raise SpecKVError(f"step log: {name} is of type {values.dtype}, not of kind {kinds}")
        for row, reason in find_faults(columns):
            raise SpecKVError(
                f"step log: row {row}: {reason}; `speckv traces import … --importer speckv` leaves such rows out"
            )

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns by name, as in a file: signals have `signal_` in front of theirs."""
        columns = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL) if getattr(self, name) is not None}
        return columns | {SIGNAL + name: values for name, values in self.signals.items()}

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[Any]], provenance: dict[str, Any]) -> Self:
        """The log of which these are the `columns`. Raises SpecKVError as the constructor does."""
        signals = {name.removeprefix(SIGNAL): column for name, column in columns.items() if name.startswith(SIGNAL)}
        others = {name: column for name, column in columns.items() if not name.startswith(SIGNAL)}
        return cls(**others, signals=signals, provenance=provenance)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the log as one Parquet file, whole or not at all.

        Raises:
            SpecKVError: the file exists, or cannot be written.
        """
        path = pathlib.Path(path)
        if path.exists():
            raise SpecKVError(f"{path}: exists already; choose another file")
        write_columns(path, self.columns, self.provenance)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Read a log that `save` wrote, or a folder of them: its files are taken together in the order of their names.

        Raises:
            SpecKVError: the file is none, is of a newer format, or a row says what can't be.
        """
        try:
            return cls.from_columns(*read_columns(pathlib.Path(path)))
        except SpecKVError as error:
            raise SpecKVError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


@dataclass(frozen=True)
class Fault:
    """What is wrong with one row of a source.

    Attributes:
        row: where it stands: the line of a text file, from 1; the record of any other, from 1.
        reason: what is wrong, and what was done about it if the row was kept.
        kept: whether the row is in the log nevertheless, mended or as it was.
    """

    row: int
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class Imported:
    """What an importer made of a source.

    Attributes:
        log: the steps that can be used.
        faults: what is wrong, in the order of the rows.
        steps: how many the source held; each is in the log or has a fault that says why not. A record that can't be
            read at all counts as one.

    Raises:
        SpecKVError: some step is neither in the log nor among the faults: a fault of the importer.
    """

    log: StepLog
    faults: list[Fault]
    steps: int

    def __post_init__(self) -> None:
        dropped = sum(not fault.kept for fault in self.faults)
        if self.steps != len(self.log) + dropped:
            raise SpecKVError(
                f"an importer lost steps: the source held {self.steps}, the log has {len(self.log)}, and {dropped} "
                "faults say that a step was left out"
            )


class Importer(ABC):
    """Reads step logs of another program.

    The constructor only stores its parameters under their own names; users give them as `NAME:PARAMETER=VALUE`.

    Attributes:
        name: how users call the importer.
    """

    name: ClassVar[str]

    @abstractmethod
    def read(self, path: pathlib.Path) -> Imported:
        """Read a file or a folder. Nothing is dropped silently: a row that is not used, or not as it was, is a fault.

        Raises:
            SpecKVError: nothing can be read there at all.
        """


class SpecKVImporter(Importer):
    """Reads the project's own Parquet form, and leaves out the rows that can't be."""

    name = "speckv"

    def read(self, path: pathlib.Path) -> Imported:
        columns, provenance = read_columns(path)
        return sift(columns, np.arange(1, len(columns["sequence"]) + 1), provenance)


def sift(columns: Mapping[str, npt.NDArray[Any]], rows: IntArray, provenance: dict[str, Any]) -> Imported:
    """Keep the rows that a `StepLog` can hold; the others are faults.

    Args:
        columns: by name, each (n,), as of `StepLog.columns`.
        rows: (n,) where each stands in its source.
        provenance: of the log.
    """
    reasons = find_faults(columns)
    keep = np.ones(len(rows), dtype=bool)
    keep[[index for index, _ in reasons]] = False
    faults = [Fault(int(rows[index]), reason) for index, reason in reasons]
    log = StepLog.from_columns({name: values[keep] for name, values in columns.items()}, provenance)
    return Imported(log, faults, len(rows))


def find_faults(columns: Mapping[str, npt.NDArray[Any]]) -> list[tuple[int, str]]:
    """What can't be in a step log: the index of the row, from 0, and the first reason found. In the order of the rows.

    Args:
        columns: by name, each (n,), as of `StepLog.columns`.
    """
    reasons: dict[int, str] = {}

    def refuse(wrong: npt.NDArray[np.bool_], name: str, must: str) -> None:
        for index in np.flatnonzero(wrong).tolist():
            reasons.setdefault(index, f"{name} is {columns[name][index]}; it must be {must}")

    sequence, step, gamma, accepted = (columns[name] for name in _REQUIRED)
    refuse(sequence == "", "sequence", "an identifier")
    refuse(step < 0, "step", "0 or more")
    refuse(gamma < 0, "gamma", "0 or more")
    refuse(accepted < 0, "accepted", "0 or more")
    for index in np.flatnonzero(accepted > gamma).tolist():
        reasons.setdefault(index, f"{accepted[index]} of {gamma[index]} drafted tokens can't be accepted")
    if "seconds" in columns:
        refuse((columns["seconds"] <= 0) | np.isinf(columns["seconds"]), "seconds", "above 0")
    if "propensity" in columns:
        refuse((columns["propensity"] <= 0) | (columns["propensity"] > 1), "propensity", "above 0 and at most 1")
    if "compression" in columns:
        unknown = ~np.isin(columns["compression"], ["", *COMPRESSIONS])
        refuse(unknown, "compression", f"one of {', '.join(COMPRESSIONS)}")
    for name, values in columns.items():
        if name.startswith(SIGNAL):
            refuse(np.isinf(values), name, "a finite number")
    for index in _repeated(sequence, step):
        reasons.setdefault(index, f"step {step[index]} of sequence {str(sequence[index])!r} stands in an earlier row")
    return sorted(reasons.items())


def _repeated(sequence: npt.NDArray[np.str_], step: IntArray) -> list[int]:
    """Rows whose sequence and step stand in an earlier one."""
    _, codes = np.unique(sequence, return_inverse=True)
    order = np.lexsort((np.arange(len(step)), step, codes))
    same = (np.diff(codes[order]) == 0) & (np.diff(step[order]) == 0)
    return [int(index) for index in order[1:][same]]


def write_columns(path: pathlib.Path, columns: Mapping[str, npt.NDArray[Any]], provenance: dict[str, Any]) -> None:
    """Write the columns of a log, each (n,), as one Parquet file, whole or not at all; the rows are not checked.

    Raises:
        SpecKVError: the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema(
        [_field(name) for name in columns],
        metadata={
            "format": FORMAT,
            "schema_version": str(SCHEMA_VERSION),
            "provenance": json.dumps(provenance, allow_nan=False),
        },
    )
    arrays = [pa.array(values, type=schema.field(name).type) for name, values in columns.items()]
    table = pa.table(arrays, schema=schema)
    write_atomically(path, lambda partial: parquet.write_table(table, partial, compression="zstd"))


def is_step_log(path: pathlib.Path) -> bool:
    """Whether what stands there is a step log rather than a recording: a file, or a folder of files alone."""
    return path.is_file() or (not (path / "manifest.json").exists() and any(path.glob("*.parquet")))


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a log, each (n,), of n steps by their names there. What is missing or None is not known.

    Names that are no column's are signals. An optional column that is known of no step is left out.
    """
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if name in _REQUIRED:
            columns[name] = np.array(values, dtype=np.str_ if _kinds(name) == "U" else np.int64)
        elif name not in _OPTIONAL:
            columns[SIGNAL + name] = np.array(values, dtype=float)
        elif any(value not in (None, "") for value in values):
            text = _kinds(name) == "U"
            columns[name] = np.array([value or "" for value in values] if text else values, np.str_ if text else float)
    return columns


def unknown_column(name: str, rows: int) -> npt.NDArray[Any]:
    """(rows,) what stands for an optional column or a signal of which nothing is known."""
    return np.full(rows, "" if _kinds(name) == "U" else np.nan)


def concatenate(logs: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of logs, one log behind the other. What one of them lacks is unknown there."""
    names = dict.fromkeys(name for columns in logs for name in columns)
    return {
        name: np.concatenate(
            [columns[name] if name in columns else unknown_column(name, len(columns["step"])) for columns in logs]
        )
        for name in names
    }


def read_columns(path: pathlib.Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Columns and provenance of a log's file, or of a folder's files one behind the other, the rows unchecked.

    What one file of a folder lacks is unknown there. The provenance is what they have in common, or each one's.

    Raises:
        SpecKVError: a file is no step log, is of a newer format, or a column is missing or of another type; or the
            folder holds none.
    """
    if not path.is_dir():
        return _read_file(path)
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise SpecKVError(f"{path}: holds no step log, a file that ends in .parquet; choose another folder")
    parts = [_read_file(file) for file in files]
    joined, first = concatenate([columns for columns, _ in parts]), parts[0][1]
    if all(provenance == first for _, provenance in parts):
        return joined, first
    return joined, {"files": {file.name: provenance for file, (_, provenance) in zip(files, parts, strict=True)}}


def _read_file(path: pathlib.Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """As of `read_columns`, of one file."""
    import pyarrow as pa

    remedy = "write the log again"
    file = open_parquet(path, FORMAT, SCHEMA_VERSION, remedy)
    names = file.schema_arrow.names
    for name in (*_REQUIRED, *names):
        if name not in names:
            raise SpecKVError(f"{path}: the column {name} is missing; {remedy}")
        if name not in {*_REQUIRED, *_OPTIONAL} and not name.startswith(SIGNAL):
            raise SpecKVError(f"{path}: the column {name} is unknown; {remedy}")
        if not file.schema_arrow.field(name).type.equals(_field(name).type):
            raise SpecKVError(f"{path}: the column {name} is not of type {_field(name).type}; {remedy}")
    try:
        table = file.read()
        provenance = json.loads((file.schema_arrow.metadata or {}).get(b"provenance", b"{}"))
    except (OSError, pa.ArrowException, json.JSONDecodeError) as error:
        raise SpecKVError(f"{path}: cannot be read to its end ({str(error).splitlines()[0]}); {remedy}") from None
    for name in names:
        if table[name].null_count:
            raise SpecKVError(f"{path}: the column {name} has empty cells; {remedy}")
    return {name: _to_numpy(name, table[name]) for name in names}, provenance


def _kinds(name: str) -> str:
    """The kinds of NumPy types that a column may have."""
    return "U" if name in {"sequence", "compression", "task"} else "iu" if name in _REQUIRED else "f"


def _field(name: str) -> "pa.Field":
    import pyarrow as pa

    kind = {"U": pa.string(), "iu": pa.int64(), "f": pa.float64()}[_kinds(name)]
    feature = FEATURES.get(name.removeprefix(SIGNAL)) if name.startswith(SIGNAL) else None
    unit = feature.unit if feature else _OPTIONAL.get(name) or ("tokens" if name in {"gamma", "accepted"} else "")
    return pa.field(name, kind, nullable=False, metadata={"unit": unit} if unit else None)


def _to_numpy(name: str, column: "pa.ChunkedArray") -> npt.NDArray[Any]:
    if _kinds(name) == "U":
        return np.array(column.to_pylist(), dtype=np.str_)
    return np.asarray(column.to_numpy())
