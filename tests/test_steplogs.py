"""Step logs on disk and in memory, and what an importer must not do."""

import dataclasses
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.cli import main
from speckv.errors import SpecKVError
from speckv.plugins import make_importer
from speckv.steplogs import Fault, Imported, StepLog, read_columns, sift


def make_log(**changed) -> StepLog:
    """Three steps of two sequences, with every column; `changed` replaces some."""
    columns = {
        "sequence": np.array(["a", "a", "b"]),
        "step": np.array([0, 1, 0]),
        "gamma": np.array([4, 0, 2]),
        "accepted": np.array([4, 0, 1]),
        "seconds": np.array([0.25, np.nan, 0.125]),
        "propensity": np.array([1.0, 0.1, 0.5]),
        "compression": np.array(["nf4", "nf4", ""]),
        "task": np.array(["code", "code", ""]),
        "signals": {"running_acceptance": np.array([0.5, 0.75, np.nan]), "mean_entropy": np.array([1.5, 0.0, 2.0])},
        "provenance": {"decoder": "another", "version": 3},
    }
    return StepLog(**columns | changed)


def assert_same(one: StepLog, other: StepLog) -> None:
    assert one.columns.keys() == other.columns.keys() and one.provenance == other.provenance
    for name, values in one.columns.items():
        np.testing.assert_array_equal(values, other.columns[name])
        assert values.dtype.kind == other.columns[name].dtype.kind


def test_written_and_read_it_is_the_same(tmp_path):
    from pyarrow import parquet

    for name, log in {
        "all": make_log(),
        "least": make_log(seconds=None, propensity=None, compression=None, task=None, signals={}, provenance={}),
        "none": StepLog(np.array([], dtype=str), *np.zeros((3, 0), dtype=np.int64)),
    }.items():
        log.save(tmp_path / name)
        assert_same(StepLog.load(tmp_path / name), log)
    schema = parquet.read_schema(tmp_path / "all")
    assert schema.metadata[b"format"] == b"speckv-steps" and schema.metadata[b"schema_version"] == b"1"
    assert schema.field("seconds").metadata[b"unit"] == b"seconds"
    assert schema.field("signal_running_acceptance").metadata[b"unit"] == b"probability"
    with pytest.raises(SpecKVError, match="exists already"):
        make_log().save(tmp_path / "all")


names = st.text(min_size=1).filter(lambda text: "\0" not in text and not re.search("[\ud800-\udfff]", text))
steps = st.tuples(names, st.integers(0, 2**40))
outcomes = st.integers(0, 50).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma)))
rows = st.lists(
    st.tuples(steps, outcomes, st.floats(1e-9, 1e9) | st.just(np.nan)), max_size=12, unique_by=lambda r: r[0]
)


@given(rows)
@settings(max_examples=30, deadline=None)
def test_any_valid_log_survives(tmp_path_factory, rows):
    seconds = np.array([value for _, _, value in rows], dtype=float)
    gamma, accepted = np.array([outcome for _, outcome, _ in rows], dtype=np.int64).reshape(-1, 2).T
    log = StepLog(
        np.array([name for (name, _), _, _ in rows], dtype=str),
        np.array([number for (_, number), _, _ in rows], dtype=np.int64),
        gamma,
        accepted,
        seconds=seconds,
        signals={"x": seconds},
    )
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    log.save(path)
    assert_same(StepLog.load(path), log)


