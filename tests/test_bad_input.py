"""Bad input on the command line: one line, exit code 2, and nothing written or changed (rule R6)."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speckv.cli import main
from speckv.cli.common import must_be_new
from speckv.errors import SpecKVError
from speckv.plugins import SWITCH, make_policy
from speckv.saving import save_policy
from speckv.traces import TraceDataset
from speckv.vocabulary import Vocabulary

from .synthetic import make_costs, make_sequences, write_dataset

BUDGET = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("made")
    write_dataset(folder / "traces", make_sequences(prompts=6, budget=BUDGET), budget=BUDGET)
    make_costs().save(folder / "costs.json")
    (folder / "out.json").write_text("precious")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch) -> pathlib.Path:
    """A folder of its own with a good dataset, a good cost model and a file that must survive."""
    monkeypatch.setenv(SWITCH, "")
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def snapshot(folder: pathlib.Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def refuse(folder: pathlib.Path, *command: object) -> str:
    """Run a command that must fail as it should, and return what it said."""
    before = snapshot(folder)
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 2, f"{done.output}\n{done.exception!r}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("speckv: error: "), done.stderr
    assert snapshot(folder) == before
    return lines[0]


def compare(place: pathlib.Path, *more: object, traces: str = "traces", costs: str = "costs.json") -> list[object]:
    return ["compare", "--traces", place / traces, "--costs", place / costs, "--json", place / "new.json", "--plot",
            place / "new.png", *more]  # fmt: skip


def test_good_input_is_taken(place):
    """The commands below fail for the fault that each plants, and for no other."""
    command = compare(place, "--policy", "none", "--folds", 2)
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    assert json.loads((place / "new.json").read_text())["cells"] and (place / "new.png").stat().st_size > 1000


def test_two_outputs_at_one_place(place):
    (place / "link").symlink_to(place)
    for one, other in (("a.svg", "a.svg"), ("a.svg", "none/../a.svg"), ("a.svg", "link/a.svg")):
        command = ["compare", "--traces", place / "traces", "--json", place / one, "--plot", place / other]
        assert f"{place / other}: is to be written twice" in refuse(place, *command)


@contextlib.contextmanager
def closed_output():
    """Standard output that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output, contextlib.redirect_stdout(output):
        yield


@pytest.mark.parametrize(
    "command",
    [
        "compare --traces traces --policy none --folds 2 --json new.json --plot new.png",
        "compare --traces steps.parquet --policy fixed --json new.json",
        "evaluate steps.parquet --policy fixed --json new.json",
        "tune hazard --traces traces --grid regularisation=1;2 --folds 2 --out new.json",
        "costs show costs.json --plot new.png",
        "costs fit steps.parquet --name toy --source here --out new.json",
        "train hazard --traces traces --folds 2 --out new",
    ],
)
def test_what_is_asked_for_is_written_though_nobody_reads_what_is_printed(command, place, monkeypatch):
    """As behind `| head -1`."""
    monkeypatch.chdir(place)
    costs = [] if "costs" in command or "steps" in command else ["--costs", "costs.json"]
    made = [
        "traces",
        "to-steps",
        "--traces",
        "traces",
        "--costs",
        "costs.json",
        "--policy",
        "fixed",
        "--policy",
        "none",
    ]
    assert CliRunner().invoke(main, [*made, "--out", "steps.parquet"]).exit_code == 0
    with pytest.raises((BrokenPipeError, SystemExit)), closed_output():
        main([*command.split(), *costs], standalone_mode=False)
    written = [name for name in ("new", "new.json", "new.png") if name in command.split()]
    assert [name for name in written if (place / name).exists()] == written


@pytest.mark.parametrize(("option", "name"), [("--json", "out.json"), ("--plot", "out.png")])
def test_a_result_is_not_overwritten(option, name, place):
    (place / name).write_text("precious")
    assert f"{name}: exists already" in refuse(place, *compare(place), option, place / name)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_place_that_can_not_be_written_is_refused_at_once(option, place, monkeypatch):
    monkeypatch.setattr("speckv.comparison.compare", lambda *arguments, **more: 1 / 0)
    assert "cannot be written" in refuse(place, *compare(place), option, place / "out.json" / "below" / "x.png")


def some_shard(place: pathlib.Path) -> pathlib.Path:
    return sorted((place / "traces").glob("*.parquet"))[1]


def rewrite(shard: pathlib.Path, change) -> None:
    from pyarrow import parquet

    parquet.write_table(change(parquet.read_table(shard)), shard)


