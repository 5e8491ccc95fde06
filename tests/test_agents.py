"""Agents: they learn what can be learned, what they decide in replay and live is what they decided in training, and a
training that is killed goes on."""

import copy
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from speckv.cli import main
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.plugins import make_policy, register_environments
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.saving import load_policy, save_policy
from speckv.traces import arrays_of
from speckv.training import Checkpoint, TrainedPolicy, Watch, identify
from speckv_policies.agents import Agent, Ltd, PpoStop, best_actions, scaled
from speckv_policies.fixed import BestFixed, Fixed

from .synthetic import dense, make_costs, make_rollouts, make_sequences, spelled, write_dataset

BEFORE = ("dqn", "ppo", "contextual-bandit")
INSIDE = ("dqn-stop", "ppo-stop", "ltd")
COSTS = make_costs(draft=0.02)
TRACES = make_rollouts(prompts=9, budget=40)
FEW = 1280


def small(name: str, **changed) -> Agent:
    """An agent that trains for a moment only."""
    policy = make_policy(name)
    return type(policy)(**policy.get_params() | {"steps": FEW, "hidden": 16} | changed)


@pytest.fixture(scope="module", params=[*BEFORE, *INSIDE])
def agent(request) -> Agent:
    return small(request.param).fit(TRACES, COSTS)


def test_they_are_all_here():
    from speckv.plugins import registry

    found = {name for name, entry in registry().policies.items() if issubclass(entry.value, TrainedPolicy)}
    assert found == {*BEFORE, *INSIDE}


# Learning


@pytest.mark.parametrize("algorithm", ["DQN", "PPO"])
@pytest.mark.slow
def test_a_learner_solves_identity(algorithm):
    from speckv_policies.learning import Lockstep, make_learner, network

    register_environments()
    envs = gymnasium.make_vec("speckv/Identity-v0", num_envs=64, autoreset_mode="SameStep")
    nothing, one = np.zeros(9, np.float32), np.ones(9, np.float32)
    lockstep = Lockstep(envs, list(range(9)), nothing, one)
    learner = make_learner(algorithm, lockstep, seed=0, steps=12_800)
    before = network(learner)
    for _ in range(3 if algorithm == "PPO" else 1):
        learner.learn(12_800, log_interval=10**9, reset_num_timesteps=False)
    shown = scaled(np.eye(9, dtype=np.float32), nothing, one)
    assert best_actions(network(learner), shown).tolist() == list(range(9))
    assert best_actions(before, shown).tolist() != list(range(9))


def test_ppo_learns_as_long_as_it_is_told():
    from speckv_policies.learning import Lockstep, make_learner

    register_environments()
    envs = gymnasium.make_vec("speckv/Identity-v0", num_envs=64, autoreset_mode="SameStep")
    lockstep = Lockstep(envs, list(range(9)), np.zeros(9, np.float32), np.ones(9, np.float32))
    learner = make_learner("PPO", lockstep, seed=0, steps=400)
    learner.learn(400, log_interval=10**9)
    assert 400 <= learner.num_timesteps < 400 + 2 * 64


def obvious(right: str):
    """A recording and costs that call for one gamma, and signals that tell nothing more.

    The draft is always right, never, or at random in seven of ten cases; its signals are the same everywhere.
    """
    rng = np.random.default_rng(0)
    chance = {"always": 1.0, "never": 0.0, "mostly": 0.7}[right]
    texts = ["".join("01"[int(draw < chance)] for draw in rng.random(40)) for _ in range(24)]
    sequences = [spelled(text, gamma_max=8, prompt=5 + number) for number, text in enumerate(texts)]
    return dense(*sequences, gamma_max=8), make_costs(draft=0.02, stair=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BEFORE, *INSIDE])
@pytest.mark.parametrize("right", ["always", "never", "mostly"])
def test_an_agent_finds_an_obvious_gamma(name, right):
    if (name, right) == ("ltd", "mostly"):
        pytest.skip("its reward is another one; see the next test")
    traces, costs = obvious(right)
    agent = small(name, steps=25_600).fit(traces, costs)
    best = replay(BestFixed().fit(traces, costs), traces, costs).throughput
    others = [replay(Fixed(gamma), traces, costs).throughput for gamma in (0, 4, 8)]
    assert best > 1.1 * min(others), "any gamma would do here"
    assert replay(agent, traces, costs).throughput >= 0.98 * best


