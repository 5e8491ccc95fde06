"""The Gymnasium environments replay what `replay` replays, and tell the truth about it."""

import gc
import os
import re
import subprocess
import sys
import weakref

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import speckv_envs  # noqa: F401 (registers the environments)
from speckv import Policy, SpecKVError, replay
from speckv.compression import COMPRESSIONS
from speckv.features import FEATURES
from speckv.observations import BEFORE, TOKEN, Layout
from speckv.testing.environments import play
from speckv_envs.recorded import last_drafts
from speckv_envs.replay import ReplayEnv
from speckv_envs.stop import ReplayStopEnv
from speckv_policies.fixed import Fixed

from .synthetic import make_costs, make_rollouts, spelled

RECORDED = {
    "replay": ("speckv/Replay-v0", {}),
    "replay-average": ("speckv/Replay-v0", {"reward": "average", "rate": 20.0}),
    "replay-average-own-rate": ("speckv/Replay-v0", {"reward": "average"}),
    "replay-tokens": ("speckv/Replay-v0", {"reward": "tokens", "gammas": [0, 2, 4, 8]}),
    "replay-accepted": ("speckv/Replay-v0", {"reward": "accepted"}),
    "replay-probe": ("speckv/Replay-v0", {"probe": True}),
    "stop": ("speckv/ReplayStop-v0", {}),
    "stop-average": ("speckv/ReplayStop-v0", {"reward": "average", "rate": {"bf16": 20.0, "nf4": 15.0}}),
}
ENVS = [*RECORDED, "identity", "pair"]
SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


@pytest.fixture(scope="module")
def traces():
    return make_rollouts()


@pytest.fixture(scope="module")
def costs():
    return make_costs()


@pytest.fixture
def make(traces, costs, request):
    """Makes an environment by its name in `ENVS`."""

    def make(name, traces=traces, **changed):
        if name == "identity":
            return gymnasium.make("speckv/Identity-v0", **changed)
        if name == "pair":
            pair = request.getfixturevalue("small_pair")
            prompts = [prompt.text for prompt in request.getfixturevalue("small_prompts")]
            arguments = {"costs": request.getfixturevalue("small_costs"), "max_new_tokens": 12, "prompts": prompts[:4]}
            arguments |= {"target": pair.target, "draft": pair.draft}
            return gymnasium.make("speckv/ModelPair-v0", **arguments | changed)
        identifier, arguments = RECORDED[name]
        return gymnasium.make(identifier, **{"traces": traces, "costs": costs} | arguments | changed)

    return make


@pytest.fixture
def make_vec(traces, costs):
    def make_vec(name, num_envs, mode="vector_entry_point", traces=traces, **changed):
        identifier, arguments = RECORDED[name]
        arguments = {"traces": traces, "costs": costs} | arguments | changed
        return gymnasium.make_vec(identifier, num_envs=num_envs, vectorization_mode=mode, **arguments)

    return make_vec


def test_every_environment_is_tried_here(make):
    tried = {make(name).spec.id for name in ENVS}
    assert tried == {name for name in gymnasium.registry if name.startswith("speckv/")}


def test_importing_them_imports_nothing_heavy():
    program = "import sys, speckv_envs; print({'torch', 'stable_baselines3', 'scipy.stats'} & {*sys.modules})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "set()\n", done.stderr


# The environments and the replay


class Adaptive(Policy):
    """Drafts in proportion to what was accepted so far."""

    name = "adaptive"
    features = ("running_acceptance",)

    def choose_gamma(self, features, state):
        return (features["running_acceptance"] * 8).astype(int)


class Sure(Policy):
    """Goes on while the draft is sure, at most to a length that what was accepted so far suggests."""

    name = "sure"
    features = ("running_acceptance", "draft_probability", "draft_index", "target_margin")

    def choose_gamma(self, features, state):
        return np.where(features["target_margin"] > 6, 0, 100)

    def keep_drafting(self, features, state):
        return (features["draft_probability"] > 0.55) & (features["draft_index"] < 7)


