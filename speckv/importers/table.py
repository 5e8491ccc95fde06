"""Step logs from any table with one row a step."""

import math
import pathlib
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.importers.records import INTEGER_LIMIT, read_csv, read_json_lines, read_parquet
from speckv.steplogs import Fault, Imported, Importer, sift

_READERS = {".csv": read_csv, ".jsonl": read_json_lines, ".ndjson": read_json_lines, ".parquet": read_parquet}


class TableImporter(Importer):
    """Reads CSV (with a header), JSON Lines and Parquet, one row a step, by the file's ending.

    Parameters name the columns of the source. Those of `sequence`, `gamma` and `accepted` must be there; the others may
    be missing if they were not named. A row with a cell that can't be read is left out; an empty cell of seconds,
    propensity or a signal is a number that is not known.

    Args:
        sequence, gamma, accepted: columns.
        step: column; without it the rows of a sequence are numbered in their order.
        seconds, propensity, task: columns.
        compression: a column, or the compression of all steps.
        signals: name of the signal -> column.
        unit: seconds in one unit of the column `seconds`; 0.001 if it holds milliseconds.
    """

    name = "table"

    def __init__(
        self,
        sequence: str = "sequence",
        step: str = "step",
        gamma: str = "gamma",
        accepted: str = "accepted",
        seconds: str = "seconds",
        propensity: str = "propensity",
        compression: str = "compression",
        task: str = "task",
        signals: dict[str, str] | None = None,
        unit: float = 1.0,
    ) -> None:
        self.sequence, self.step, self.gamma, self.accepted = sequence, step, gamma, accepted
        self.seconds, self.propensity, self.compression, self.task = seconds, propensity, compression, task
        self.signals, self.unit = signals, unit

    def read(self, path: pathlib.Path) -> Imported:
        if not (isinstance(self.unit, int | float) and 0 < self.unit < math.inf):
            raise SpecKVError(f"unit is {self.unit!r}; it must be a number above 0, such as 0.001 for milliseconds")
        if path.suffix not in _READERS:
            raise SpecKVError(f"{path}: its ending must say what it is: {', '.join(_READERS)}")
        numbered = list(_READERS[path.suffix](path))
        faults = [record for _, record in numbered if isinstance(record, Fault)]
        records = [(number, record) for number, record in numbered if not isinstance(record, Fault)]
        there = {column for _, record in records for column in record}
        columns = self._columns(path, there) if records else dict.fromkeys(("sequence", "gamma", "accepted"), "")
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        steps: Counter[str] = Counter()  # of each sequence so far, those that can't be read among them
        for number, record in records:
            sequence = str(record.get(columns["sequence"]))
            try:
                row = {name: _read_cell(name, column, record) for name, column in columns.items()}
                rows.append({"step": steps[sequence]} | row)
                numbers.append(number)
            except ValueError as error:
                faults.append(Fault(number, str(error)))
            steps[sequence] += 1
        table = self._table([*columns, "step"], rows)
        imported = sift(table, np.array(numbers, dtype=np.int64), {"source": "table", "file": path.name})
        return Imported(imported.log, sorted(faults + imported.faults, key=lambda fault: fault.row), len(numbered))

    def _columns(self, path: pathlib.Path, there: set[str]) -> dict[str, str]:
        """Name of each column of the log that the source has -> its column there."""
        wanted = {name: getattr(self, name) for name in _KINDS}
        named = {name for name, column in wanted.items() if column != name} | {"sequence", "gamma", "accepted"}
        if wanted["compression"] in COMPRESSIONS and wanted["compression"] not in there:
            del wanted["compression"]  # it is that of all steps
        wanted |= {f"signal_{name}": column for name, column in (self.signals or {}).items()}
        for name, column in wanted.items():
            if column not in there and (name in named or name.startswith("signal_")):
                raise SpecKVError(
                    f"{path}: there is no column {column!r} for {name}; there are {', '.join(sorted(there))}"
                )
        return {name: column for name, column in wanted.items() if column in there}

    def _table(self, names: list[str], rows: list[dict[str, Any]]) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.array([row[name] for row in rows], dtype=_KINDS.get(name, float)) for name in names
        }
        if "seconds" in columns:
            columns["seconds"] = columns["seconds"] * self.unit
        if self.compression in COMPRESSIONS and "compression" not in columns:
            columns["compression"] = np.full(len(rows), self.compression)
        return columns


#: Columns of a log that a table can have -> their types. Signals are numbers.
_KINDS: dict[str, type] = {
    "sequence": np.str_,
    "step": np.int64,
    "gamma": np.int64,
    "accepted": np.int64,
    "seconds": float,
    "propensity": float,
    "compression": np.str_,
    "task": np.str_,
}


def _read_cell(name: str, column: str, record: dict[str, Any]) -> Any:
    """One cell as its column's type. Raises ValueError with the reason if it is something else."""
    value, kind = record.get(column), _KINDS.get(name, float)
    if kind is np.str_:
        return "" if value is None else str(value)
    try:
        if isinstance(value, bool):
            raise ValueError
        if kind is float:
            return np.nan if value is None or value == "" else float(value)
        number = Decimal(value)  # type: ignore[arg-type]  # a float would hold none above 2^53 exactly
        if not -INTEGER_LIMIT < number < INTEGER_LIMIT or number != int(number):
            raise ValueError
        return int(number)
    except (TypeError, ValueError, ArithmeticError):
        must = "a number" if kind is float else "a whole number of at most 64 bits"
        raise ValueError(f"{column} is {value!r}; it must be {must}") from None
