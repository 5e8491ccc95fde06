"""From one machine to another: what a cost model is fitted to, and which policies mind."""

import dataclasses
import io
import json

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.comparison import REQUIRED, Comparison, compare
from speckv.costs import CostModel, Timings, fit_costs_to_log
from speckv.errors import SpecKVError
from speckv.evaluation import to_steps
from speckv.evaluation.recording import join
from speckv.plugins import make_policy
from speckv.replaying import replay
from speckv.steplogs import StepLog
from speckv.tables import ranking, what_if

from .synthetic import make_costs, make_rollouts, make_sequences, write_dataset

#: Policies that weigh costs, and some that look at what was accepted, or at the draft's certainty, alone.
AWARE = ("best-fixed", "leviathan", "hazard")
ACCEPTANCE = ("heuristic", "gammatune", "svip", "confidence:threshold=0.5,cap=6")
NO_TIME = {name: (0.0, 0.0) for name in ("none", "fixed", *AWARE, *ACCEPTANCE, "confidence")}


def machine(name: str, draft: float) -> CostModel:
    """The same acceptance, another price of a drafted token."""
    return dataclasses.replace(make_costs(draft=draft, verify=0.1, controller=NO_TIME), name=name)


@pytest.fixture(scope="module")
def result() -> Comparison:
    traces = make_rollouts(prompts=15, compressions=("bf16",), budget=40)
    specs = ["fixed:gamma=4" if name == "fixed-4" else name for name in REQUIRED]
    policies = [make_policy(spec) for spec in dict.fromkeys([*specs, *AWARE, *ACCEPTANCE])]
    return compare(policies, traces, [machine("cheap-draft", 0.002), machine("dear-draft", 0.06)])


def test_who_minds_costs_changes_its_choice(result):
    share = {change.policy: change.share for change in result.changes}
    labels = {spec: make_policy(spec).label for spec in (*AWARE, *ACCEPTANCE)}
    assert all(share[labels[spec]] > 0.3 for spec in AWARE), share
    assert all(share[labels[spec]] == 0 for spec in (*ACCEPTANCE,)), share
    assert share["none"] == share["fixed-4"] == 0 and share["oracle"] > 0
    drafted = {(c.costs, c.policy): np.dot(c.gamma_share, range(len(c.gamma_share))) for c in result.cells}
    for spec in AWARE:
        assert drafted["cheap-draft", labels[spec]] > drafted["dear-draft", labels[spec]] + 0.5


def test_the_ranking_follows_the_machine(result):
    cheap, dear = (ranking(result, name) for name in ("cheap-draft", "dear-draft"))
    assert set(cheap) == set(dear) and not {"oracle", "perfect-judge"} & set(cheap) and "best-fixed" in cheap
    assert list(cheap.values()) == sorted(cheap.values(), reverse=True)
    assert list(cheap).index("none") == len(cheap) - 1 and list(dear).index("none") < len(dear) - 3


def test_the_report_says_so(result, tmp_path):
    from rich.console import Console

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(what_if(result))
    lines = {line.split("│")[1].strip(): line for line in console.export_text().splitlines() if line.startswith("│")}
    assert "same" in lines["heuristic"] and "same" in lines["fixed-4"] and "% of steps" in lines["hazard"]
    assert f"{list(ranking(result, 'dear-draft')).index('svip') + 1}, " in lines["svip"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result.to_json()))
    assert Comparison.load(path).changes == result.changes
    older = result.to_json()
    del older["changes"]
    path.write_text(json.dumps(older))
    assert Comparison.load(path).changes == []


def test_compare_prints_what_changes(tmp_path):
    write_dataset(tmp_path / "traces", make_sequences(prompts=6, compressions=("bf16",)))
    for name, draft in (("a", 0.002), ("b", 0.06)):
        machine(name, draft).save(tmp_path / f"{name}.json")
    command = ["compare", "--traces", str(tmp_path / "traces"), "--folds", "2", "--policy", "heuristic"]
    one = CliRunner().invoke(main, [*command, "--costs", str(tmp_path / "a.json")])
    both = CliRunner().invoke(main, [*command, *(f"--costs={tmp_path / name}.json" for name in "ab")])
    assert one.exit_code == both.exit_code == 0, both.output
    assert "from one machine to another" in both.stdout and "from one machine to another" not in one.stdout


def profiled(costs: CostModel, spread: float = 0.0) -> StepLog:
    """Steps of gamma 0, 1, 3 and 6 in the seconds of a cost model, with noise."""
    traces = make_rollouts(prompts=20, budget=40)
    logs = {str(g): to_steps(make_policy(f"fixed:gamma={g}"), traces, costs) for g in (0, 1, 3, 6)}
    log = join(logs)
    noise = np.exp(np.random.default_rng(0).normal(0, spread, len(log)))
    return dataclasses.replace(log, seconds=log.seconds * noise)