def test_truncated_parquet(place):
    shard = some_shard(place)
    shard.write_bytes(shard.read_bytes()[:-200])
    assert f"{shard}: not a readable Parquet file" in refuse(place, *compare(place))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 5, b"not parquet at all"])
def test_garbage_instead_of_parquet(content, place):
    some_shard(place).write_bytes(content)
    assert str(some_shard(place)) in refuse(place, *compare(place))


@given(share=st.floats(0, 0.999))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parquet_cut_anywhere(share, made, tmp_path):
    folder = tmp_path / "cut"
    if not folder.exists():
        shutil.copytree(made / "traces", folder)
    shard = sorted(folder.glob("*.parquet"))[1]
    whole = sorted((made / "traces").glob("*.parquet"))[1].read_bytes()
    shard.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(SpecKVError) as caught:
        TraceDataset(folder).load()
    assert str(shard) in str(caught.value) and "\n" not in str(caught.value)


def test_foreign_parquet(place):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"a": [1, 2]}), place / "traces" / "foreign.parquet")
    assert "foreign.parquet: is Parquet but not of the format" in refuse(place, *compare(place))


def test_newer_shard(place):
    def newer(table):
        return table.replace_schema_metadata(table.schema.metadata | {b"schema_version": b"2"})

    rewrite(some_shard(place), newer)
    line = refuse(place, *compare(place))
    assert "schema version 2 is newer than 1" in line and "upgrade speckv" in line and str(some_shard(place)) in line


def test_newer_manifest(place):
    path = place / "traces" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    assert f"{path}: schema version 2 is newer than 1" in refuse(place, *compare(place))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "speckv-rollout", "schema_version": 1}'])
def test_bad_manifest(content, place):
    path = place / "traces" / "manifest.json"
    path.write_text(content)
    assert str(path) in refuse(place, *compare(place))


@pytest.mark.parametrize("value", [{"gamma_max": "16"}, {"gamma_max": 0}, {"max_new_tokens": None}])
def test_manifest_with_a_nonsensical_value(value, place):
    path = place / "traces" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | value))
    assert str(path) in refuse(place, *compare(place))


def test_a_column_is_missing(place):
    rewrite(some_shard(place), lambda table: table.drop_columns(["draft_top1"]))
    assert f"{some_shard(place)}: the column draft_top1 is missing" in refuse(place, *compare(place))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["draft_entropy", "target_margin", "off_draft_top1"])
def test_a_signal_that_is_not_a_number(name, value, place):
    def spoil(table):
        import pyarrow as pa

        (values,) = table[name].to_pylist()
        values[-1] = value
        column = pa.array([values], pa.list_(pa.float32()))
        return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)

    shards = [path for path in (place / "traces").glob("*.parquet")]
    from pyarrow import parquet

    shard = next(path for path in sorted(shards) if parquet.read_table(path)[name].to_pylist()[0])
    rewrite(shard, spoil)
    line = refuse(place, *compare(place))
    assert f"{shard}: row 0: {name} is not a finite number at position" in line


def spoil_row(shard: pathlib.Path, change) -> None:
    """Change a shard's only row; nulls are written as well."""
    import pyarrow as pa

    def changed(table):
        (row,) = table.to_pylist()
        change(row)
        fields = [field.with_nullable(True) for field in table.schema]
        return pa.Table.from_pylist([row], pa.schema(fields, table.schema.metadata))

    rewrite(shard, changed)


@pytest.mark.parametrize(
    "name",
    ["id", "task", "compression", "prompt_tokens", "tokens", "draft_tokens", "draft_entropy", "target_margin",
     "off_lengths", "off_tokens", "off_draft_top1", "ended"],
)  # fmt: skip
def test_an_empty_cell(name, made, tmp_path):
    """Instead of the value, or inside a list of them."""
    folder = tmp_path / "traces"
    for inside in (False, True):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made / "traces", folder)
        shard = next(
            path for path in sorted(folder.glob("*.parquet")) if len(next(iter(TraceDataset(folder))).off_tokens) > 1
        )

        def empty(row, inside=inside):
            if inside and isinstance(row[name], list):
                row[name][1] = None
            else:
                row[name] = None

        spoil_row(shard, empty)
        reasons = "is not a finite number at|holds an empty cell"
        with pytest.raises(SpecKVError, match=f"{shard}: row 0: {name} ({reasons})"):
            TraceDataset(folder).load()


def _behind_a_right_proposal(row):
    right = np.flatnonzero(np.array(row["tokens"]) == row["draft_tokens"])[0]
    wrong = next(n for n, length in enumerate(row["off_lengths"]) if length)
    row["off_lengths"][wrong] -= 1
    row["off_lengths"][right] += 1