@pytest.mark.slow
def test_ltd_finds_the_best_of_its_own_reward():
    """Which leaves out the token that each step commits besides, and therefore calls for longer drafts."""
    traces, costs = obvious("mostly")
    runs = [replay(policy, traces, costs) for policy in (small("ltd", steps=25_600).fit(traces, costs), Fixed(1))]
    rewards = [float((run.accepted / run.seconds).mean()) for run in runs]
    fixed = [replay(Fixed(gamma), traces, costs) for gamma in range(9)]
    assert rewards[0] >= 0.95 * max(float((run.accepted / run.seconds).mean()) for run in fixed)
    assert rewards[0] > rewards[1] and runs[0].gamma.mean() > runs[1].gamma.mean()


def test_the_same_seed_gives_the_same_agent_and_leaves_other_random_numbers_alone():
    np.random.seed(7)
    expected = np.random.RandomState(7).random(3)
    one, other, another = (small("ppo").fit(TRACES, COSTS, seed) for seed in (1, 1, 2))
    assert np.array_equal(np.random.random(3), expected)
    assert one.fitted.keys() == other.fitted.keys()
    assert all(np.array_equal(array, other.fitted[name]) for name, array in one.fitted.items())
    assert not np.array_equal(one.fitted["weight_0"], another.fitted["weight_0"])


# Deciding


def test_the_agent_in_its_environment_and_the_policy_in_a_replay_decide_the_same(agent):
    """Step for step: the environment is played with the network of stable-baselines3, put together again from what the
    policy keeps."""
    import torch

    register_environments()
    layers = sorted(name for name in agent.fitted if name.startswith("weight_"))
    modules = []
    for index in range(len(layers)):
        weight, bias = agent.fitted[f"weight_{index}"], agent.fitted[f"bias_{index}"]
        modules += [torch.nn.Linear(*weight.shape), torch.nn.ReLU()]
        modules[-2].load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
    network = torch.nn.Sequential(*modules[:-1])
    run = replay(agent, TRACES, COSTS)
    envs = gymnasium.make_vec(
        agent.environment, num_envs=len(TRACES), traces=TRACES, costs=COSTS, reward=agent.reward,
        autoreset_mode="SameStep", **agent.arguments,
    )  # fmt: skip
    columns = [envs.unwrapped.names.index(name) for name in agent.layout.names]
    observations, _ = envs.reset(options={"sequence": np.arange(len(TRACES))})
    steps, going = [[] for _ in range(len(TRACES))], np.ones(len(TRACES), dtype=bool)
    while going.any():
        shown = scaled(observations[:, columns], agent.fitted["center"], agent.fitted["scale"])
        with torch.no_grad():
            actions = network(torch.from_numpy(shown)).argmax(dim=1).numpy()
        observations, _, terminated, _, info = envs.step(actions)
        for row in np.flatnonzero(going):
            if info["committed"][row]:
                steps[row].append((info["gamma"][row], info["accepted"][row], info["seconds"][row]))
        going &= ~terminated
    for row, expected in enumerate(steps):
        mine = run.sequence == row
        assert list(zip(run.gamma[mine], run.accepted[mine], run.seconds[mine], strict=True)) == expected


