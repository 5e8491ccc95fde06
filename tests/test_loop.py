"""The loop: a decoder logs, the log ranks policies and trains one, and that one goes back to the decoder."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from speckv import SpecKVError
from speckv.cli import main
from speckv.compression import COMPRESSIONS
from speckv.evaluation import to_steps
from speckv.evaluation.ranking import RANKED_BY, rank, split_by_prompt, throughput_by_compression
from speckv.exporters.bundle import BundleExporter
from speckv.live.generation import Speculate
from speckv.plugins import make_policy
from speckv.provenance import prompt_of
from speckv.replaying import replay
from speckv.saving import load_policy, save_policy
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog, is_step_log

FP32 = list(COMPRESSIONS).index("fp32")


@pytest.fixture(scope="module")
def explored(small_traces, small_costs):
    """A log that draws every gamma from 0 to 4 by lot."""
    return to_steps(
        make_policy('explore:policy="fixed:gamma=2",epsilon=1,largest=4').fit(small_traces, small_costs),
        small_traces,
        small_costs,
    )


@pytest.fixture
def costs_file(small_costs, tmp_path):
    small_costs.save(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def run(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_once_round(small_pair, small_prompts, small_dataset, small_traces, small_costs, costs_file, tmp_path):
    """With the transformers adapter; what comes back plays in `generate`, and the text stays the model's own."""
    target, draft = small_pair

    def generate(prompt, **options):
        ids = target.tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        return target.model.generate(ids, attention_mask=mask, max_new_tokens=32, do_sample=False, **options)

    player = make_policy('explore:policy="fixed:gamma=2",epsilon=1,largest=4').fit(small_traces, small_costs)
    with StepLogWriter(tmp_path / "log") as log:
        speculate = Speculate(draft.model, target.tokenizer, player, logs=[log])
        plain = [generate(prompt) for prompt in small_prompts]
        for prompt, text in zip(small_prompts, plain, strict=True):
            assert torch.equal(generate(prompt, custom_generate=speculate), text)
    run("traces", "import", tmp_path / "log", "--importer", "speckv", "--out", tmp_path / "log.parquet")
    specs = ["mlp-throughput:gammas=[0,1,2,4]", "hysteresis:policy=heuristic:start=2", "hazard"]
    table = run("compare", "--traces", tmp_path / "log.parquet", "--costs", costs_file,
                *(part for spec in specs for part in ("--policy", spec)))  # fmt: skip
    assert "held out from fitting" in table and "left out: hazard: does not decide before the step" in table
    assert "│ hysteresis:policy=heuristic:start=2 " in table
    said = run("train", "mlp-throughput:gammas=[0,1,2,4]", "--from", tmp_path / "log.parquet", "--costs", costs_file,
               "--out", tmp_path / "trained")  # fmt: skip
    assert "against the best fixed gamma" in said
    for target_name in ("transformers", "bundle"):
        said = run("export", tmp_path / "trained", "--to", target_name, "--out", tmp_path / target_name,
                   "--traces", small_dataset.path, "--costs", costs_file)  # fmt: skip
        assert "100.00% of" in said
    played = []
    for shipped in (load_policy(tmp_path / "transformers"), BundleExporter().load(tmp_path / "bundle")):
        speculate = Speculate(draft.model, target.tokenizer, shipped)
        played.append([])
        for prompt, text in zip(small_prompts, plain, strict=True):
            assert torch.equal(generate(prompt, custom_generate=speculate), text)
            played[-1] += [step.gamma for step in speculate.decoded.steps]
    assert played[0] == played[1] and max(played[0]) > 0


def test_the_best_fixed_gamma_of_a_log_is_that_of_the_recording(explored, small_traces, small_costs):
    """Or as good: of the gammas that the log played."""
    learned = make_policy("best-fixed").fit_steps(explored, small_costs)
    runs = [replay(make_policy(f"fixed:gamma={gamma}"), small_traces, small_costs) for gamma in range(5)]
    reached = [(one.accepted + 1).sum() / one.seconds.sum() for one in runs]
    assert reached[int(learned.fitted["gamma"][FP32])] > 0.97 * max(reached)
    estimated = throughput_by_compression(make_policy("fixed:gamma=3"), explored, small_costs)
    assert estimated[FP32] == pytest.approx(reached[3], rel=0.05) and (np.delete(estimated, FP32) == 0).all()