def _set(name, value, position=-1):
    def change(row):
        if isinstance(row[name], list) and not isinstance(value, list):
            row[name][position] = value
        else:
            row[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((_set(name, -1), f"{name} is -1 at position")
          for name in ("prompt_tokens", "tokens", "draft_tokens", "off_tokens")),
        *((_set(name, -0.5), f"{name} is -0.5 at position")
          for name in ("draft_entropy", "off_draft_entropy", "target_entropy", "target_margin", "draft_top2")),
        *((_set(name, 7.0), f"{name} is 7.0 at position")
          for name in ("draft_top1", "draft_top2", "draft_top10", "off_draft_top1")),
        (_set("id", ""), "id is empty"),
        (_set("prompt_tokens", []), "prompt_tokens is empty"),
        (_behind_a_right_proposal, "a continuation stands behind the right proposal at position"),
    ],
)  # fmt: skip
def test_a_sequence_that_cannot_be(change, message, place):
    shard = next(path for path, sequence in zip(sorted((place / "traces").glob("*.parquet")),
                 TraceDataset(place / "traces"), strict=True) if len(sequence.off_tokens))  # fmt: skip
    spoil_row(shard, change)
    line = refuse(place, *compare(place))
    assert f"{shard}: row 0: {message}" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [("draft_tokens", "different lengths"), ("off_tokens", "do not add up"), ("draft_top2", "values for")],
)
def test_columns_that_do_not_fit_together(name, message, place):
    sequence = next(s for s in make_sequences(prompts=6, budget=BUDGET) if len(s.off_tokens) > 1)
    if name in sequence.signals:
        changed = {"signals": sequence.signals | {name: sequence.signals[name][:-1]}}
    else:
        changed = {name: getattr(sequence, name)[:-1]}
    TraceDataset(place / "traces").add(dataclasses.replace(sequence, **changed))
    assert message in refuse(place, *compare(place))


def test_missing_and_empty_traces(place):
    assert "no such trace folder" in refuse(place, *compare(place, traces="nowhere"))
    for shard in (place / "traces").glob("*.parquet"):
        shard.unlink()
    assert "holds no sequence" in refuse(place, *compare(place))
    (place / "traces" / "manifest.json").unlink()
    assert "manifest.json: no such file" in refuse(place, *compare(place))


def test_traces_show_reads_to_the_end(place):
    shard = some_shard(place)
    shard.write_bytes(shard.read_bytes()[:300])
    assert str(shard) in refuse(place, "traces", "show", place / "traces")


def test_merge_writes_nothing(place):
    line = refuse(place, "traces", "merge", place / "traces", place / "traces", "--out", place / "merged")
    assert "stands in two of the datasets" in line
    assert "exists already" in refuse(place, "traces", "merge", place / "traces", "--out", place / "traces")


def test_nothing_is_written_into_what_is_read(place):
    """A recording with a step log among its shards can't be read any more."""
    recording, saved = place / "traces", place / "saved"
    save_policy(make_policy("fixed:gamma=2"), saved)
    (place / "link").symlink_to(recording)
    for command in (
        ["traces", "to-steps", "--traces", recording, "--policy", "fixed", "--out", recording / "x.parquet"],
        ["traces", "to-steps", "--traces", recording, "--policy", "fixed", "--out", place / "link" / "x.parquet"],
        ["traces", "merge", recording, "--out", recording / "deep" / "er"],
        ["compare", "--traces", recording, "--json", recording / "x.json"],
        ["train", "hazard", "--traces", recording, "--out", recording],
        ["decode", "--target", "x", "--draft", "x", "--prompt", "x", "--log", recording],
        ["export", saved, "--to", "speckv", "--out", saved / "exported"],
    ):
        folder = saved if command[0] == "export" else recording
        line = refuse(place, *command)
        assert f"{folder}: holds a " in line and line.endswith(f" already; choose another place for {command[-1]}")
    must_be_new(recording / ".." / "x.json")
    (place / "manifest.json").write_text('{"name": "of something else"}')
    must_be_new(place / "x.json")


def test_known_texts_are_not_replaced(place):
    Vocabulary({0: b"right"}).save(place / "traces")
    line = refuse(place, "traces", "texts", place / "traces", "--tokenizer", place / "of-another-model")
    assert f"{place / 'traces' / 'vocabulary.json'}: exists already" in line


def test_a_sequence_at_an_unknown_compression_is_refused(place):
    sequence = dataclasses.replace(make_sequences(prompts=1, budget=BUDGET)[0], compression="gptq")
    TraceDataset(place / "traces").add(sequence)
    assert "compression 'gptq' is unknown" in refuse(place, *compare(place))


