"""Records of text files and tables, each with its number."""

import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from speckv.errors import SpecKVError
from speckv.steplogs import Fault

#: The whole numbers that a column of a log holds are nearer to 0 than this.
INTEGER_LIMIT = 2**63
#: A record by column name, or the fault that makes it unreadable, behind its number.
Numbered = Iterator[tuple[int, dict[str, Any] | Fault]]


def read_csv(path: pathlib.Path) -> Numbered:
    """Records of a CSV file with a header, numbered by the line on which they end."""
    with _opened(path, newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    yield line, Fault(line, f"has not the {len(reader.fieldnames or ())} cells of the header")
                else:
                    yield line, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise SpecKVError(f"{path}: line {reader.line_num + 1} is not readable as CSV ({error})") from None


def read_json_lines(path: pathlib.Path) -> Numbered:
    """Records of a file with a JSON object on each line, numbered by line. Empty lines are none.

    Streams of server-sent events, `data: {…}`, are read as well.
    """
    with _opened(path) as file:
        try:
            for line, text in enumerate(file, start=1):
                text = text.strip().removeprefix("data:").strip()
                if not text or text == "[DONE]":
                    continue
                try:
                    value = json.loads(text)
                except json.JSONDecodeError as error:
                    yield line, Fault(line, f"is not JSON ({error})")
                    continue
                yield line, value if isinstance(value, dict) else Fault(line, "is not a JSON object")
        except UnicodeDecodeError as error:
            raise SpecKVError(f"{path}: is not text ({error})") from None


def read_parquet(path: pathlib.Path) -> Numbered:
    """Records of a Parquet file, numbered from 1."""
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise SpecKVError(f"{path}: is not readable as Parquet behind record {number} ({reason})") from None


def _opened(path: pathlib.Path, newline: str | None = None) -> Any:
    try:
        return path.open(encoding="utf-8-sig", newline=newline)  # spreadsheets put a byte order mark in front
    except OSError as error:
        raise SpecKVError(f"{path}: can't be read ({error.strerror})") from None