def steps_of(gammas, accepted, **changed):
    """A log in which the signals count the steps."""
    count = np.arange(float(len(gammas)))
    names = ("last_mean_entropy", "last_mean_top1", "last_max_entropy", "last_min_top1")
    columns = {
        "sequence": np.array([f"p{number % 3} at fp32" for number in range(len(gammas))]),
        "step": np.arange(len(gammas)),
        "gamma": np.array(gammas),
        "accepted": np.array(accepted),
        "compression": np.full(len(gammas), "fp32"),
        "signals": {name: count + number for number, name in enumerate(names)},
    }
    return StepLog(**columns | changed)


def test_what_the_predictor_learns_from_each_step():
    """Of every gamma up to the one that was drafted; a shorter draft that failed would tell of failures alone."""
    log = steps_of([4, 2, 3, 0], [4, 0, 1, 0])
    inputs, rates = make_policy("mlp:gammas=[0,2,4]")._logged_records(log, seed=0)
    found = sorted((row[0], row[-1], rate) for row, rate in zip(inputs.tolist(), rates.tolist(), strict=True))
    assert found == [(0.0, 2.0, 1.0), (0.0, 4.0, 1.0), (1.0, 2.0, 0.0), (2.0, 2.0, 0.5)]
    first = inputs[(inputs[:, 0] == 0) & (inputs[:, -1] == 2)][0]
    assert first.tolist() == [0.0, 1.0, 2.0, 3.0, float(FP32), 2.0]  # in the order in which it reads them
    unknown = steps_of([4, 4], [4, 0], compression=np.array(["fp32", ""]))
    with pytest.raises(SpecKVError, match=r"the log does not say of every step; import it again"):
        make_policy("mlp:gammas=[4]")._logged_records(unknown, seed=0)


@pytest.mark.parametrize(
    "spec", ["mlp:gammas=[1,2,4]", "mlp-throughput:gammas=[0,1,2,4]", "forest:gammas=[1,2,4],trees=5"]
)
def test_predictors_fitted_to_a_log_can_be_played_and_saved(spec, explored, small_traces, small_costs):
    policy = make_policy(spec).fit_steps(explored, small_costs)
    gammas = set(replay(policy, small_traces, small_costs).chosen.tolist())
    assert gammas <= {0, 1, 2, 4} and gammas
    if policy.name == "mlp-throughput":
        assert (policy.fitted["rate"] > 0).tolist() == [name == "fp32" for name in COMPRESSIONS]


def test_prompts_are_held_out_whole(explored):
    learned, held_out = split_by_prompt(explored, 3)
    assert len(learned) + len(held_out) == len(explored)
    assert not set(learned.sequence.tolist()) & set(held_out.sequence.tolist())
    assert len(set(held_out.sequence.tolist())) == 4
    names = np.array(
        [f"run{run}/{prompt * 12} 0123456{run}" for run, prompt in [(1, "a"), (2, "a"), (1, "b"), (1, "b")]]
    )
    parts = split_by_prompt(steps_of([1, 1, 1, 1], [0, 0, 0, 0], sequence=names), 5)
    assert {tuple(sorted({name[5] for name in part.sequence.tolist()})) for part in parts} == {("a",), ("b",)}
    nothing = StepLog.from_columns({name: column[:0] for name, column in explored.columns.items()}, {})
    for log, count in ((steps_of([1], [0]), "1"), (nothing, "no")):
        with pytest.raises(SpecKVError, match=f"the log holds {count} prompt: too few"):
            split_by_prompt(log, 2)


