"""Importers of foreign step logs: every row is in the log or in the list of faults."""

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.cli import main
from speckv.errors import SpecKVError
from speckv.plugins import make_importer
from speckv.steplogs import Fault, StepLog

METRICS = {
    "mean_acceptance_length": 2.0,
    "acceptance_histogram": [1, 1, 1, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 5,
    "num_spec_tokens": 3,
    "per_step_accepted": [2, 1, 0],
    "per_step_drafted": [3, 2, 0],
}


def response(name="cmpl-1", metrics=METRICS, **more):
    return {"id": name, "object": "chat.completion", "choices": [], "metrics": {"speculative_decoding": metrics}} | more


def read_vllm(path, *records, importer="vllm"):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return make_importer(importer).read(path)


def test_vllm_responses(tmp_path):
    found = read_vllm(tmp_path / "a.jsonl", response(), "\n", response("cmpl-2"), importer='vllm:compression="nf4"')
    log = found.log
    assert found.faults == [] and found.steps == 6
    assert log.sequence.tolist() == ["cmpl-1"] * 3 + ["cmpl-2"] * 3 and log.step.tolist() == [0, 1, 2] * 2
    assert log.gamma.tolist() == [3, 2, 0] * 2 and log.accepted.tolist() == [2, 1, 0] * 2
    assert set(log.compression) == {"nf4"} and "vLLM" in log.provenance["source"]


def test_vllm_streams_arrays_and_bare_metrics(tmp_path):
    chunk = {"id": "s", "object": "chat.completion.chunk", "choices": [{"delta": {}}], "metrics": None}
    last = response("s", object="chat.completion.chunk", usage={"total_tokens": 9})
    stream = [f"data: {json.dumps(each)}\n\n" for each in (chunk, chunk, last)]
    assert len(read_vllm(tmp_path / "s.txt", *stream, "data: [DONE]\n").log) == 3
    assert len(read_vllm(tmp_path / "a.json", json.dumps([response(), response("b")])).log) == 6
    bare = read_vllm(tmp_path / "b.jsonl", METRICS, METRICS).log
    assert sorted(set(bare.sequence)) == ["line 1", "line 2"]


def test_vllm_lists_what_it_cannot_use(tmp_path):
    summary = {name: value for name, value in METRICS.items() if not name.startswith("per_step")}
    found = read_vllm(
        tmp_path / "a.jsonl",
        response("a", summary),
        response("b", None),
        "{broken\n",
        "[1]\n",
        response("c", METRICS | {"per_step_accepted": [2, 1]}),
        response("d", METRICS | {"per_step_drafted": [3, 2, 1.5]}),
        response("e", METRICS | {"num_draft_tokens": 6}),
        response("f", METRICS | {"per_step_accepted": [4, 1, 0], "num_accepted_draft_tokens": 5}),
        response("e"),
    )
    reasons = {fault.row: fault.reason for fault in found.faults}
    assert "--per-request-spec-decode-metrics detailed" in reasons[1] and "no counts of single steps" in reasons[2]
    assert "is not JSON" in reasons[3] and "not a JSON object" in reasons[4]
    assert reasons[5] == "3 steps drafted and 2 accepted; they must be as many"
    assert "lists of whole numbers" in reasons[6] and "4 of 3 drafted tokens" in reasons[8]
    assert reasons[7] == "num_draft_tokens is 6, and its steps have 5"
    assert [fault.kept for fault in found.faults if fault.row == 7] == [True]
    assert [fault.row for fault in found.faults].count(9) == 3  # its steps stand there already, under "e"
    assert found.log.sequence.tolist() == ["e"] * 3 + ["f"] * 2 and found.steps == 3 * 3 + 6


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), max_size=5))
@settings(max_examples=30, deadline=None)
def test_vllm_loses_no_step(tmp_path_factory, requests):
    records = [
        response(f"r{n}", {"per_step_drafted": [d for d, _ in steps], "per_step_accepted": [a for _, a in steps]})
        for n, steps in enumerate(requests)
    ]
    found = read_vllm(tmp_path_factory.mktemp("v") / "log.jsonl", *records)
    assert found.steps == sum(map(len, requests))
    assert len(found.log) == sum(a <= d for steps in requests for d, a in steps)
    assert len(found.faults) == found.steps - len(found.log)