class Probing(Policy):
    """Drafts one token, and as many more as its probability suggests."""

    name = "probing"
    features = ("draft_top1", "draft_index")

    def new_state(self, rows):
        return {"more": np.zeros(rows)}

    def keep_drafting(self, features, state):
        first = features["draft_index"] == 1
        state["more"] = np.where(first, np.floor(features["draft_top1"] * 7), state["more"])
        return features["draft_index"] <= state["more"]


def adaptive(see):
    return int(see["running_acceptance"] * 8)


def sure(see):
    if see["draft_index"] == 0:
        return int(not see["target_margin"] > 6)
    return int(see["draft_probability"] > np.float32(0.55) and see["draft_index"] < 7)


def probing(see):
    return int(np.floor(see["draft_top1"] * np.float64(7)))


def played(env, rule, row):
    """(gamma, accepted, forwards, seconds) of each step, and what was observed before each."""
    observation, _ = env.reset(options={"sequence": row})
    steps, seen, ended = [], [observation], False
    names = env.get_wrapper_attr("names")
    while not ended:
        action = np.int64(rule(dict(zip(names, observation, strict=True))))
        observation, _, ended, truncated, info = env.step(action)
        assert not truncated
        if info["committed"]:
            steps.append([info[name] for name in ("gamma", "accepted", "forwards", "seconds")])
            seen.append(observation)
    return np.array(steps), np.array(seen[:-1])


@pytest.mark.parametrize(
    ("name", "rule", "policy"),
    [
        *(("replay", lambda see, gamma=gamma: gamma, Fixed(gamma)) for gamma in (0, 1, 3, 8)),
        ("replay", adaptive, Adaptive()),
        ("replay-probe", probing, Probing()),
        ("replay-probe", lambda see: 3, Fixed(4)),
        ("stop", sure, Sure()),
        ("stop", lambda see: int(see["draft_index"] < 3), Fixed(3)),
        ("stop", lambda see: 1, Fixed(8)),
    ],
)
def test_an_episode_is_a_replay(make, traces, costs, name, rule, policy):
    run = replay(policy, traces, costs, features=BEFORE)
    env = make(name)
    for row in range(len(traces)):
        steps, seen = played(env, rule, row)
        mine = run.sequence == row
        np.testing.assert_array_equal(
            steps, np.stack([run.gamma, run.accepted, run.forwards, run.seconds], axis=1)[mine]
        )
        features = {name: values[mine] for name, values in run.features.items()}
        expected = Layout(BEFORE).vectors(features, mine.sum())
        # The mean of a draft's signals is summed in float32, and its last bit depends on what else is summed beside it.
        np.testing.assert_allclose(seen[:, : expected.shape[1]], expected, rtol=3e-7)


@pytest.mark.parametrize(("name", "rule", "policy"), [("replay", adaptive, Adaptive()), ("stop", sure, Sure())])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_the_vector_form_is_a_replay(make_vec, traces, costs, name, rule, policy, mode):
    run = replay(policy, traces, costs)
    count = len(traces)
    envs = make_vec(name, count, autoreset_mode=mode)
    observations, started = envs.reset(options={"sequence": np.arange(count)})
    np.testing.assert_array_equal(started["sequence"], np.arange(count))
    steps = [[] for _ in range(count)]
    going = np.ones(count, dtype=bool)
    while going.any():
        actions = [rule(dict(zip(envs.names, observation, strict=True))) for observation in observations]
        observations, _, terminated, _, info = envs.step(np.array(actions))
        for place in np.flatnonzero(going):
            told = info["final_info"] if terminated[place] and mode is SAME_STEP else info
            assert told["_gamma"][place]
            if told["committed"][place]:
                steps[place].append([told[key][place] for key in ("gamma", "accepted", "forwards", "seconds")])
        going &= ~terminated
    for row in range(count):
        expected = np.stack([run.gamma, run.accepted, run.forwards, run.seconds], axis=1)[run.sequence == row]
        np.testing.assert_array_equal(steps[row], expected)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