def test_costs_are_found_again_in_a_log():
    """Whatever is not told apart, replays of the gammas that were played take the time that they took."""
    costs = make_costs()
    found = fit_costs_to_log(profiled(costs, 0.05), "found", "a test")
    traces = make_rollouts(prompts=9, seed=7)
    for gamma in (0, 1, 3, 6):
        truth, again = (replay(make_policy(f"fixed:gamma={gamma}"), traces, c).seconds.sum() for c in (costs, found))
        assert again == pytest.approx(truth, rel=0.02), gamma
    held_out = found.provenance["held_out"]
    assert held_out["steps"] == len(profiled(costs)) and 0.02 < held_out["median_relative_error"] < 0.05
    assert held_out["total_ratio"] == pytest.approx(1, abs=0.01)
    assert list(found.verify) == ["bf16", "nf4"] and len(found.draft.contexts) == 2


def test_steps_of_one_text_are_held_out_one_by_one():
    """Held out altogether, nothing would be left to foretell them from."""
    log = profiled(make_costs(), 0.05)
    one = np.isin(log.sequence, [name for name in log.sequence if name.startswith(log.sequence[0].split(",")[0])])
    columns = {name: values[one] for name, values in log.columns.items()}
    columns["sequence"] = np.full(int(one.sum()), "all")
    columns["step"] = np.arange(int(one.sum()))
    held_out = fit_costs_to_log(StepLog.from_columns(columns, {}), "found", "a test").provenance["held_out"]
    assert held_out["median_relative_error"] < 0.1 and held_out["total_ratio"] == pytest.approx(1, abs=0.05)


def test_contexts_and_stairs_are_kept():
    grid, contexts = np.arange(1, 10), np.array([1, 400])
    stairs = 0.1 + 0.05 * (grid > 4)
    longer = np.array([1.0, 2.0])
    costs = CostModel(
        "stairs",
        Timings(np.array([1]), contexts, 0.01 * longer[None]),
        {"bf16": Timings(grid, contexts, stairs[:, None] * longer)},
    )
    traces = make_rollouts(prompts=20, compressions=("bf16",), budget=200)
    log = join({str(g): to_steps(make_policy(f"fixed:gamma={g}"), traces, costs) for g in range(8)})
    found = fit_costs_to_log(log, "found", "a test")
    step = {
        (model.name, gamma, context): gamma * model.draft.at(1, context) + model.verify["bf16"].at(gamma + 1, context)
        for model in (costs, found)
        for gamma in range(8)
        for context in (20, 150)
    }
    for (name, gamma, context), seconds in step.items():
        assert seconds == pytest.approx(step["stairs", gamma, context], rel=0.05), (name, gamma, context)


def test_what_no_cost_model_can_be_fitted_to():
    log = profiled(make_costs())
    for changed, message in [
        ({"seconds": None}, "has no seconds; log it as well"),
        ({"compression": None}, "has no compression"),
        ({"seconds": np.full(len(log), np.nan)}, "no step has its seconds"),
    ]:
        with pytest.raises(SpecKVError, match=message):
            fit_costs_to_log(dataclasses.replace(log, **changed), "x", "y", where="log.parquet")
    four = StepLog.from_columns({n: v[log.gamma == 3] for n, v in log.columns.items()}, {})
    with pytest.raises(SpecKVError, match="play several gammas"):
        fit_costs_to_log(dataclasses.replace(four, seconds=np.full(len(four), 0.1)), "x", "y", {"int8": "bf16"})
    with pytest.raises(SpecKVError, match="int8 was not timed"):
        fit_costs_to_log(log, "x", "y", {"nf4": "int8"})


def test_fit_and_show_on_the_command_line(tmp_path):
    profiled(make_costs(), 0.05).save(tmp_path / "log.parquet")
    out, picture = tmp_path / "costs.json", tmp_path / "costs.svg"
    more = ["--name", "mine", "--source", "a log", "--stand-in", "int8=nf4", "--out", str(out)]
    done = CliRunner().invoke(main, ["costs", "fit", str(tmp_path / "log.parquet"), *more])
    assert done.exit_code == 0, done.output
    assert "held out in fifths, the median one was" in done.stdout and "steps" in done.stdout
    assert set(CostModel.load(out).verify) == {"bf16", "nf4", "int8"}
    shown = CliRunner().invoke(main, ["costs", "show", str(out), "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.stdout.splitlines() if "verify nf4" in line]
    assert len(rows) == 2 and "held_out" in shown.stdout  # a row for each context length
    assert picture.read_bytes().startswith(b"<?xml")
    again = CliRunner().invoke(main, ["costs", "show", str(out), "--plot", str(picture)])
    assert again.exit_code == 2 and "exists already" in again.output


def test_steps_on_the_command_line(tmp_path):
    write_dataset(tmp_path / "traces", make_sequences(prompts=6))
    make_costs().save(tmp_path / "costs.json")
    command = ["traces", "to-steps", "--traces", str(tmp_path / "traces"), "--costs", str(tmp_path / "costs.json")]
    out = tmp_path / "log.parquet"
    done = CliRunner().invoke(
        main, [*command, "--policy", "fixed:gamma=2", "--policy", "explore:policy=best-fixed", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    log = StepLog.load(out)
    assert len(set(log.sequence)) == 24 and done.stdout == f"{out}: {len(log)} steps of 24 sequences\n"
    assert log.propensity is None  # fixed-2 draws no lots
    again = CliRunner().invoke(main, [*command, "--policy", "none", "--out", str(out)])
    assert again.exit_code == 2 and "exists already" in again.output