def test_a_trained_agent_is_saved_and_needs_neither_torch_nor_stable_baselines(agent, tmp_path):
    save_policy(agent, tmp_path / "agent")
    write_dataset(tmp_path / "traces", make_sequences(prompts=9, budget=40))
    COSTS.save(tmp_path / "costs.json")
    program = f"""
import sys
sys.modules["torch"] = sys.modules["stable_baselines3"] = sys.modules["speckv_policies.learning"] = None
from speckv import CostModel, replay
from speckv.saving import load_policy
from speckv.traces import TraceDataset
policy = load_policy({str(tmp_path / "agent")!r})
run = replay(policy, TraceDataset({str(tmp_path / "traces")!r}), CostModel.load({str(tmp_path / "costs.json")!r}))
print(run.gamma.tolist())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout)) == sorted(replay(agent, TRACES, COSTS).gamma.tolist())


def shown(when: str, **values) -> Features:
    return Features({name: np.array([float(value)]) for name, value in values.items()}, 1, when)


def by_hand(weights: dict[str, float], bias: float) -> dict[str, np.ndarray]:
    """A network whose `go` exceeds its `stop` by what is above `bias` in a weighted sum of log1p(feature)."""
    column = np.array([[weights.get(name, 0.0)] for name in Ltd().layout.names], dtype=np.float32)
    width = len(column)
    return {
        "center": np.zeros(width, np.float32),
        "scale": np.ones(width, np.float32),
        "weight_0": column,
        "bias_0": np.zeros(1, np.float32),
        "weight_1": np.array([[0.0, 1.0]], np.float32),
        "bias_1": np.array([bias, 0.0], np.float32),
    }


@pytest.mark.parametrize(
    ("index", "top1", "goes_on"),
    # go = max(0, 2 ln(1 + top1) - 0.5 ln(1 + index)), stop = 0.3
    [(1, 0.9, True), (1, 0.3, False), (3, 0.9, True), (3, 0.6, False), (8, 0.9, False)],
)
def test_ltd_with_given_weights(index, top1, goes_on):
    expected = max(0.0, 2 * np.log(1 + top1) - 0.5 * np.log(1 + index)) > 0.3
    assert expected == goes_on, "the example itself"
    ltd = Ltd()
    ltd.fitted = by_hand({"draft_top1": 2.0, "draft_index": -0.5}, 0.3)
    token = {"draft_index": index, "draft_top1": top1, "draft_top2": 0.05, "draft_top10": 1.0}
    assert ltd.keep_drafting(shown("drawn", context_length=40, **token), {}).tolist() == [goes_on]


def test_ltd_decides_whether_to_draft_at_all_from_the_length():
    ltd = Ltd()
    ltd.fitted = by_hand({"context_length": 1.0}, float(np.log(101)) + 1e-3)
    assert ltd.choose_gamma(shown("before", context_length=100), {}).tolist() == [0]
    assert ltd.choose_gamma(shown("before", context_length=110), {}).tolist() == [np.iinfo(np.int64).max]


def test_ltd_never_sees_the_drawn_token():
    assert "draft_probability" in PpoStop.features and "draft_probability" not in Ltd.features


# Checkpoints


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["ppo", "dqn-stop"])
def test_a_training_that_was_stopped_comes_to_the_same_agent(name, tmp_path):
    file = tmp_path / "checkpoint.safetensors"

    def stop(done, total):
        if done > 0.45 * total:
            raise Stop

    with pytest.raises(Stop):
        small(name).train(TRACES, COSTS, 0, Watch(file, progress=stop))
    seen = []
    resumed = small(name).train(TRACES, COSTS, 0, Watch(file, progress=lambda done, total: seen.append(done / total)))
    assert 0.4 < seen[0] < 0.6 and seen[-1] == 1
    whole = small(name).fit(TRACES, COSTS, 0)
    assert resumed.fitted.keys() == whole.fitted.keys()
    assert all(np.array_equal(array, whole.fitted[key]) for key, array in resumed.fitted.items())


def test_the_rate_rises_to_what_the_agent_reaches(tmp_path):
    """What `reward="average"` subtracts is at least the throughput of the best fixed gamma, for each compression."""
    file = tmp_path / "checkpoint.safetensors"
    small("ppo", steps=6400).train(TRACES, COSTS, 0, Watch(file))
    run = replay(BestFixed().fit(TRACES, COSTS), TRACES, COSTS)
    rate = load_file(file)["rate"]
    for code, name in ((1, "bf16"), (4, "nf4")):
        mask = TRACES.compressions == name
        assert rate[code] >= run.tokens[mask].sum() / run.sequence_seconds[mask].sum() * (1 - 1e-12)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    policy, file = small("ppo"), tmp_path / "checkpoint.safetensors"
    watch = Watch(file)
    assert watch.last({}) is None
    watch.keep(identify(policy, TRACES, COSTS, 0), Checkpoint({"a": np.arange(3)}, {"rounds": 2}))
    found = watch.last(identify(policy, TRACES, COSTS, 0))
    assert found.facts == {"rounds": 2} and found.arrays["a"].tolist() == [0, 1, 2]
    others = {
        "seed": identify(policy, TRACES, COSTS, 1),
        "policy": identify(small("ppo", hidden=8), TRACES, COSTS, 0),
        "traces": identify(policy, TRACES.take(range(5)), COSTS, 0),
        "costs": identify(policy, TRACES, make_costs(draft=0.03), 0),
    }
    for name, training in others.items():
        with pytest.raises(SpecKVError, match=f"is of another training: {name} is"):
            watch.last(training)


def test_any_other_array_is_another_recording():
    before = identify(small("ppo"), TRACES, COSTS, 0)["traces"]
    for name, array in arrays_of(TRACES):
        field, _, signal = name.partition(" ")
        other = array + 1 if array.dtype.kind in "if" else np.char.add(array, "x")
        value = getattr(TRACES, field) | {signal: other} if signal else other
        changed = dataclasses.replace(TRACES, **{field: value})
        assert identify(small("ppo"), changed, COSTS, 0)["traces"] != before, name


@pytest.mark.parametrize("damage", ["cut", "text", "foreign", "list"])
def test_a_damaged_checkpoint_is_one_line(damage, tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    Watch(file).keep({}, Checkpoint({"a": np.arange(100)}, {}))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-20])
    elif damage == "text":
        file.write_text("not a checkpoint")
    elif damage == "list":
        save_file({"a": np.arange(3)}, file, {"format": "speckv-checkpoint", "training": "[]", "facts": "{}"})
    else:
        save_file({"a": np.arange(3)}, file)
    with pytest.raises(SpecKVError, match="is not a checkpoint") as caught:
        Watch(file).last({"seed": "0"})
    assert "\n" not in str(caught.value)


# Without the extra


def test_training_without_the_extra_is_one_line(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "stable_baselines3" else find(name))
    with pytest.raises(SpecKVError) as caught:
        make_policy("ppo").fit(TRACES, COSTS)
    message = str(caught.value)
    assert "stable_baselines3" in message and "pip install 'speckv[rl]'" in message and "\n" not in message


def test_logging_without_tensorboard_is_one_line(files, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else find(name))
    refused(run("train", "ppo", *files, "--out", tmp_path / "x", "--log-dir", tmp_path / "logs"), "tensorboard")
    assert not list(tmp_path.iterdir())


def test_compare_leaves_out_what_they_cannot_train(monkeypatch):
    from speckv.cli.comparing import _policies

    agents = {*BEFORE, *INSIDE}

    def joining(train):
        policies, left_out = _policies((), 8, train)
        names = {policy.name for policy in policies}
        assert not names & {name for of_reason in left_out.values() for name in of_reason}
        return names

    agents = {*BEFORE, *INSIDE}
    assert agents <= joining(train=True) and not agents & joining(train=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "hazard" in joining(train=True) and not agents & joining(train=True)


# The command


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    write_dataset(folder / "traces", make_sequences(prompts=10, budget=30), budget=30)
    COSTS.save(folder / "costs.json")
    return ["--traces", str(folder / "traces"), "--costs", str(folder / "costs.json")]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result, *parts):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("speckv: error: ") and result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_train_saves_an_agent_with_its_prompts(files, tmp_path):
    out = tmp_path / "agent"
    done = run("train", "ppo:hidden=16", *files, "--out", out, "--steps", FEW, "--log-dir", tmp_path / "logs")
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in out.iterdir()) == ["policy.json", "policy.safetensors", "training.json"]
    assert load_policy(out).steps == FEW
    about = json.loads((out / "training.json").read_text())
    assert len(about["prompts"]) == 8 and about["costs"] == "toy"
    assert "trained on 8 prompts" in done.stdout and "against the best fixed gamma" in done.stdout
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    refused(run("train", "ppo", *files, "--out", out), "holds a policy already")


def test_train_fits_what_is_fitted_in_one_go(files, tmp_path):
    assert run("train", "confidence", *files, "--out", tmp_path / "all", "--folds", 1).exit_code == 0
    assert len(json.loads((tmp_path / "all" / "training.json").read_text())["prompts"]) == 10
    assert load_policy(tmp_path / "all").fitted
    refused(run("train", "fixed", *files, "--out", tmp_path / "x"), "learns nothing")
    refused(run("train", "perfect-judge", *files, "--out", tmp_path / "x"), "is a bound")
    refused(run("train", "explore", *files, "--out", tmp_path / "x"), "draws lots for the sake of a log")
    (tmp_path / "file").touch()
    refused(run("train", "confidence", *files, "--out", tmp_path / "file" / "x"), "cannot be written")
    refused(run("train", "confidence", *files, "--out", tmp_path / "x", "--steps", 5), "in one go")
    refused(run("train", "confidence", *files, "--out", tmp_path / "x", "--log-dir", tmp_path / "logs"), "in one go")
    refused(run("train", "ppo", *files, "--out", tmp_path / "x", "--resume"), "no training to go on with")
    assert not (tmp_path / "x").exists()


def test_what_fails_in_training_is_one_line(files, tmp_path, monkeypatch):
    def fit(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("speckv_policies.hazard.Hazard.fit", fit)
    message = "policy 'hazard' fails: ZeroDivisionError: oops"
    refused(run("train", "hazard", *files, "--out", tmp_path / "x"), message)
    refused(run("tune", "hazard", "--grid", "regularisation=1", *files), message)


class Warm(Policy):
    """Plays what it remembers, and remembers from its training what to play."""

    name = "warm"

    def new_memory(self):
        return {"gamma": np.zeros(1), "steps": np.zeros(1)}

    def fit(self, traces, costs, seed=0):
        self.fitted = {"gamma": np.full(1, 3.0)}
        self.memory = {"gamma": np.full(1, 3.0), "steps": np.zeros(1)}
        return self

    def choose_gamma(self, features, state):
        return int(self.memory["gamma"][0])

    def observe(self, outcome, state):
        self.memory["steps"] += 1


def test_train_plays_from_the_memory_that_the_fit_left(capsys):
    from speckv.cli.training import _report

    policy, costs = Warm().fit(TRACES, COSTS), make_costs(draft=0.02, controller={"warm": (0, 0), "best-fixed": (0, 0)})
    _report(policy, TRACES, TRACES, costs)
    told = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    run = replay(Fixed(3), TRACES, costs)
    of_each = [TRACES.compressions == name for name in np.unique(TRACES.compressions)]
    expected = [run.tokens[mine].sum() / run.sequence_seconds[mine].sum() for mine in of_each]
    assert told == pytest.approx(expected, rel=0.01) and policy.memory["steps"] == 0


@pytest.mark.slow
def test_a_killed_training_goes_on(files, tmp_path):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = ["train", "ppo", *files, "--steps", "40000", "--out"]
    checkpoint = out / "checkpoint.safetensors"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", "from speckv.cli import main; main()", *arguments, str(out)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not checkpoint.exists():
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the training has not begun"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    assert not (out / "policy.json").exists(), "the process was killed too late to test anything"
    refused(run(*arguments, out), "add --resume")
    refused(run(*arguments, out, "--resume", "--seed", "1"), "another training: seed is 0 there, and 1 here")
    assert run(*arguments, out, "--resume").exit_code == 0 and not checkpoint.exists()
    assert run(*arguments, whole).exit_code == 0
    one, other = (load_file(folder / "policy.safetensors") for folder in (out, whole))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# Live


@pytest.mark.parametrize("name", ["ppo", pytest.param("ppo-stop", marks=pytest.mark.slow)])
def test_live_is_replay(name, small_pair, small_traces, small_costs, small_prompts):
    from speckv.live.decoder import SpeculativeDecoder
    from speckv.live.models import chat_tokens

    agent = small(name, steps=6400).fit(small_traces, small_costs)
    replayed = replay(agent, small_traces, small_costs)
    assert len(np.unique(replayed.gamma)) > 2, "a policy that always does the same tests little"
    live = SpeculativeDecoder(*small_pair, copy.deepcopy(agent), gamma_max=small_traces.gamma_max, costs=small_costs)
    prompts = {prompt.id: prompt for prompt in small_prompts}
    for row in range(0, len(small_traces), 3):
        text = chat_tokens(small_pair.target.tokenizer, prompts[small_traces.ids[row]].text)
        decoded = live.generate(text, small_traces.manifest.max_new_tokens)
        mine = replayed.sequence == row
        expected = list(zip(replayed.gamma[mine].tolist(), replayed.accepted[mine].tolist(), strict=True))
        assert [(step.gamma, step.accepted) for step in decoded.steps] == expected