@pytest.mark.parametrize("name", RECORDED)
def test_the_vector_form_starts_anew_as_gymnasiums_does(make_vec, traces, name, mode):
    one = traces.take([5])  # a single sequence, so that which one is drawn does not matter
    ours = make_vec(name, 3, traces=one, autoreset_mode=mode)
    theirs = make_vec(name, 3, "sync", traces=one, vector_kwargs={"autoreset_mode": mode})
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    np.testing.assert_array_equal(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(150):
        actions = rng.integers(ours.single_action_space.n, size=3)
        (*mine, my_info), (*others, other_info) = ours.step(actions), theirs.step(actions)
        for one, two in zip(mine, others, strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)
        assert_same_info(my_info, other_info)
        ends += mine[2].sum()
    assert ends > 3


def assert_same_info(one, two):
    assert set(one) == set(two)
    for key, values in one.items():
        if isinstance(values, dict):
            assert_same_info(values, two[key])
        elif values.dtype == object:
            assert all(np.array_equal(a, b) for a, b in zip(values, two[key], strict=True))
        else:
            mask = one.get(f"_{key}", np.ones(len(values), dtype=bool))
            np.testing.assert_array_equal(values[mask], two[key][mask])


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_gymnasiums_statistics_add_up(make_vec, traces, mode):
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        make_vec("replay", 16, reward="tokens", gammas=None, autoreset_mode=mode)
    )
    envs.reset(seed=0)
    returns, started = [], []
    for _ in range(120):
        *_, info = envs.step(envs.action_space.sample())
        if "episode" in info:
            returns += info["episode"]["r"][info["_episode"]].tolist()
        if "sequence" in info:
            started += info["sequence"][info["_sequence"]].tolist()
    assert len(returns) > 30 and set(returns) <= set(traces.lengths.tolist())
    assert len(set(started)) == len(traces), "some sequence is never drawn"


def test_places_do_not_disturb_each_other(make_vec):
    """What the others do in their episodes changes nothing in one's own."""
    rng = np.random.default_rng(1)
    actions = rng.integers(9, size=(40, 8))
    seen = []
    for others in (actions, rng.integers(9, size=(40, 8))):
        envs = make_vec("replay-tokens", 8, gammas=None)
        observations, _ = envs.reset(options={"sequence": 4})
        rows = [observations[2]]
        for mine, theirs in zip(actions, others, strict=True):
            both = theirs.copy()
            both[2] = mine[2]
            observations, _, ended, *_ = envs.step(both)
            rows.append(observations[2])
            if ended[2]:
                break
        seen.append(np.array(rows))
    np.testing.assert_array_equal(*seen)


# What is written


def rows_of(page, heading):
    section = page.partition(f"## {heading}\n")[2].partition("\n    ## ")[0]
    return re.findall(r"^    \| `(\S+)` \| (.+?) \| 0 to (.+?) \|", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "names"),
    [(ReplayEnv.__doc__, [*BEFORE, *TOKEN]), (ReplayStopEnv.__doc__, TOKEN)],
    ids=["replay", "stop"],
)
def test_the_page_lists_what_is_observed(page, names):
    layout = Layout(names)
    bounds = {"max_new_tokens": 40, "gamma_max": 8, "largest": np.finfo(np.float32).max, "24 ln 2": 24 * np.log(2)}
    units = [FEATURES[name.partition("=")[0]].unit.replace("code", "0 or 1") for name in layout.names]
    table = rows_of(page, "Observation Space")
    assert [row[:2] for row in table] == list(zip(layout.names, units, strict=True))
    for row, high in zip(table, layout.largest(8, 40), strict=True):
        assert np.float32(bounds.get(row[2].strip("`"), row[2])) == high


@pytest.mark.parametrize("name", ENVS)
def test_the_page_has_all_sections(make, name):
    env = make(name).unwrapped
    page = type(env).__doc__
    titles = re.findall(r"^    ## (.+)$", page, re.MULTILINE)
    assert titles == [
        *("Description", "Action Space", "Observation Space", "Rewards", "Starting State", "Episode End"),
        *("Arguments", "Information", "Version History"),
    ]
    if name != "identity":
        assert f", ({env.observation_space.shape[0]},), float32)`" in page or "there are 25" in page
    assert len(env.names) == env.observation_space.shape[0]