@pytest.mark.parametrize(
    ("names", "prompts"),
    [
        (["p1 at fp32", "p1 at nf4", "p2 at fp32"], 2),  # a replay's
        (["p1 at home", "p1 at work"], 2),  # no compression
        (["aaaaaaaaaaaa 01234567", "run/aaaaaaaaaaaa 76543210", "bbbbbbbbbbbb 01234567"], 2),  # an adapter's
        (["user 0", "user 1", "user 2"], 3),  # a host's
        (["run1/0", "run2/0"], 2),  # of a host that numbers its requests anew in each run
    ],
)
def test_which_sequences_are_of_one_prompt(names, prompts):
    assert len({prompt_of(name) for name in names}) == prompts


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_a_policy_is_judged_on_texts_that_it_was_not_trained_on(explored, costs_file, tmp_path):
    """`train --from` holds out a share of the log's prompts: a ranking on that very log takes those."""
    log = tmp_path / "log.parquet"
    explored.save(log)
    train = ["train", "best-fixed", "--from", log, "--costs", costs_file]
    run(*train, "--folds", 3, "--out", tmp_path / "3")
    run(*train, "--folds", 1, "--out", tmp_path / "1")
    logged = set(json.loads((tmp_path / "3" / "training.json").read_text())["logged"])
    said = run("compare", "--traces", log, "--costs", costs_file, "--policy", tmp_path / "3")
    steps = int((~np.isin(explored.sequence, sorted(logged))).sum())
    assert f"{steps} steps of 4 sequences, held out from fitting" in said.replace("\n", " ")
    save_policy(load_policy(tmp_path / "1"), tmp_path / "untold")
    said = run("compare", "--traces", log, "--costs", costs_file, "--policy", tmp_path / "untold")
    assert "untold: does not say what it was fitted to" in said.replace("\n", "") and "held out" not in said
    command = ["--costs", costs_file, "--policy", str(tmp_path / "1")]
    refused = CliRunner().invoke(main, ["compare", "--traces", str(log), *command])
    assert refused.exit_code == 2 and "was fitted to all texts of the log" in refused.output, refused.output
    warned = run("evaluate", log, *command)
    assert "best-fixed was fitted to prompts of the log" in warned
    assert "was fitted" not in run("evaluate", log, "--costs", costs_file, "--policy", "none")


@pytest.fixture(scope="module")
def trained(explored, small_costs, tmp_path_factory):
    """Folders of policies that were trained on the log: on two thirds of its prompts, and on all."""
    place = tmp_path_factory.mktemp("trained")
    explored.save(place / "log.parquet")
    small_costs.save(place / "costs.json")
    train = ["train", "best-fixed", "--from", place / "log.parquet", "--costs", place / "costs.json"]
    run(*train, "--folds", 3, "--out", place / "some")
    run(*train, "--folds", 1, "--out", place / "all")
    return place


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
@pytest.mark.parametrize("around", ["{}", "hysteresis:policy={}", "hysteresis:policy=explore:policy={}"])
def test_a_policy_is_judged_on_other_prompts_wherever_it_is_inside(around, explored, small_dataset, trained, tmp_path):
    """On a step log and on a recording, by itself and inside others; what was shipped knows its prompts, too."""
    data = ["--traces", small_dataset.path, "--costs", trained / "costs.json"]
    some, every = (around.format(trained / name) for name in ("some", "all"))
    said = run("export", some, "--to", "speckv", "--out", tmp_path / "shipped", *data)
    assert "; 4 sequences of prompts that it was not trained on, costs" in said
    said = run("export", every, "--to", "speckv", "--out", tmp_path / "all", *data)
    assert "; 12 sequences that it was trained on, costs" in said
    of_log = ["compare", "--traces", trained / "log.parquet", "--costs", trained / "costs.json"]
    for spec in (some, tmp_path / "shipped"):
        said = " ".join(run(*of_log, "--policy", spec, "--policy", "fixed:gamma=3").split())
        assert " of 4 sequences, held out from fitting" in said and "does not say" not in said
    if around == "{}":  # a comparison on a recording trains anew
        return
    said = run("compare", *data, "--folds", 2, "--policy", some, "--json", tmp_path / "out.json")
    assert "8 of 12 prompts are left out: policies of the comparison were trained on them" in said.replace("\n", " ")
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["prompts"] == 4
    done = CliRunner().invoke(main, list(map(str, ["compare", *data, "--policy", every])))
    assert done.exit_code == 2 and "were trained on all prompts of the traces" in done.output


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_the_prompts_of_a_policy_inside_are_warned_of(explored, trained):
    command = ["evaluate", trained / "log.parquet", "--costs", trained / "costs.json", "--policy"]
    assert "was fitted to prompts of the log" in run(*command, f"hysteresis:policy={trained / 'all'}")
    assert "was fitted" not in run(*command, "hysteresis:policy=heuristic:start=2")


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_wrappers_pass_a_log_on(explored, small_costs):
    """To a policy that learns from it, and around one that learns nothing, there is nothing to pass."""
    around = ["hysteresis:policy=heuristic:start=2", "off-switch:policy=fixed:gamma=2"]
    specs = [*around, "hysteresis:policy=best-fixed", "hysteresis:policy=hazard", "best-fixed"]
    (ranking,), left_out = rank([make_policy(spec) for spec in specs], explored, small_costs)
    ranked = {evaluation.policy: evaluation.of(RANKED_BY).throughput for evaluation in ranking.evaluations}
    assert ranked.keys() == set(specs) - {"hysteresis:policy=hazard"}, left_out
    assert ranked["hysteresis:policy=best-fixed"] == pytest.approx(ranked["best-fixed"])
    alone = make_policy("off-switch").fit_steps(explored, small_costs).fitted["off-switch.plain_seconds"][FP32]
    context = int(np.median(explored.signals["context_length"]))
    assert alone == pytest.approx(1 / small_costs.plain_rate("fp32", context))