def test_a_sequence_at_an_unknown_compression_with_costs_is_refused(place):
    sequence = dataclasses.replace(make_sequences(prompts=1, budget=BUDGET)[0], compression="gptq")
    TraceDataset(place / "traces").add(sequence)
    make_costs(compressions=["bf16", "nf4", "gptq"]).save(place / "costs.json")
    assert "gptq" in refuse(place, *compare(place))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fixd", "policy 'fixd' is unknown; did you mean 'fixed'?"),
        ("hazzard", "did you mean 'hazard'?"),
        ("qqqqqqqq", "the known ones are adaedl, adaptive-confidence"),
        ("", "policy '' is unknown"),
        ("fixed:gama=4", "policy 'fixed' has no parameter 'gama'; it has gamma"),
        ("none:gamma=4", "policy 'none' has no parameter 'gamma'; it has none"),
        ("fixed:gamma=2,gamma=7", "policy 'fixed' is given gamma twice; leave one out"),
        ("fixed:gamma=four", "the value of gamma is not a number or JSON: 'four'"),
        ("fixed:gamma", "the value of gamma is not a number or JSON: ''"),
        ("fixed:gamma=-1", "gamma is -1; it must be a whole number from 0"),
        ("fixed:gamma=2.5", "gamma is 2.5; it must be a whole number from 0"),
        ('fixed:gamma="four"', "gamma is four; it must be a whole number from 0"),
        ("heuristic:start=-3", "start is -3; it must be a whole number from 0"),
    ],
)
def test_policies(spec, message, place):
    assert message in refuse(place, *compare(place, "--policy", spec, "--folds", 2))


@pytest.mark.parametrize("spec", ["hazard:regularisation=-1", "mlp:hidden=0", "mlp:gammas=3"])
def test_policies_with_bad_values(spec, place):
    line = refuse(place, *compare(place, "--policy", spec, "--folds", 2))
    assert spec.split(":")[1].split("=")[0] in line


def test_gamma_above_gamma_max(place):
    line = refuse(place, *compare(place, "--policy", "fixed:gamma=99", "--folds", 2))
    assert "99" in line and "gamma_max of 8" in line


def test_gamma_up_to_gamma_max_is_taken():
    assert make_policy("fixed:gamma=8").label == "fixed-8"


def test_a_list_can_be_given():
    assert make_policy("mlp:gammas=[2,4],hidden=8").get_params() == make_policy("mlp").get_params() | {
        "gammas": (2, 4),
        "hidden": 8,
    }


def test_the_same_policy_twice(place):
    command = compare(place, "--policy", "heuristic:start=2", "--policy", "heuristic:start=2")
    assert "two policies of the comparison are called heuristic:start=2" in refuse(place, *command)


def test_more_folds_than_prompts(place):
    assert "6 prompts, too few for 7 folds" in refuse(place, *compare(place, "--folds", 7))


def test_picture_of_an_unknown_kind(place):
    command = ["compare", "--traces", place / "traces", "--costs", place / "costs.json", "--plot", place / "a.gif"]
    assert "a.gif: pictures are written as .png" in refuse(place, *command)


def test_cost_models(place):
    make_costs(compressions=["bf16"]).save(place / "less.json")
    assert "cost model 'toy' has no timings for 'nf4', only for bf16" in refuse(
        place, *compare(place, costs="less.json")
    )
    assert "no such file; expected a cost model" in refuse(place, *compare(place, costs="none.json"))
    assert "two of the cost models are called 'toy'" in refuse(place, *compare(place, "--costs", place / "costs.json"))
    (place / "bad.json").write_text('{"format": "speckv-costs", "schema_version": 1}')
    assert "bad.json: not a whole cost model" in refuse(place, *compare(place, costs="bad.json"))
    for unreadable in (100_000 * "[", '{"format": ' + 5_000 * "1" + "}"):
        (place / "bad.json").write_text(unreadable)
        assert "bad.json: not readable as a cost model" in refuse(place, *compare(place, costs="bad.json"))
    (place / "newer.json").write_text('{"format": "speckv-costs", "schema_version": 3}')
    assert "schema version 3 is newer than 2" in refuse(place, *compare(place, costs="newer.json"))


def test_a_file_where_a_folder_is_needed(place):
    command = [
        "compare",
        "--traces",
        place / "traces",
        "--costs",
        place / "costs.json",
        "--policy",
        "none",
        "--folds",
        2,
    ]
    assert "cannot be written" in refuse(place, *command, "--json", place / "out.json" / "cells.json")


