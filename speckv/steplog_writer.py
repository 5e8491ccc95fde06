"""Step logs that grow while a decoder runs: a folder of Parquet files, each of which appears whole or not at all.

`StepLog.load(folder)` reads them all, and so does whatever takes a step log.
"""

import datetime
import json
import math
import multiprocessing.util
import operator
import os
import pathlib
import secrets
import threading
import warnings
import weakref
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.steplogs import SIGNAL, columns_of, write_columns

#: The whole numbers that a column holds are below it.
_LIMIT = 2**63


class StepLogWriter:
    """Writes the steps of running decoders to a folder, from any thread. Several writers may share the folder.

        with StepLogWriter("log") as log:
            log.write(sequence="a", step=0, gamma=4, accepted=3, seconds=0.02, compression="bf16", mean_entropy=1.5)

    A thread of its own turns rows into files, `rows_per_file` at a time and at the latest after `seconds_per_file`, so
    that no step waits for the disk. A killed process loses what was not written by then; one that ends by itself,
    nothing, and so do workers of multiprocessing (those of a pool are killed at the end of its `with`, unless it was
    closed and joined there). Rows that can't be written (a full disk) are given up with a warning: a disk must not
    stop a decoder.

    Sequences are kept under the name `RUN/SEQUENCE`, where RUN belongs to this writer alone: a host may number its
    requests from 0 each time it starts.

    Args:
        folder: made if it is missing.
        rows_per_file: most steps in a file, from 1.
        seconds_per_file: a file holds the steps of so many seconds at most, above 0.
        provenance: of the log, as JSON can hold it.

    Attributes:
        run: stands in front of the names of files and sequences. It is made, and the thread started, by the first
            `write` of a process: one that was forked has another.

    Raises:
        SpecKVError: nothing can be written to the folder, it holds a recording, a number is out of range, or the
            provenance is no JSON.
    """

    wants_features: ClassVar[bool] = True
    run = ""

    def __init__(
        self,
        folder: str | pathlib.Path,
        rows_per_file: int = 10_000,
        seconds_per_file: float = 60.0,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        if rows_per_file < 1 or not seconds_per_file > 0:
            raise SpecKVError(
                f"a file of {rows_per_file} rows or {seconds_per_file} seconds can't be; give 1 or more, and above 0"
            )
        self.folder = pathlib.Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecKVError(f"{folder}: cannot be written ({error.strerror}); choose another place") from None
        if (self.folder / "manifest.json").exists():
            raise SpecKVError(f"{folder}: holds a recording, which a log in it would spoil; choose another folder")
        try:
            json.dumps(provenance, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SpecKVError(f"{folder}: the provenance can't be kept as JSON ({error}); change it") from None
        self.rows_per_file, self.seconds_per_file = rows_per_file, seconds_per_file
        self.provenance, self._closed = provenance or {}, False
        self._begin()
        _WRITERS.add(self)

    def _begin(self) -> None:
        self.run, self._files = "", 0
        self._end: multiprocessing.util.Finalize | None = None
        self._rows: list[dict[str, Any]] = []
        self._adding, self._saving, self._due = threading.Lock(), threading.Lock(), threading.Event()

    def write(
        self,
        *,
        sequence: str,
        step: int,
        gamma: int,
        accepted: int,
        seconds: float | None = None,
        propensity: float | None = None,
        compression: str = "",
        task: str = "",
        **signals: float,
    ) -> None:
        """Take in one step; columns, units and what is not known are those of `StepLog`.

        Args:
            sequence, step: which step of which text; no two may be the same, or the log can't be used until `speckv
                traces import` has left the second out.
            gamma, accepted: tokens drafted, and accepted.
            seconds: duration of the step.
            propensity: chance with which this gamma was chosen.
            compression: of the target.
            task: category of the text.
            signals: by name; one that is called like a feature must have been known before the step. What is left
                out, or no finite number, is not known.

        Raises:
            SpecKVError: the step can't be, or the writer was closed.
        """
        try:
            whole = {"step": operator.index(step), "gamma": operator.index(gamma), "accepted": operator.index(accepted)}
            known = {name: math.nan if value is None else float(value) for name, value in signals.items()}
            seconds = None if seconds is None else float(seconds)
            propensity = None if propensity is None else float(propensity)
            "".join((sequence, task or "", *signals)).encode()  # half of a surrogate pair, say, is no text for a file
            possible = (
                sequence
                and 0 <= step < _LIMIT
                and 0 <= accepted <= gamma < _LIMIT
                and not (seconds is not None and (seconds <= 0 or math.isinf(seconds)))
                and not (propensity is not None and (propensity <= 0 or propensity > 1))
                and (not compression or compression in COMPRESSIONS)
            )
        except (TypeError, ValueError, OverflowError):
            possible = False
        if not possible:
            raise SpecKVError(
                f"step {step} of sequence {sequence!r} can't be: gamma {gamma}, accepted {accepted}, "
                f"seconds {seconds}, propensity {propensity}, compression {compression!r}, task {task!r}, "
                f"signals {signals}"
            )
        row = {"sequence": sequence, "seconds": seconds, "propensity": propensity, "compression": compression,
               "task": task, **whole, **known}  # fmt: skip
        with self._adding:
            if self._closed:
                raise SpecKVError(f"{self.folder}: this log was closed; make another StepLogWriter")
            if not self.run:
                self._start()
            self._rows.append(row)
            full = len(self._rows) >= self.rows_per_file
        if full:
            self._due.set()

    def flush(self) -> None:
        """Write all steps so far. Raises SpecKVError if a file can't be written; its steps are lost, no others."""
        failed: Exception | None = None
        with self._saving:
            for _ in range(math.ceil(len(self._rows) / self.rows_per_file)):
                with self._adding:
                    rows, self._rows = self._rows[: self.rows_per_file], self._rows[self.rows_per_file :]
                try:
                    self._save(rows)
                except Exception as error:  # whatever it is, the next file may be written
                    failed = failed or error
        if failed:
            raise SpecKVError(f"{self.folder}: steps were lost: {failed}") from failed

    def close(self) -> None:
        """Write all steps so far and take no more. Raises SpecKVError as `flush` does."""
        with self._adding:
            self._closed = True
        self._due.set()
        if self._end:
            self._end.cancel()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        # Names of files sort by the time of the first step; the rest keeps processes apart.
        self.run = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"
        # At the end of any process: workers of multiprocessing run no exit handlers but these.
        self._end = multiprocessing.util.Finalize(None, self.close, exitpriority=0)
        threading.Thread(target=self._work, name=f"steps to {self.folder}", daemon=True).start()

    def _work(self) -> None:
        while not self._closed:
            self._due.wait(self.seconds_per_file)
            self._due.clear()
            try:
                self.flush()
            except SpecKVError as error:
                warnings.warn(str(error), SpecKVWarning, stacklevel=1)

    def _save(self, rows: list[dict[str, Any]]) -> None:
        columns = columns_of(rows)
        columns["sequence"] = np.array([f"{self.run}/{name}" for name in columns["sequence"].tolist()])
        for name, values in columns.items():
            if name.startswith(SIGNAL):
                columns[name] = np.where(np.isinf(values), np.nan, values)
        self._files += 1
        write_columns(self.folder / f"{self.run}-{self._files:06}.parquet", columns, self.provenance)


_WRITERS: weakref.WeakSet[StepLogWriter] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked process: rows are those of the process that it was forked from, and so is the thread."""
    for writer in _WRITERS:
        writer._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
