"""Step logs from what vLLM returns with each request."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from speckv.compression import check_compression
from speckv.errors import SpecKVError
from speckv.importers.records import INTEGER_LIMIT, Numbered, read_json_lines
from speckv.steplogs import Fault, Imported, Importer, sift

_HOW = "start vLLM with --per-request-spec-decode-metrics detailed"


class VllmImporter(Importer):
    """Reads responses of vLLM with detailed metrics of speculative decoding, one on each line of a file.

    A line is a response of its HTTP server, a chunk of one that was streamed (`data: {…}`), or the metrics alone, as
    `RequestOutput.outputs[0].spec_decode_metrics.to_dict()` gives them; a JSON array of these will do as well. The form
    is that of vLLM 0.29 to 0.33 (`metrics.speculative_decoding` with `per_step_drafted` and `per_step_accepted`), which
    vLLM calls experimental. Zeros are kept: there all drafted tokens were against the grammar of a structured output.
    Steps in which vLLM scheduled no draft at all are not among its counts, and hence not in the log.

    Args:
        compression: of the target, which vLLM does not say; None leaves it unknown.
    """

    name = "vllm"

    def __init__(self, compression: str | None = None) -> None:
        if compression is not None:
            check_compression(compression)
        self.compression = compression

    def read(self, path: pathlib.Path) -> Imported:
        faults: list[Fault] = []
        sequences: list[str] = []
        steps: list[tuple[int, int, int]] = []
        lines: list[int] = []
        lost = 0
        records = list(_responses(path))
        told = {
            _name_of(record, line) for line, record in records if not isinstance(record, Fault) and _metrics_of(record)
        }
        for line, record in records:
            if isinstance(record, Fault):
                faults.append(record)
                lost += 1
                continue
            name, found = _name_of(record, line), _metrics_of(record)
            if found is None and name in told:
                continue  # a chunk of a stream whose metrics, or their lack, stand in another
            if reason := _wrong(found):
                told.add(name)
                faults.append(Fault(line, reason))
                lost += 1
                continue
            assert found is not None
            drafted, accepted = found["per_step_drafted"], found["per_step_accepted"]
            for what, counted in (("num_draft_tokens", sum(drafted)), ("num_accepted_draft_tokens", sum(accepted))):
                if found.get(what, counted) != counted:
                    faults.append(Fault(line, f"{what} is {found[what]}, and its steps have {counted}", kept=True))
            sequences += [name] * len(drafted)
            lines += [line] * len(drafted)
            steps += zip(range(len(drafted)), drafted, accepted, strict=True)
        step, gamma, accepted = np.array(steps, dtype=np.int64).reshape(-1, 3).T
        columns = {"sequence": np.array(sequences, dtype=np.str_), "step": step, "gamma": gamma, "accepted": accepted}
        if self.compression is not None:
            columns["compression"] = np.full(len(step), self.compression)
        provenance = {"source": "vLLM, per-request metrics of speculative decoding", "file": path.name}
        imported = sift(columns, np.array(lines, dtype=np.int64), provenance)
        every = sorted(faults + imported.faults, key=lambda fault: fault.row)
        return Imported(imported.log, every, imported.steps + lost)


def _responses(path: pathlib.Path) -> Numbered:
    """The records of a file: JSON Lines, or one JSON array, whose elements are numbered from 1."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            whole = file.read(1) == "["
            values = json.loads("[" + file.read()) if whole else []
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecKVError(f"{path}: can't be read ({error}); expected responses of vLLM as JSON Lines") from None
    return _elements(values) if whole else read_json_lines(path)


def _elements(values: list[Any]) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    for number, value in enumerate(values, start=1):
        yield number, value if isinstance(value, dict) else Fault(number, "is not a JSON object")


def _name_of(record: dict[str, Any], line: int) -> str:
    return str(record.get("id") or record.get("request_id") or f"line {line}")


def _metrics_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """The detailed metrics of a response, or None if it holds none."""
    found: Any = record
    if "per_step_drafted" not in record:
        metrics = record.get("metrics")
        found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    return found if isinstance(found, dict) and found.get("per_step_drafted") is not None else None


def _wrong(metrics: dict[str, Any] | None) -> str | None:
    """What is wrong with the metrics of a response."""
    if metrics is None:
        return f"has no counts of single steps; {_HOW}"
    drafted: Any = metrics["per_step_drafted"]
    accepted: Any = metrics.get("per_step_accepted")
    for counts in (drafted, accepted):
        if not (isinstance(counts, list) and all(type(count) is int for count in counts)):
            return "per_step_drafted and per_step_accepted must be lists of whole numbers"
        if not all(abs(count) < INTEGER_LIMIT for count in counts):
            return "per_step_drafted and per_step_accepted must be whole numbers of at most 64 bits"
    if len(drafted) != len(accepted):
        return f"{len(drafted)} steps drafted and {len(accepted)} accepted; they must be as many"
    return None