def test_a_log_that_does_not_say_its_context(explored, small_costs):
    unknown = dict.fromkeys(["context_length"], np.full(len(explored), np.nan))
    bare = dataclasses.replace(explored, signals=explored.signals | unknown)
    less = {name: values for name, values in explored.signals.items() if name != "context_length"}
    same = dataclasses.replace(explored, signals=less)
    fitted = [make_policy("mlp:gammas=[1,2,4]").fit_steps(log, small_costs).fitted["seconds"] for log in (bare, same)]
    assert np.array_equal(*fitted)


def test_a_saved_policy_explores(explored, small_traces, small_costs, tmp_path):
    """As it was trained, and without a recording: so the next log comes of the last one."""
    save_policy(make_policy("best-fixed").fit_steps(explored, small_costs), tmp_path / "better")
    player = make_policy(f"explore:policy={tmp_path / 'better'},epsilon=0.5,largest=4")
    inside = load_policy(tmp_path / "better")
    log = to_steps(player, small_traces, small_costs)
    alone = replay(inside, small_traces, small_costs).chosen.max()
    assert log.propensity is not None and 0.4 < (log.signals["chosen"] == alone).mean() < 0.8
    assert set(log.propensity.round(6)) == {0.1, 0.6}
    save_policy(player.forget(), tmp_path / "exploring")
    assert load_policy(tmp_path / "exploring").fitted.keys() == player.fitted.keys()
    for play in (
        lambda policy: policy.fit(small_traces, small_costs),
        lambda policy: policy.fit_steps(explored, small_costs),
    ):
        kept = play(make_policy(f"explore:policy={tmp_path / 'better'}"))
        assert np.array_equal(kept.fitted["gamma"], inside.fitted["gamma"])


def test_a_saved_policy_inside_remembers_what_it_did(small_traces, small_costs, tmp_path):
    """However it was played since; and a wrapper that learns nothing plays as it is, too."""
    saved = make_policy("ucb1").fit(small_traces, small_costs)
    replay(saved, small_traces, small_costs)
    save_policy(saved, tmp_path / "saved")
    policy = make_policy(f"explore:policy=hysteresis:policy={tmp_path / 'saved'}")
    for play in (lambda: policy, lambda: policy.fit(small_traces, small_costs)):
        assert play().fitted and all(np.array_equal(policy.memory[name], saved.memory[name]) for name in saved.memory)
        replay(policy, small_traces, small_costs)
        assert any(not np.array_equal(policy.memory[name], saved.memory[name]) for name in saved.memory)
    forgot = make_policy(policy.label).forget()
    assert forgot.fitted and all(np.array_equal(forgot.memory[name], new) for name, new in policy.new_memory().items())
    assert make_policy("off-switch").fitted == make_policy("hysteresis:policy=best-fixed").fitted == {}


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_what_a_log_cannot_judge_is_left_out_with_the_reason(explored, small_costs):
    specs = ["fixed:gamma=2", "none", "hazard", "oracle", "ucb1", "best-fixed", "fixed:gamma=9"]
    (ranking,), left_out = rank([make_policy(spec) for spec in specs], explored, small_costs)
    reached = [evaluation.of(RANKED_BY).throughput for evaluation in ranking.evaluations]
    assert reached == sorted(reached, reverse=True) and ranking.held_out and ranking.compression == "fp32"
    assert {evaluation.policy for evaluation in ranking.evaluations} == {"fixed-2", "none", "best-fixed"}
    reasons = {name: reason for reason, names in left_out.items() for name in names}
    assert reasons.keys() == {"hazard", "oracle", "ucb1", "fixed-9"}
    assert "inside the draft" in reasons["hazard"] and "its own steps" in reasons["ucb1"]
    with pytest.raises(SpecKVError, match=r"the log can judge none of these policies: .*inside the draft"):
        rank([make_policy("hazard")], explored, small_costs)