IMPOSSIBLE = {
    "sequence": (np.array(["a", "", "b"]), 1, "sequence is ; it must be an identifier"),
    "step": (np.array([0, 1, -1]), 2, "step is -1; it must be 0 or more"),
    "gamma": (np.array([4, -2, 2]), 1, "gamma is -2; it must be 0 or more"),
    "accepted": (np.array([5, 0, 1]), 0, "5 of 4 drafted tokens can't be accepted"),
    "seconds": (np.array([0.25, np.nan, 0.0]), 2, "seconds is 0.0; it must be above 0"),
    "propensity": (np.array([1.0, 1.5, 0.5]), 1, "propensity is 1.5; it must be above 0 and at most 1"),
    "compression": (np.array(["nf4", "nf3", ""]), 1, "compression is nf3; it must be one of fp32"),
    "signals": ({"x": np.array([0.0, np.inf, 1.0])}, 1, "signal_x is inf; it must be a finite number"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_row_that_cannot_be(name):
    values, row, reason = IMPOSSIBLE[name]
    with pytest.raises(SpecKVError, match=f"step log: row {row}: {reason}"):
        make_log(**{name: values})


def test_a_step_that_stands_there_twice():
    with pytest.raises(SpecKVError, match="row 2: step 0 of sequence 'a' stands in an earlier row"):
        make_log(sequence=np.array(["a", "a", "a"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gamma": np.array([4, 0])}, r"gamma has shape \(2,\), and sequence \(3,\)"),
        ({"signals": {"x": np.zeros((3, 2))}}, r"signal_x has shape \(3, 2\)"),
        ({"gamma": np.array([4.0, 0.0, 2.0])}, "gamma is of type float64"),
        ({"seconds": np.array([1, 2, 3])}, "seconds is of type int64"),
        ({"task": np.array([1, 2, 3])}, "task is of type int64"),
    ],
)
def test_columns_that_do_not_fit(changed, message):
    with pytest.raises(SpecKVError, match=message):
        make_log(**changed)


def test_sift_keeps_what_can_be_and_lists_the_rest():
    columns = make_log().columns | {"accepted": np.array([4, 1, 1]), "seconds": np.array([0.25, 1.0, -1.0])}
    imported = sift(columns, np.array([2, 3, 7]), {"file": "x"})
    assert imported.faults == [
        Fault(3, "1 of 0 drafted tokens can't be accepted"),
        Fault(7, "seconds is -1.0; it must be above 0"),
    ]
    assert imported.steps == 3 and imported.log.step.tolist() == [0] and imported.log.provenance == {"file": "x"}
    assert imported.log.signals["mean_entropy"].tolist() == [1.5]


def test_an_importer_that_drops_silently_is_caught():
    log = make_log()
    assert Imported(log, [Fault(4, "seconds were missing and are taken from the next row", kept=True)], 3)
    with pytest.raises(SpecKVError, match="lost steps: the source held 4, the log has 3, and 0 faults"):
        Imported(log, [Fault(4, "mended", kept=True)], 4)


def damaged(path, change) -> None:
    """Write a log's file anew with its table changed, past all checks."""
    from pyarrow import parquet

    make_log().save(path)
    table = parquet.read_table(path)
    parquet.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def test_the_built_in_importer_lists_what_load_refuses(tmp_path):
    import pyarrow as pa

    path = tmp_path / "log.parquet"
    damaged(path, lambda table: table.set_column(3, table.schema.field(3), pa.array([9, 0, 1])))
    with pytest.raises(SpecKVError, match=r"log\.parquet: step log: row 0: 9 of 4 drafted"):
        StepLog.load(path)
    out = tmp_path / "out.parquet"
    done = CliRunner().invoke(main, ["traces", "import", str(path), "--importer", "speckv", "--out", str(out)])
    assert (done.exit_code, done.stdout) == (0, f"{out}: 2 of 3 steps, of 2 sequences; 1 faults\n")
    assert done.stderr == f"{path}: row 1: 9 of 4 drafted tokens can't be accepted (left out)\n"
    whole = make_log()
    assert_same(
        StepLog.load(out), sift({n: v[1:] for n, v in whole.columns.items()}, np.arange(2), whole.provenance).log
    )


BROKEN = {
    "missing-column": (lambda table: table.drop_columns("gamma"), "the column gamma is missing"),
    "other-column": (lambda table: table.append_column("mood", table["task"]), "the column mood is unknown"),
    "other-type": (lambda table: table.set_column(2, "gamma", table["task"]), "gamma is not of type int64"),
    "empty-cell": (lambda table: table.set_column(2, "gamma", [_nulls()]), "the column gamma has empty cells"),
    "text": (None, "not a readable Parquet file"),
}


def _nulls():
    import pyarrow as pa

    return pa.array([1, None, 2], type=pa.int64())


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_step_log(name, tmp_path):
    change, message = BROKEN[name]
    path = tmp_path / "log.parquet"
    damaged(path, change) if change else path.write_text("a,b")
    for read in (StepLog.load, make_importer("speckv").read):
        with pytest.raises(SpecKVError, match=message) as caught:
            read(path)
        assert str(caught.value).count(str(path)) == 1


def test_a_newer_file_and_another_format(tmp_path):
    from pyarrow import parquet

    for key, value, message in [
        ("schema_version", "2", "schema version 2 is newer"),
        ("format", "x", "not of the format"),
    ]:
        path = tmp_path / key
        make_log().save(path)
        table = parquet.read_table(path)
        parquet.write_table(table.replace_schema_metadata(table.schema.metadata | {key.encode(): value}), path)
        with pytest.raises(SpecKVError, match=message):
            read_columns(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--importer", "speckv", "--out", "out"], "none: no such file or folder; expected a step log"),
        (["log", "--importer", "spekv", "--out", "out"], "importer 'spekv' is unknown; did you mean 'speckv'?"),
        (["log", "--importer", "speckv", "--out", "log"], "log: exists already"),
        (["bad", "--importer", "speckv", "--out", "out"], "bad: none of its 3 steps can be used; nothing was written"),
    ],
)
def test_an_import_that_fails_writes_nothing(arguments, message, tmp_path, monkeypatch):
    import pyarrow as pa

    monkeypatch.chdir(tmp_path)
    make_log().save(tmp_path / "log")
    damaged(tmp_path / "bad", lambda t: t.set_column(2, t.schema.field(2), pa.array([-1, -1, -1])))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = CliRunner().invoke(main, ["traces", "import", *arguments])
    assert done.exit_code == 2 and message in done.stderr.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_docstring_names_every_column():
    names = {field.name for field in dataclasses.fields(StepLog)}
    assert all(f"{name}: " in StepLog.__doc__ for name in names)
    assert json.dumps(make_log().provenance)


def test_a_recording_leaves_the_log_of_a_decoder_that_draws_lots(small_pair_paths, small_prompts_file, tmp_path):
    pair = ["--target", small_pair_paths.target, "--draft", small_pair_paths.draft, "--draft-compression", "fp32"]
    settings = ["--compression", "fp32", "--gamma-max", "6", "--max-new-tokens", "40"]
    out = tmp_path / "traces"

    def record(*more):
        command = ["record", *pair, *settings, "--prompts", small_prompts_file, "--out", out, *more]
        return CliRunner().invoke(main, list(map(str, command)))

    for more, message in [
        (["--policy", "fixed:gamma=7"], "plays gamma 7, above the gamma_max of 6"),
        (["--policy", "confidence"], "stops inside the draft"),
        (["--policy", "mlp"], "say it with --costs"),
        (["--costs", "rtx3090"], "fp32"),
    ]:
        refused = record("--explore", "0.5", *more)
        assert refused.exit_code == 2 and message in refused.stderr and len(refused.stderr.splitlines()) == 1
        assert not out.exists()
    done = record("--explore", "0.5")
    assert done.exit_code == 0, done.output
    log = StepLog.load(tmp_path / "traces.steps.parquet")
    assert log.seconds is None and len(set(log.sequence)) == 12 and log.gamma.max() <= 6
    # Those of a lot, of what the policy wants and a lot may be, and of what no lot may be.
    assert set(np.round(log.propensity, 12)) <= {round(0.5 / 7, 12), round(0.5 + 0.5 / 7, 12), 0.5}
    assert 0.3 < (log.propensity < 0.4).mean() < 0.6
    assert "exists already" in record("--explore", "0.5").stderr
