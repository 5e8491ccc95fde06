"""Searches on training prompts: what they fit on, what they play, and the command."""

import dataclasses
import json
import time

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.comparison import folds_of
from speckv.compression import COMPRESSIONS
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import TraceDataset
from speckv.tuning import fastest_by_compression, fastest_on_other_prompts, search, settle_rate

from .synthetic import make_costs, make_rollouts, make_sequences, write_dataset


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=12, budget=24)


@pytest.fixture(scope="module")
def costs():
    return make_costs()


class Cheat(Policy):
    """Plays well on the prompts that it was fitted on, and badly on others: it knows them by their lengths."""

    name = "cheat"
    features = ("context_length", "is_first")

    def __init__(self, known: int = 4, unknown: int = 0) -> None:
        super().__init__()
        self.known, self.unknown = known, unknown

    def fit(self, traces, costs, seed=0):
        self.fitted = {"lengths": np.unique(traces.prompt_lengths)}
        return self

    def new_state(self, rows):
        return {"known": np.zeros(rows, dtype=bool)}

    def choose_gamma(self, features, state):
        known = np.isin(features["context_length"], self.fitted["lengths"])
        state["known"] = np.where(features["is_first"] > 0, known, state["known"])
        return np.where(state["known"], self.known, self.unknown)


@pytest.fixture(scope="module")
def told_apart(traces):
    """The recording with a prompt length of its own for each prompt."""

    _, prompt = np.unique(traces.ids, return_inverse=True)
    return dataclasses.replace(traces, prompt_lengths=20 + prompt)


def test_a_search_plays_prompts_that_were_not_learned_from(told_apart, costs):
    speeds = search([Cheat(4, 0), Cheat(0, 4)], told_apart, costs, folds=3)
    expected = [replay(make_policy(f"fixed:gamma={gamma}"), told_apart, costs, (0, 0)).throughput for gamma in (0, 4)]
    assert speeds == pytest.approx(expected, rel=0.01) and speeds[1] > 1.05 * speeds[0]


def test_a_choice_is_made_on_prompts_that_were_not_learned_from(told_apart, costs):
    calls = []

    def fitted(part):
        calls.append(set(part.ids))
        return [Cheat(4, 0).fit(part, costs), Cheat(0, 4).fit(part, costs)]

    best = fastest_on_other_prompts(fitted, told_apart, costs)
    codes = [list(COMPRESSIONS).index(name) for name in set(told_apart.compressions)]
    assert best[codes].tolist() == [1] * len(codes)
    fold_of = folds_of(told_apart, 2, 0)
    assert calls == [set(told_apart.ids[fold_of != fold]) for fold in (0, 1)]


def test_one_prompt_is_no_reason_to_choose(told_apart, costs):
    alone = told_apart.take(told_apart.ids == told_apart.ids[0])
    assert not fastest_on_other_prompts(lambda part: 1 / 0, alone, costs).any()


def test_candidates_are_charged_alike_whatever_their_parameters(told_apart, costs):
    dear = dataclasses.replace(costs, controller={"fixed": (5.0, 0.0)})
    fixed = [make_policy("fixed:gamma=4"), make_policy("fixed:gamma=0")]  # of which the first is the default
    assert not fastest_by_compression(fixed, told_apart, dear).any()
    task_oracle = [replay(make_policy("task-oracle"), told_apart, model).gamma for model in (costs, dear)]
    assert task_oracle[0].tolist() == task_oracle[1].tolist()


class Napping(Policy):
    """Takes its time to decide."""

    name = "napping"

    def __init__(self, nap: float = 0.0) -> None:
        super().__init__()
        self.nap = nap

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": np.array(2)}
        return self

    def choose_gamma(self, features, state):
        time.sleep(self.nap)
        return 2


def test_a_search_charges_for_decisions_that_costs_do_not_know():
    few, costs = make_rollouts(prompts=4, budget=8), make_costs(controller={"napping": (0.0, 0.0)})
    quick, slow = search([Napping(), Napping(0.002)], few, costs, folds=2)
    run = replay(Napping().fit(few, costs), few, costs)
    assert quick == pytest.approx(run.throughput)
    assert slow < run.tokens.sum() / (run.seconds.sum() + 0.002 * len(run.seconds)) * 1.0001