def test_commands_refuse_what_a_log_cannot_give(explored, costs_file, tmp_path):
    explored.save(tmp_path / "log.parquet")
    steps_of([4, 2], [1, 1]).save(tmp_path / "bare.parquet")
    stored = np.append(explored.compression[:-1], "")
    dataclasses.replace(explored, compression=stored).save(tmp_path / "gap.parquet")
    (tmp_path / "empty").mkdir()
    log, out = str(tmp_path / "log.parquet"), str(tmp_path / "out")
    refused = {
        (
            "train",
            "hazard",
            "--from",
            log,
            "--out",
            out,
        ): "give it one with --traces, or train one of best-fixed, forest, hysteresis, mlp, mlp-throughput, off-switch",
        (
            "train",
            "mlp",
            "--from",
            log,
            "--out",
            out,
        ): "no step of the log with signals drafted 6 tokens",
        (
            "train",
            "mlp",
            "--from",
            log,
            "--traces",
            str(tmp_path / "empty"),
            "--out",
            out,
        ): "give one of --traces and --from",
        ("train", "mlp", "--traces", log, "--out", out): "is no recording; if it is a step log, `speckv train --from`",
        ("tune", "hazard", "--grid", "regularisation=1;2", "--traces", log): "is no recording; if it is a step log",
        ("compare", "--traces", str(tmp_path / "empty")): "nor a step log; name another",
        (
            "train",
            "mlp-throughput:gammas=[0,1,2,4]",
            "--from",
            str(tmp_path / "gap.parquet"),
            "--costs",
            costs_file,
            "--out",
            out,
        ): "the log does not say of every step; import it again",
        ("train", "best-fixed", "--from", str(tmp_path / "none"), "--out", out): "none: no such file",
        ("train", "best-fixed", "--from", str(tmp_path / "bare.parquet"), "--out", out): "has no seconds",
        ("compare", "--traces", log, "--batch-size", "2"): "is ranked without --batch-size",
        ("compare", "--traces", str(tmp_path / "bare.parquet")): "holds no seconds; say with --costs",
        ("train", "x", "--out", "x" * 300): "cannot be written (File name too long)",
    }
    for command, message in refused.items():
        done = CliRunner().invoke(main, list(command))
        assert done.exit_code == 2 and message in done.output, (command, done.output)
        assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::speckv.errors.SpecKVWarning")
def test_what_was_trained_says_on_what(explored, costs_file, tmp_path):
    explored.save(tmp_path / "log.parquet")
    command = ["train", "best-fixed", "--from", tmp_path / "log.parquet", "--costs", costs_file, "--folds", "1"]
    assert f"{len(explored)} steps of 12 texts under made-up" in run(*command, "--out", tmp_path / "trained")
    about = json.loads((tmp_path / "trained" / "training.json").read_text())
    assert about["log"] == explored.provenance and len(about["logged"]) == 12
    assert load_policy(tmp_path / "trained").fitted["gamma"][FP32] > 0
    said = run(*command[:-2], "--folds", 3, "--out", tmp_path / "beside itself")
    assert "held-out texts" in said and "against" not in said


def test_what_is_a_step_log(explored, small_dataset, tmp_path):
    explored.save(tmp_path / "log" / "a.parquet")
    assert is_step_log(tmp_path / "log") and is_step_log(tmp_path / "log" / "a.parquet")
    assert not is_step_log(small_dataset.path) and not is_step_log(tmp_path) and not is_step_log(tmp_path / "missing")