ROWS = [
    {"req": "x", "k": "4", "ok": "2", "ms": "125", "p": "0.5", "q": "nf4", "h": "1.5"},
    {"req": "x", "k": "2", "ok": "2", "ms": "", "p": "0.25", "q": "nf4", "h": ""},
    {"req": "y", "k": "3", "ok": "0", "ms": "250", "p": "1", "q": "nf4", "h": "0"},
]
MAP = (
    "table:sequence=req,gamma=k,accepted=ok,seconds=ms,propensity=p,compression=q,unit=0.001,"
    'signals={"mean_entropy": "h"}'
)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    import pyarrow as pa
    from pyarrow import parquet

    typed = [{name: (float(v) if name in {"ms", "h"} else v) if v else None for name, v in row.items()} for row in rows]
    parquet.write_table(pa.Table.from_pylist(typed), path)


FORMS = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}


def write_integers(path, rows):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path)


WRITE_INTEGERS = FORMS | {".parquet": write_integers}


@pytest.mark.parametrize("ending", FORMS)
def test_a_table_with_a_column_map(ending, tmp_path):
    path = tmp_path / f"log{ending}"
    FORMS[ending](path, ROWS)
    found = make_importer(MAP).read(path)
    log = found.log
    assert found.faults == [] and found.steps == 3
    assert log.sequence.tolist() == ["x", "x", "y"] and log.step.tolist() == [0, 1, 0]
    assert log.gamma.tolist() == [4, 2, 3] and log.accepted.tolist() == [2, 2, 0]
    np.testing.assert_allclose(log.seconds, [0.125, np.nan, 0.25])
    assert log.propensity.tolist() == [0.5, 0.25, 1.0] and set(log.compression) == {"nf4"} and log.task is None
    np.testing.assert_array_equal(log.signals["mean_entropy"], [1.5, np.nan, 0.0])


@pytest.mark.parametrize("ending", FORMS)
def test_bad_rows_of_a_table_are_listed(ending, tmp_path):
    path = tmp_path / f"log{ending}"
    bad = [ROWS[0] | change for change in ({"k": "four"}, {"ok": "1.5"}, {"ok": "9"}, {"p": "2"}, {"k": ""})]
    FORMS[ending](path, [ROWS[0], *bad, ROWS[2]])
    found = make_importer(MAP).read(path)
    first = 3 if ending == ".csv" else 2  # the header is a line, and the first row is whole
    assert [fault.row - first for fault in found.faults] == [0, 1, 2, 3, 4]
    assert [fault.reason.split(";")[0] for fault in found.faults][:3] == [
        "k is 'four'", "ok is '1.5'", "9 of 4 drafted tokens can't be accepted"]  # fmt: skip
    assert found.steps == 7 and len(found.log) == 2 and not any(fault.kept for fault in found.faults)


def test_broken_lines_of_a_table(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text('sequence,gamma,accepted\na,1\n"b\nc",2,1\nd,3,1,9\n')
    found = make_importer("table:compression=int8").read(path)
    assert found.faults == [
        Fault(2, "has not the 3 cells of the header"),
        Fault(5, "has not the 3 cells of the header"),
    ]
    assert found.log.sequence.tolist() == ["b\nc"] and found.log.compression.tolist() == ["int8"]
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"sequence": 1, "gamma": 2, "accepted": true}\nnothing\n{"sequence": 1, "gamma": 2, "accepted": 2}'
    )
    found = make_importer("table").read(path)
    assert [fault.row for fault in found.faults] == [1, 2] and found.log.gamma.tolist() == [2]


def test_columns_that_only_later_records_have(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"sequence": "a", "gamma": 4, "accepted": 1}, {"seconds": 0.1, "compression": "fp16"}]
    write_jsonl(path, [{"x": 1}, rows[0], rows[0] | rows[1]])
    found = make_importer("table").read(path)
    np.testing.assert_array_equal(found.log.seconds, [np.nan, 0.1])
    assert found.log.compression.tolist() == ["", "fp16"] and [fault.row for fault in found.faults] == [1]


