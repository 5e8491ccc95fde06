"""Files that appear whole or not at all (rule R6)."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speckv.errors import SpecKVError

if TYPE_CHECKING:
    from pyarrow import parquet


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it into place.

    A process killed at any moment leaves either the old file or the new one, plus at most a
    `*.partial` file that every reader of this project ignores.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise SpecKVError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinity are refused."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def check_version(version: object, newest: int, where: object) -> None:
    """Raise SpecKVError if a file's schema version is not one that this speckv reads."""
    if not isinstance(version, int) or version < 1:
        raise SpecKVError(f"{where}: has no schema version; it was not written by speckv, or is damaged")
    if version > newest:
        raise SpecKVError(
            f"{where}: schema version {version} is newer than {newest}, the newest that this speckv reads; "
            "upgrade speckv"
        )


def read_json(path: pathlib.Path, what: str) -> dict[str, Any]:
    """Read a JSON object, naming the file and the fault if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecKVError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError, RecursionError) as error:  # numbers and nesting have limits, too
        raise SpecKVError(f"{path}: not readable as {what} ({error})") from None
    if not isinstance(value, dict):
        raise SpecKVError(f"{path}: expected {what}, a JSON object, and found {type(value).__name__}")
    return value


def open_parquet(path: pathlib.Path, form: str, newest: int, remedy: str) -> "parquet.ParquetFile":
    """Open a Parquet file of one of the project's forms; of its rows nothing is read yet.

    Args:
        form: the `format` in its metadata.
        newest: schema version that this speckv reads.
        remedy: what to do with a file that can't be read, for the message.

    Raises:
        SpecKVError: the file is not Parquet, not of that form, or of a newer schema version.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        metadata = file.schema_arrow.metadata or {}
    except FileNotFoundError:
        raise SpecKVError(f"{path}: no such file; expected one of the format {form}") from None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise SpecKVError(f"{path}: not a readable Parquet file ({reason}); {remedy}") from None
    if metadata.get(b"format") != form.encode():
        raise SpecKVError(f"{path}: is Parquet but not of the format {form}; choose another file, or move it away")
    version = metadata.get(b"schema_version", b"").decode()
    check_version(int(version) if version.isdigit() else None, newest, path)
    return file