def test_the_compression_is_one_hot_and_a_cost(make, traces, costs):
    env = make("replay")
    for row in range(4):
        observation, _ = env.reset(options={"sequence": row})
        see = dict(zip(env.get_wrapper_attr("names"), observation, strict=True))
        compression = traces.compressions[row]
        assert {name: see[f"compression={name}"] for name in COMPRESSIONS} == {
            name: float(name == compression) for name in COMPRESSIONS
        }
        assert see["cost_ratio"] == np.float32(costs.cost_ratio(compression))


def test_spaces_fit_other_recordings(traces):
    first, second = (make_rollouts(seed=seed, prompts=prompts) for seed, prompts in ((0, 3), (1, 5)))
    spaces = [ReplayEnv(t, make_costs(draft=d)).observation_space for t, d in ((first, 0.01), (second, 0.3))]
    assert spaces[0] == spaces[1]


# Rewards, arguments, options


def test_average_rewards_add_up(make, traces):
    env = make("replay-average")
    for row in range(6):
        episode = play(env, row, row)
        seconds = sum(info["seconds"] for info in episode.infos)
        assert sum(episode.rewards) == pytest.approx(traces.lengths[row] - 20 * seconds)


def test_the_rate_is_that_of_no_speculation(traces, costs):
    gammas = {"traces": traces, "costs": costs, "gammas": [0], "reward": "average"}
    total = [sum(play(ReplayEnv(**gammas), row, row).rewards) for row in range(len(traces))]
    assert abs(sum(total)) < 0.02 * traces.lengths.sum()
    rates = {}
    for row in range(2):
        rates[str(traces.compressions[row])] = play(ReplayEnv(**gammas), 0, row).infos[0]["rate"]
    assert rates["bf16"] > rates["nf4"], "nf4 is the slower target here"


def test_a_probe_is_paid_for_and_verified(make):
    env = make("replay-probe")
    assert env.action_space.n == 8  # 0 to 7 more than one
    for row in range(6):
        steps, seen = played(env, lambda see: 0, row)
        drafted = seen[:, env.get_wrapper_attr("names").index("draft_index")]
        np.testing.assert_array_equal(steps[:, 0], drafted)
        np.testing.assert_array_equal(steps[:, 2], drafted)
        assert drafted[:-1].all() and set(drafted) <= {0, 1}


def test_signals_of_drafted_tokens_by_hand():
    """Right, wrong, and two tokens behind; the target takes over in between."""
    top1 = [0.9, 0.3, 0.8, 0.7, 0.6]
    sequence = spelled("10111", gamma_max=4, draft_top1=top1, off_draft_top1=[0.2, 0.1])
    from speckv.traces import Manifest, Rollouts

    env = ReplayStopEnv(Rollouts.from_sequences([sequence], Manifest(4, 5, {})), make_costs())
    env.reset()
    column = env.names.index("draft_probability")
    seen = [env.step(np.int64(1)) for _ in range(4)]
    np.testing.assert_allclose([step[0][column] for step in seen], [0.9, 0.3, 0.2, 0], rtol=1e-6)
    assert [step[4]["gamma"] for step in seen] == [0, 0, 0, 4]
    assert seen[-1][4]["accepted"] == 1 and seen[-1][4]["committed"] == 2
    observation, reward, *_ = env.step(np.int64(1))
    assert reward == 0 and observation[column] == np.float32(0.8)
    observation, reward, *_, info = env.step(np.int64(0))
    assert info["gamma"] == 1 and info["committed"] == 2 and reward == 2 / info["seconds"]