def test_steps_that_cannot_be_read_leave_their_place(tmp_path):
    """Else what came before a step would be told as what came before another."""
    path = tmp_path / "log.csv"
    path.write_text("sequence,gamma,accepted\na,4,1\na,x,2\nb,3,3\na,1,2\na,4,3\n")
    found = make_importer("table").read(path)
    assert found.log.sequence.tolist() == ["a", "b", "a"] and found.log.step.tolist() == [0, 0, 3]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_a_byte_order_mark(ending, tmp_path):
    path = tmp_path / f"log{ending}"
    FORMS[ending](path, [{"sequence": "a", "gamma": "4", "accepted": "1"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = make_importer("table").read(path)
    assert found.faults == [] and found.log.gamma.tolist() == [4]


@pytest.mark.parametrize("ending", FORMS)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5, unique=True))
@settings(max_examples=20, deadline=None)
def test_integers_are_read_exactly(tmp_path_factory, ending, steps):
    """Those that no float holds as well: two steps would be the same."""
    path = tmp_path_factory.mktemp("t") / f"log{ending}"
    steps = [*steps, *{2**53, 2**53 + 1, 2**63 - 1}.difference(steps)]
    WRITE_INTEGERS[ending](path, [{"sequence": "a", "step": step, "gamma": step, "accepted": step} for step in steps])
    found = make_importer("table").read(path)
    assert found.faults == [] and found.log.step.tolist() == steps
    assert found.log.gamma.tolist() == found.log.accepted.tolist() == steps


def test_integers_in_other_guises(tmp_path):
    """As spreadsheets and data frames write them; what is none is told."""
    path = tmp_path / "log.csv"
    path.write_text("sequence,gamma,accepted\n" + "".join(f"a,{text},0\n" for text in GUISES))
    found = make_importer("table").read(path)
    assert found.log.gamma.tolist() == [value for value in GUISES.values() if value is not None]
    assert len(found.faults) == list(GUISES.values()).count(None)


GUISES = {"4.0": 4, " 4 ": 4, "1e1": 10, "+2": 2, "-0": 0, "4.5": None, "4.000000000000000000000000000001": None,
          "1e999999999": None, "1e-999999999": None, "nan": None, "inf": None, "-inf": None, "0x4": None}  # fmt: skip


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, 10**400])
def test_integers_that_no_column_holds(value, tmp_path):
    rows = [{"sequence": "a", "gamma": gamma, "accepted": 0} for gamma in (value, 2)]
    for ending in (".csv", ".jsonl"):
        path = tmp_path / f"log{ending}"
        FORMS[ending](path, rows)
        found = make_importer("table").read(path)
        assert "at most 64 bits" in found.faults[0].reason and found.log.gamma.tolist() == [2]
    metrics = {"per_step_drafted": [value], "per_step_accepted": [0]}
    found = read_vllm(tmp_path / "v.jsonl", response("a", metrics), response("b"))
    assert "at most 64 bits" in found.faults[0].reason and len(found.log) == 3


def test_chunks_of_a_stream_are_one_response(tmp_path):
    """Whether or not each holds the usage so far, and whatever its kind is called."""
    for kind in ("chat.completion.chunk", "text_completion"):
        chunks = [{"id": name, "object": kind, "usage": {"total_tokens": n}} for n in range(3) for name in ("s", "t")]
        found = read_vllm(tmp_path / "s.jsonl", *chunks, response("s", object=kind))
        assert found.log.sequence.tolist() == ["s"] * 3
        assert [(fault.row, fault.kept) for fault in found.faults] == [(2, False)]  # t has no metrics, told once


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        ("table:gamma=k", "log.csv", "there is no column 'k' for gamma; there are accepted, gamma, sequence"),
        ("table:seconds=ms", "log.csv", "there is no column 'ms' for seconds"),
        ("table", "log.txt", "its ending must say what it is: .csv, .jsonl, .ndjson, .parquet"),
        ("table", "log.parquet", "not readable as Parquet"),
        ("vllm", "log.bin", "can't be read"),
        ("vllm:compression=int3", "log.csv", "compression 'int3' is unknown"),
        *(
            (f"table:unit={unit}", "log.csv", f"unit is {shown}; it must be a number above 0")
            for unit, shown in {"NaN": "nan", "Infinity": "inf", "0": "0", "-1": "-1", '"ms"': "'ms'"}.items()
        ),
        ('table:gamma="k', "log.csv", "the value of gamma is not a number or JSON"),
    ],
)
def test_what_cannot_be_read_at_all(spec, name, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"[\xff\xfe" if name == "log.bin" else b"sequence,gamma,accepted\na,2,1\n")
    with pytest.raises(SpecKVError, match=message) as caught:
        make_importer(spec).read(path)
    assert "\n" not in str(caught.value)


def test_the_command_prints_every_fault(tmp_path):
    write_csv(tmp_path / "log.csv", [ROWS[0], ROWS[0] | {"ok": "7"}])
    out = tmp_path / "log.parquet"
    done = CliRunner().invoke(
        main, ["traces", "import", str(tmp_path / "log.csv"), "--importer", MAP, "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "row 3: 7 of 4 drafted tokens can't be accepted (left out)" in done.stderr
    assert "1 of 2 steps" in done.stdout and len(StepLog.load(out)) == 1