def test_what_can_not_be_written_is_said_first(place):
    """Before anything is read, and although nothing is lost yet."""
    (place / "file").write_text("")
    below, missing = place / "file" / "x", ["--traces", place / "missing"]
    for command in (
        ["train", "hazard", *missing, "--out", below],
        ["tune", "hazard", "--grid", "regularisation=1", *missing, "--out", below],
        ["compare", *missing, "--json", below],
        ["compare", *missing, "--plot", below.with_suffix(".png")],
        ["traces", "to-steps", *missing, "--policy", "none", "--out", below],
    ):
        assert f"{command[-1]}: cannot be written" in refuse(place, *command)
    for option in ("--json", "--plot"):
        taken = place / "taken.png"
        taken.write_text("")
        assert f"{taken}: exists already" in refuse(place, "compare", *missing, option, taken)


def record(place: pathlib.Path, prompts: str, compression: str = "bf16") -> list[object]:
    return ["record", "--target", place / "no-model", "--draft", place / "no-model", "--compression", compression,
            "--prompts", place / prompts, "--out", place / "recording"]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no prompt"),
        (["", "  "], "holds no prompt"),
        (['{"text": "hello"}'], ":1: not a prompt (none of the known keys)"),
        (['{"id": 1, "task": "code", "prompt": "a"}', "", '{"id": 1, "task": "code", "prompt": "b"}'],
         ":3: the id '1' stands in the file twice"),
        (['{"id": 1, "task": "code", "prompt": "a"}', "{"], ":2: not a prompt"),
        (['{"id": 1, "task": "code"}'], ":1: not a prompt"),
        (['{"id": 1, "prompt": "a"}'], ":1: not a prompt ('task')"),
        (['{"id": 1, "task": "code", "prompt": " "}'], "the prompt text is empty"),
        (['{"id": "", "task": "code", "prompt": "a"}'], "the id is empty"),
        (['{"id": 1, "task": "code", "turns": []}'], ":1: not a prompt"),
        (["[1]"], "the line is not a JSON object"),
    ],
)  # fmt: skip
def test_prompt_files(lines, message, place):
    (place / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    line = refuse(place, *record(place, "prompts.jsonl"))
    assert str(place / "prompts.jsonl") in line and message in line


def test_prompt_files_that_cannot_be_read(place):
    assert "no such prompt file" in refuse(place, *record(place, "none.jsonl"))
    (place / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "not readable as a prompt file" in refuse(place, *record(place, "binary.jsonl"))


def test_unknown_compression(place):
    (place / "prompts.jsonl").write_text('{"id": 1, "task": "code", "prompt": "a"}')
    line = refuse(place, *record(place, "prompts.jsonl", "int3"))
    assert "compression 'int3' is unknown; choose one of fp32, bf16" in line
    command = ["profile", "--target", "x", "--draft", "y", "--compression", "int3", "--out", place / "new.json"]
    assert "compression 'int3' is unknown" in refuse(place, *command)
    command[-1] = place / "out.json"
    assert "exists already" in refuse(place, *command)


def process(*command: str, **options) -> subprocess.Popen[str]:
    """The real process; options as of Popen."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, *command], text=True, env=environment, **options)


def test_the_real_process_exits_with_2(place):
    before = snapshot(place)
    command = map(str, compare(place, "--policy", "fixd"))
    run = process("-m", "speckv", *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    printed, said = run.communicate(timeout=120)
    assert run.returncode == 2 and printed == ""
    assert said == "speckv: error: policy 'fixd' is unknown; did you mean 'fixed'?\n"
    assert snapshot(place) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
@pytest.mark.parametrize("command", ["plugins", "policies --json", "--help"])
def test_standard_output_is_a_full_disk(command):
    with open("/dev/full", "w") as full:
        run = process("-m", "speckv", *command.split(), stdout=full, stderr=subprocess.PIPE)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert said == "speckv: error: what is printed cannot be written (No space left on device); print it elsewhere\n"


def test_the_workers_of_a_command_end_with_it():
    """They hold its standard output, which is at its end only when all of them are gone."""
    working = """
import joblib, os, time
from speckv.cli import main

def work():
    os.write(1, b"working\\n")
    time.sleep(100)

@main.command()
def wait():
    list(joblib.Parallel(n_jobs=2, return_as="generator")(2 * [joblib.delayed(work)()]))

main()
"""
    run = process("-c", working, "wait", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.readline() == "working\n"
    run.terminate()
    _, said = run.communicate(timeout=30)
    assert run.returncode == 1 and said.strip() == "Aborted!"
