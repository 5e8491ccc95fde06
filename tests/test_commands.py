"""Command lines as users type them: those of the documentation, and what is said to some that can't be meant."""

import contextlib
import pathlib
import re
import shlex

import click
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.cli.comparing import against_label
from speckv.errors import SpecKVError
from speckv.plugins import make_policy

from .synthetic import make_costs, make_sequences, write_dataset

ROOT = pathlib.Path(__file__).parents[1]
BUDGET = 12


def command_lines() -> list[tuple[str, str]]:
    """Every line of a code block that starts with `speckv `, with the page that it is on, lines that go on joined."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        fenced = "\n".join(re.findall(r"^```(?:sh|bash|shell|console)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        indented = "\n".join(re.findall(r"^    (?=speckv ).*$", text, re.MULTILINE))
        found += [(path.name, line.strip()) for line in f"{fenced}\n{indented}".splitlines()
                  if line.strip().startswith("speckv ")]  # fmt: skip
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_the_commands_of_the_documentation_parse(page, line):
    """Dots stand for a value, or by themselves for all that a line lacks; any other fault in it counts."""
    command: click.Command = main
    args = shlex.split(line, comments=True)[1:]
    while isinstance(command, click.Group):
        command, args = command.commands[args[0]], args[1:]
    more = [at for at, arg in enumerate(args) if arg == "…" and not args[at - 1].startswith("--")]
    with contextlib.suppress(click.MissingParameter) if more else contextlib.nullcontext():
        command.make_context(command.name, [arg for at, arg in enumerate(args) if at not in more])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("made")
    write_dataset(folder / "traces", make_sequences(prompts=6, budget=BUDGET), budget=BUDGET)
    make_costs().save(folder / "costs.json")
    return folder


def run(*command: object) -> str:
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*command: object) -> str:
    done = CliRunner().invoke(main, [str(part) for part in command])
    assert done.exit_code == 2, f"{done.output}\n{done.exception!r}"
    assert done.stdout == "" and done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("against", "label"),
    [
        ("best-fixed", "best-fixed"),
        ("fixed-4", "fixed-4"),
        ("fixed", "fixed-4"),
        ("fixed:gamma=4", "fixed-4"),
        ("hazard@tuned", make_policy("hazard@tuned").label),
    ],
)
def test_a_policy_to_compare_with_is_named_as_others_are(against, label):
    assert against_label(against, [make_policy(spec) for spec in ("best-fixed", "fixed", "hazard@tuned")]) == label


@pytest.mark.parametrize("against", ["fixed:gamma=3", "nonsense", "fixed:nonsense=1"])
def test_a_policy_to_compare_with_that_is_not_there(against):
    with pytest.raises(SpecKVError, match=rf"there is no '{against}' .*; choose one of best-fixed, none$"):
        against_label(against, [make_policy("best-fixed"), make_policy("none")])


def test_what_is_given_twice_counts_once(made):
    ask = ["compare", "--traces", made / "traces", "--costs", made / "costs.json", "--policy", "none", "--folds", 2]
    assert run(*ask, "--batch-size", 1, "--batch-size", 1) == run(*ask, "--batch-size", 1)


@pytest.mark.parametrize("gamma", ["2.5", "null", "[1]", "-1", "true"])
def test_a_fixed_gamma_is_a_whole_number(gamma):
    with pytest.raises(SpecKVError, match=r"gamma is .*; it must be a whole number from 0$"):
        make_policy(f"fixed:gamma={gamma}")


def test_a_step_log_that_is_not_there(tmp_path):
    assert "nosuch: no such file" in refused("evaluate", tmp_path / "nosuch", "--policy", "fixed")


def test_what_learns_nothing_learns_nothing_from_a_log(tmp_path):
    line = refused("train", "fixed", "--from", tmp_path / "log.parquet", "--out", tmp_path / "new")
    assert "'fixed-4' learns nothing; `speckv policies` says which do" in line


def test_a_cost_model_needs_a_name(tmp_path):
    ask = ["costs", "fit", tmp_path / "runs.csv", "--source", "here", "--out", tmp_path / "new.json"]
    assert "--name is empty" in refused(*ask, "--name", "")


@pytest.mark.parametrize("alias", ["int8", "int8=", "=fp16"])
def test_a_stand_in_is_of_two_compressions(alias, tmp_path):
    ask = ["costs", "fit", tmp_path / "runs.csv", "--name", "x", "--source", "here", "--out", tmp_path / "new.json"]
    assert f"--stand-in {alias!r} is not of the form OTHER=TIMED" in refused(*ask, "--stand-in", alias)


RUNS = "compression,gamma,num_steps,elapsed_sec\nfp16,1,10,1.0\nfp16,2,10,1.5\nfp16,4,10,2.5\n"


@pytest.mark.parametrize(("name", "start"), [("runs.csv", ""), ("runs.csv", "\ufeff"), ("RUNS.CSV", "")])
def test_costs_of_a_csv_file(name, start, tmp_path):
    (tmp_path / name).write_text(start + RUNS, encoding="utf-8")
    run("costs", "fit", tmp_path / name, "--name", "x", "--source", "here", "--out", tmp_path / "new.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RUNS.splitlines()[0], "holds no runs; expected one row a timed run"),
        ("gamma,num_steps,elapsed_sec\n1,1,1\n", "the column compression is missing"),
        ("", "the column compression is missing"),
        (RUNS + "fp16,2\n", "row 5: num_steps is missing"),
        (RUNS + "fp16,2,x,1\n", "row 5: could not convert string to float: 'x'"),
        (RUNS + "fp17,2,1,1\n", "row 5: compression 'fp17' is unknown; choose one of"),
        (RUNS + ",2,1,1\n", "row 5: compression is missing"),
        (RUNS + "fp16,2,1e308,1e308\n", "row 5: its numbers must be below 1e+15"),
        (RUNS + "fp16,1e308,1,1\n", "row 5: its numbers must be below 1e+15"),
        (RUNS + "\nfp16,2,nan,1\n", "row 6: its numbers must be below 1e+15"),
    ],
)
def test_costs_of_a_csv_file_that_is_wrong(text, message, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    line = refused("costs", "fit", path, "--name", "x", "--source", "here", "--out", tmp_path / "new.json")
    assert f"{path}: {message}" in line


@pytest.mark.parametrize(("command", "said"), [("report", "the four fastest and gamma 4"), ("plot", "the four fastest"),
                                               ("compare", "folder of a saved one")])  # fmt: skip
def test_what_help_says_of_policies(command, said):
    assert said in " ".join(run(command, "--help").split())


def test_a_profile_of_longer_contexts_than_the_model_has_is_refused_at_once(
    small_pair_paths, small_prompts_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("speckv.live.profiler._time_forwards", lambda *arguments: 1 / 0)
    pair = ["--target", small_pair_paths.target, "--draft", small_pair_paths.draft]
    ask = ["profile", *pair, "--compression", "fp32", "--prompts", small_prompts_file]
    line = refused(*ask, "--draft-compression", "fp32", "--contexts", "8,99999", "--out", tmp_path / "new.json")
    assert "99999 tokens in the cache and 17 in the forward are more than the" in line