@pytest.mark.parametrize("gammas", [[], [-1, 2], [0, 9], [0.5, 2.0]])
def test_gammas_that_were_not_recorded_are_refused(make, gammas):
    with pytest.raises(SpecKVError, match="gammas must be from 0 to 8"):
        make("replay", gammas=gammas)
    with pytest.raises(SpecKVError, match="gammas must be from 0 to 7"):
        make("replay-probe", gammas=gammas or [8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "speed"}, "reward 'speed' is unknown; choose one of throughput, average, tokens"),
        ({"rate": 0.0}, "rate is 0.0; it must be a positive number"),
        ({"rate": {"bf16": 3.0}}, "rate says nothing of 'nf4', only of bf16"),
    ],
)
@pytest.mark.parametrize("name", ["replay", "stop"])
def test_arguments_that_are_refused(make, name, arguments, message):
    with pytest.raises(SpecKVError, match=message):
        make(name, **arguments)


@pytest.mark.parametrize("sequence", [-1, 24, 1.0, [0, 1], "p001"])
@pytest.mark.parametrize("name", ["replay", "pair"])
def test_a_sequence_that_is_none(make, name, sequence):
    with pytest.raises(SpecKVError, match=re.escape(f"options['sequence'] is {sequence}; it must be")):
        make(name).reset(options={"sequence": sequence})


@pytest.mark.parametrize("name", ["replay", "stop", "pair"])
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (1.0, "actions are integers, and these are float64"),
        (True, "actions are integers, and these are bool"),
        ("1", "actions are integers"),
        (None, "actions are integers"),
        (np.array([1]), "one action is needed, and the shape of these is (1,)"),
    ],
)
def test_what_is_no_action(make, name, action, message):
    env = make(name).unwrapped
    env.reset(seed=0)
    with pytest.raises(SpecKVError, match=re.escape(message)):
        env.step(action)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([1, 1], "3 actions are needed, one for each environment, and the shape of these is (2,)"),
        ([1, 1, 1, 1], "the shape of these is (4,)"),
        ([[1, 1, 1]], "the shape of these is (1, 3)"),
        (1, "the shape of these is ()"),
        ([1.0, 1.0, 1.0], "actions are integers, and these are float64"),
        ([True, False, True], "actions are integers, and these are bool"),
    ],
)
@pytest.mark.parametrize("name", ["replay", "stop"])
def test_what_are_no_actions(make_vec, name, actions, message):
    envs = make_vec(name, 3)
    envs.reset(seed=0)
    with pytest.raises(SpecKVError, match=re.escape(message)):
        envs.step(np.array(actions))


@pytest.mark.parametrize("name", ["replay", "stop", "identity", "pair"])
def test_a_step_before_the_reset(make, name):
    with pytest.raises(gymnasium.error.ResetNeeded, match=re.escape("call reset() before the first step()")):
        make(name).unwrapped.step(1)


@pytest.mark.parametrize("name", ["replay", "stop"])
def test_a_step_of_the_vector_form_before_the_reset(make_vec, name):
    with pytest.raises(gymnasium.error.ResetNeeded, match=re.escape("call reset() before the first step()")):
        make_vec(name, 3).step(np.array([1, 1, 1]))


@pytest.mark.parametrize("action", [-1, 9])
def test_an_action_that_is_none(make, make_vec, action):
    single, several = make("replay").unwrapped, make_vec("replay", 3)
    single.reset(seed=0)
    several.reset(seed=0)
    with pytest.raises(SpecKVError, match=f"the action {action} is not one from 0 to 8"):
        single.step(action)
    with pytest.raises(SpecKVError, match=f"the action {action} is not one from 0 to 8"):
        several.step(np.array([0, action, 1]))


def test_a_vector_that_does_not_start_anew_is_refused(make_vec):
    with pytest.raises(ValueError, match="NEXT_STEP or SAME_STEP"):
        make_vec("replay", 2, autoreset_mode=AutoresetMode.DISABLED)


def test_the_shipped_recording_is_the_default():
    env = gymnasium.make("speckv/Replay-v0")
    assert env.action_space.n == 17
    see = dict(zip(env.get_wrapper_attr("names"), env.reset(seed=0)[0], strict=True))
    assert see["compression=bf16"] + see["compression=int8"] + see["compression=nf4"] == 1


# Identity