def test_a_rate_is_settled_from_that_of_no_speculation(traces, costs):
    """What such a decoding really reaches: a rule that never drafts has it from the first round on."""
    dear = dataclasses.replace(costs, overhead=0.05)
    policy = make_policy("none")
    settle_rate(policy, traces, dear, rounds=1)
    for code, name in enumerate(COMPRESSIONS):
        if (mine := traces.compressions == name).any():
            reached = replay(policy, traces.take(mine), dear, (0, 0)).throughput
            assert policy.fitted["rate"][code] == pytest.approx(reached, rel=0.01)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> TraceDataset:
    folder = tmp_path_factory.mktemp("tune") / "traces"
    return write_dataset(folder, make_sequences(prompts=12, compressions=["bf16"], budget=16), budget=16)


def tune(dataset, tmp_path, *more: str):
    make_costs().save(tmp_path / "costs.json")
    command = ["tune", *more, "--traces", str(dataset.path), "--costs", str(tmp_path / "costs.json"), "--folds", "3"]
    return CliRunner().invoke(main, command)


def test_the_command_prints_and_writes_the_fastest(dataset, tmp_path):
    out = tmp_path / "preset.json"
    done = tune(dataset, tmp_path, "confidence:cap=6", "--grid", "threshold=0.1;0.9", "--out", str(out))
    assert done.exit_code == 0, done.output
    preset = json.loads(out.read_text())
    assert set(preset["tried"]) == {"confidence:cap=6,threshold=0.1", "confidence:cap=6,threshold=0.9"}
    best = max(preset["tried"], key=preset["tried"].get)
    assert preset["policy"] == "confidence" and make_policy(best).get_params() == preset["params"]
    assert set(preset["held_out"]) == {best, "confidence:cap=6", "best-fixed"}
    gain = preset["held_out"][best] / preset["held_out"]["confidence:cap=6"] - 1
    assert f"{best}: {gain:+.1%} against confidence:cap=6, " in done.output and "on held-out prompts" in done.output
    assert (
        f"play it as confidence@{out}\n" in done.output
        and make_policy(f"confidence@{out}").get_params() == preset["params"]
    )
    traces = dataset.load()
    assert set(preset["prompts"]) == set(traces.ids[folds_of(traces, preset["folds"], preset["seed"]) > 0])
    again = tune(dataset, tmp_path, "confidence:cap=6", "--grid", "threshold=0.1;0.9", "--out", str(out))
    assert again.exit_code == 2 and "exists already" in again.output and json.loads(out.read_text()) == preset


@pytest.mark.parametrize("spec", ["fixed", "ucb1"])
def test_a_policy_without_fit_is_tuned_by_replay(dataset, tmp_path, spec):
    grid = {"fixed": "gamma=0;4", "ucb1": "gammas=[0];[4]"}[spec]
    out = tmp_path / "preset.json"
    done = tune(dataset, tmp_path, spec, "--grid", grid, "--out", str(out))
    assert done.exit_code == 0, done.output
    traces = dataset.load()
    learned = traces.take(folds_of(traces, 3, 0) > 0)
    speeds = [replay(make_policy(f"fixed:gamma={gamma}"), learned, make_costs(), (0, 0)).throughput for gamma in (0, 4)]
    tried = list(json.loads(out.read_text())["tried"].values())
    assert tried == pytest.approx(speeds, rel=0.01) and speeds[0] != pytest.approx(speeds[1], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hazard", "--grid", "regularisation"], "not of the form PARAMETER=VALUE"),
        (["fixed", "--grid", "gamma=2", "--grid", "gamma=4"], "policy 'fixed' is given gamma twice"),
        (["hazard", "--grid", "strength=1;2"], "has no parameter 'strength'"),
        (["perfect-judge", "--grid", "cap=1;2"], "is a bound that knows the future"),
        (["explore", "--grid", "epsilon=0.1;0.2"], "draws lots for the sake of a log"),
    ],
)
def test_what_can_not_be_tuned_is_refused_in_one_line(dataset, tmp_path, arguments, message):
    done = tune(dataset, tmp_path, *arguments, "--out", str(tmp_path / "preset.json"))
    assert done.exit_code == 2 and message in done.output and done.output.count("\n") == 1
    assert not (tmp_path / "preset.json").exists()


def test_a_preset_is_not_overwritten(dataset, tmp_path):
    out = tmp_path / "preset.json"
    out.write_text("precious")
    done = tune(dataset, tmp_path, "confidence", "--grid", "threshold=0.1;0.9", "--out", str(out))
    assert done.exit_code == 2 and "preset.json: exists already" in done.output and out.read_text() == "precious"


def test_a_preset_goes_where_every_command_finds_it(dataset, tmp_path):
    """NAME@FILE ends at the first colon."""
    done = tune(dataset, tmp_path, "confidence", "--grid", "threshold=0.1;0.9", "--out", str(tmp_path / "a:b.json"))
    assert done.exit_code == 2 and "a:b.json: has a colon" in done.output and done.output.count("\n") == 1