def test_identity_rewards_what_is_written():
    env = gymnasium.make("speckv/Identity-v0", actions=5, steps=8)
    observation, _ = env.reset(seed=0)
    for step in range(8):
        right = int(observation.argmax())
        wrong = step % 2
        observation, reward, terminated, truncated, info = env.step(np.int64((right + wrong) % 5))
        assert reward == 1 - wrong and info == {"right": right}
        assert not terminated and truncated == (step == 7)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_a_small_learner_solves_identity(mode):
    """A linear policy and the plain policy gradient."""
    envs = gymnasium.make_vec("speckv/Identity-v0", num_envs=64, actions=5, steps=8, autoreset_mode=mode)
    assert envs.spec.kwargs["vectorization_mode"] == "vector_entry_point"
    rng = np.random.default_rng(0)
    weights, correct = np.zeros((5, 5)), []
    observations, _ = envs.reset(seed=0)
    for _ in range(150):
        logits = observations @ weights
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        actions = (chances.cumsum(axis=1) > rng.random((64, 1))).argmax(axis=1)
        following, rewards, _, _, info = envs.step(actions)
        counts = info["_right"] | info.get("final_info", {}).get("_right", False)
        if counts.any():  # without, all episodes start anew
            advantage = (rewards - 0.2) * counts
            weights += 0.2 * observations.T @ ((np.eye(5)[actions] - chances) * advantage[:, None])
            correct.append(rewards[counts].mean())
        observations = following
    assert np.mean(correct[:3]) < 0.4 and np.mean(correct[-20:]) > 0.97


@pytest.mark.parametrize("arguments", [{"actions": 1}, {"steps": 1}])
def test_identity_without_a_choice_is_refused(arguments):
    with pytest.raises(ValueError, match="both must be 2 or more"):
        gymnasium.make("speckv/Identity-v0", **arguments)


# The live one


def test_the_live_one_decodes_as_the_decoder_does(make, small_pair, small_prompts):
    from speckv.live import SpeculativeDecoder

    decoder = SpeculativeDecoder(small_pair.target, small_pair.draft, Fixed(3))
    env = make("pair")
    for index in range(4):
        expected = decoder.generate(small_prompts[index].text, 12)
        steps, _ = played(env, lambda see: 3, index)
        np.testing.assert_array_equal(
            steps[:, :3], [[step.gamma, step.accepted, step.forwards] for step in expected.steps]
        )
        assert env.unwrapped._decoding.sequences[0].tokens == expected.tokens


def test_the_live_one_sees_what_a_recording_shows(make, small_traces, small_pair, small_prompts, small_costs):
    recorded = ReplayEnv(small_traces, small_costs)
    texts = [prompt.text for prompt in small_prompts]
    live = make("pair", prompts=texts, max_new_tokens=48)
    assert live.observation_space == recorded.observation_space
    rng = np.random.default_rng(0)
    for row in range(4):
        index = [prompt.id for prompt in small_prompts].index(small_traces.ids[row])
        (one, _), (two, _) = recorded.reset(options={"sequence": row}), live.reset(options={"sequence": index})
        ended = False
        while not ended:
            np.testing.assert_allclose(one, two, atol=2e-3)
            action = rng.integers(9)
            one, _, ended, _, info = recorded.step(action)
            two, _, live_ended, _, live_info = live.step(action)
            assert ended == live_ended
            for name in ("gamma", "accepted", "committed", "forwards"):
                assert info[name] == live_info[name]


def test_the_live_one_measures(make):
    episode = play(make("pair", reward="average", rate=5.0), 1)
    assert all(0 < info["seconds"] < 30 and info["rate"] == 5 for info in episode.infos)
    with pytest.raises(SpecKVError, match="no prompt"):
        make("pair", prompts=[])
    with pytest.raises(SpecKVError, match="gammas must be"):
        make("pair", gammas=[-1])


def test_drafts_are_summed_up_once_for_a_recording():
    traces = make_rollouts(prompts=2, budget=8)
    table = last_drafts(traces)
    assert last_drafts(traces) is table
    other = make_rollouts(prompts=3, budget=8)
    assert last_drafts(other).shape[1] == other.tokens.size != traces.tokens.size
    seen = weakref.ref(traces)
    del traces
    gc.collect()
    assert seen() is None, "the table keeps the recording"
