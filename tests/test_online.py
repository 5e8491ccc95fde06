"""What a policy remembers of one sequence, and what it takes from one to the next, are two things."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from speckv import plugins
from speckv.comparison import REQUIRED, compare
from speckv.errors import SpecKVError
from speckv.features import Features, FeatureTracker
from speckv.plugins import make_policy
from speckv.policy import Policy, ask, select_rows
from speckv.replaying import measure_controller, replay
from speckv.saving import load_policy, save_policy
from speckv.tuning import fastest_by_compression, settle_rate

from .synthetic import dense, make_costs, make_rollouts, spelled

COLUMNS = ("sequence", "position", "gamma", "accepted", "forwards", "seconds")
COSTS = make_costs()


class Learner(Policy):
    """Remembers everything: steps of this sequence, acceptance of all, and draws a random number now and then."""

    name = "learner"
    features = ("compression", "draft_probability")

    def __init__(self, start: float = 2.0, seed: int = 0) -> None:
        super().__init__()
        self.start, self.seed = start, seed

    def new_state(self, rows):
        return {"step": np.zeros(rows, dtype=np.int64)}

    def new_memory(self):
        return {
            "smoothed": np.full(8, self.start),
            "asked": np.zeros((), dtype=np.int64),
            "outcomes": np.zeros((3, 2), dtype=np.float32),
        }

    def choose_gamma(self, features, state):
        code = features["compression"].astype(np.int64)
        luck = np.random.default_rng([self.seed, int(self.memory["asked"])]).integers(0, 2)
        return np.minimum(self.memory["smoothed"][code].astype(np.int64) + luck + (state["step"] == 0), 8)

    def keep_drafting(self, features, state):
        self.memory["asked"] = self.memory["asked"] + len(features["draft_probability"])
        return features["draft_probability"] > 0.3 + 0.1 * (self.memory["asked"] % 3)

    def observe(self, outcome, state):
        state["step"] = state["step"] + 1
        for drafted, accepted in zip(outcome.drafted, outcome.accepted, strict=True):
            self.memory["smoothed"][:] = 0.9 * self.memory["smoothed"] + 0.1 * (accepted + (accepted == drafted))
            self.memory["outcomes"][state["step"][0] % 3] = drafted, accepted


class Trained(Learner):
    """Has fitted arrays beside its memory, one of them under the same name."""

    name = "trained"

    def fit(self, traces, costs, seed=0):
        self.fitted = {"scale": np.array(costs.overhead + len(traces)), "smoothed": np.ones(2, dtype=np.float32)}
        return self.forget()


class Warm(Trained):
    """Warms its memory up on the training sequences."""

    name = "warm"

    def fit(self, traces, costs, seed=0):
        super().fit(traces, costs, seed)
        replay(self, traces, costs)
        return self


class Schedule(Policy):
    """Remembers one sequence, and nothing beyond."""

    name = "schedule"

    def new_state(self, rows):
        return {"gamma": np.full(rows, 3, dtype=np.int64)}

    def choose_gamma(self, features, state):
        return state["gamma"]

    def observe(self, outcome, state):
        state["gamma"] = np.where(outcome.accepted == outcome.drafted, np.minimum(state["gamma"] + 1, 8), 1)


@pytest.fixture
def known(monkeypatch):
    """Policies that `load_policy` finds by name."""
    find = plugins.policy_class
    own = {policy.name: policy for policy in (Learner, Trained)}
    monkeypatch.setattr("speckv.saving.policy_class", lambda name: own.get(name) or find(name))


def same_steps(one, other) -> bool:
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in COLUMNS)


def same_memory(one: Policy, other: Policy) -> bool:
    return one.memory.keys() == other.memory.keys() and all(
        array.dtype == other.memory[name].dtype and np.array_equal(array, other.memory[name])
        for name, array in one.memory.items()
    )


def test_which_policies_are_online():
    assert Learner().online and not Schedule().online
    assert Schedule().memory == {} and Schedule().forget().memory == {}
    # Parameters are there when the memory is made, although the base class was set up before them.
    assert (Learner(start=5.0).memory["smoothed"] == 5.0).all()


def test_an_online_policy_must_not_see_the_seconds_of_a_prompt():
    from speckv.live.decoder import SpeculativeDecoder

    from .live import pair_with

    with pytest.raises(SpecKVError, match=r"'learner' learns from the seconds.*decode without merge_prefill"):
        SpeculativeDecoder(*pair_with("full"), Learner(), merge_prefill=True)
    SpeculativeDecoder(*pair_with("full"), Schedule(), merge_prefill=True)


@given(order=st.permutations(range(6)))
@settings(max_examples=15, deadline=None)
def test_the_state_of_a_sequence_stays_in_it(order):
    """Of a policy that is not online each sequence is what it is alone, in whatever company."""
    traces = make_rollouts(prompts=3)
    whole = replay(Schedule(), traces.take(order), COSTS)
    for new, old in enumerate(order):
        alone = replay(Schedule(), traces.take([old]), COSTS)
        for column in COLUMNS[1:]:
            np.testing.assert_array_equal(getattr(whole, column)[whole.sequence == new], getattr(alone, column))


@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 7))
@settings(max_examples=15, deadline=None)
def test_memory_is_carried_from_each_sequence_to_the_next(seed, cut):
    """A stream of sequences replayed at once, in two parts and one by one is the same; state is new in each."""
    traces = make_rollouts(prompts=4, seed=seed, budget=20)
    at_once, in_parts, one_by_one = Learner(), Learner(), Learner()
    whole = replay(at_once, traces, COSTS)
    parts = [replay(in_parts, traces.take(range(*part)), COSTS) for part in ((cut,), (cut, 8))]
    singles = [replay(one_by_one, traces.take([row]), COSTS) for row in range(8)]
    for runs in (parts, singles):
        for column in COLUMNS[1:]:
            np.testing.assert_array_equal(
                getattr(whole, column), np.concatenate([getattr(run, column) for run in runs])
            )
    assert same_memory(at_once, in_parts) and same_memory(at_once, one_by_one)
    assert not same_memory(at_once, Learner())


def test_memory_changes_what_follows():
    traces = make_rollouts(prompts=4)
    policy = Learner()
    first, again = replay(policy, traces, COSTS), replay(policy, traces, COSTS)
    assert not same_steps(first, again)
    assert same_steps(first, replay(policy.forget(), traces, COSTS)), "forgotten is new"
    assert same_steps(first, replay(Learner(), traces, COSTS))


@given(cut=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_policy_saved_in_mid_stream_goes_on_as_if_it_had_not_been(cut, seed, tmp_path_factory):
    traces = make_rollouts(prompts=3, budget=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speckv.saving.policy_class", {"trained": Trained}.get)
        policy, path = Trained(seed=seed).fit(traces, COSTS), tmp_path_factory.mktemp("saved") / "policy"
        replay(policy, traces.take(range(cut)), COSTS)
        save_policy(policy, path)
        loaded = load_policy(path)
    assert same_memory(policy, loaded)
    assert policy.fitted.keys() == loaded.fitted.keys(), "both hold a `smoothed`, and they stay apart"
    for name, array in policy.fitted.items():
        np.testing.assert_array_equal(array, loaded.fitted[name])
        assert (array.dtype, array.shape) == (loaded.fitted[name].dtype, loaded.fitted[name].shape)
    rest = traces.take(range(cut, 6))
    assert same_steps(replay(policy, rest, COSTS), replay(loaded, rest, COSTS))
    assert same_memory(policy, loaded)


def test_saving_does_not_change_the_memory(known, tmp_path):
    policy = Learner()
    replay(policy, make_rollouts(prompts=2), COSTS)
    before = copy.deepcopy(policy)
    save_policy(policy, tmp_path / "saved")
    assert same_memory(policy, before)


def test_a_policy_saved_before_there_were_memories(known, tmp_path):
    save_policy(Trained().fit(make_rollouts(prompts=1), COSTS), tmp_path / "saved")
    arrays = load_file(tmp_path / "saved" / "policy.safetensors")
    save_file({name: a for name, a in arrays.items() if "/" not in name}, tmp_path / "saved" / "policy.safetensors")
    path = tmp_path / "saved" / "policy.json"
    value = json.loads(path.read_text())
    del value["memory"]
    path.write_text(json.dumps(value))
    loaded = load_policy(tmp_path / "saved")
    assert same_memory(loaded, Learner()) and set(loaded.fitted) == {"scale", "smoothed"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, names: arrays.pop("memory/asked"), "memory/asked"),
        (lambda arrays, names: names.remove("asked"), "it remembers .* and the installed one"),
        (lambda arrays, names: (arrays.update({"memory/new": np.zeros(2)}), names.append("new")), "it remembers"),
        (lambda arrays, names: arrays.update({"memory/smoothed": np.zeros(3)}), r"smoothed': 'float64\[3\]'"),
        (lambda arrays, names: arrays.update({"memory/asked": np.zeros(())}), r"asked': 'float64\[\]'"),
        (lambda arrays, names: names.append(["asked"]), "not a whole saved policy"),
    ],
    ids=["missing", "unlisted", "unknown", "shape", "dtype", "nonsense"],
)
def test_a_memory_that_is_not_this_policys(change, message, known, tmp_path):
    save_policy(Learner(), tmp_path / "saved")
    arrays = load_file(tmp_path / "saved" / "policy.safetensors")
    value = json.loads((tmp_path / "saved" / "policy.json").read_text())
    change(arrays, value["memory"])
    save_file(arrays, tmp_path / "saved" / "policy.safetensors")
    (tmp_path / "saved" / "policy.json").write_text(json.dumps(value))
    with pytest.raises(SpecKVError, match=message) as caught:
        load_policy(tmp_path / "saved")
    assert str(tmp_path / "saved") in str(caught.value) and "\n" not in str(caught.value)


def test_memory_does_not_grow():
    traces, policy = make_rollouts(prompts=4), Learner()
    layout = {name: (array.shape, array.dtype) for name, array in policy.memory.items()}
    for _ in range(3):
        replay(policy, traces, COSTS)
        assert {name: (array.shape, array.dtype) for name, array in policy.memory.items()} == layout


@pytest.mark.parametrize("kind", [Learner, Trained, Warm])
def test_fitting_twice_is_fitting_once(kind):
    traces = make_rollouts(prompts=3)
    once, twice = kind().fit(traces, COSTS), kind().fit(traces, COSTS)
    replay(twice, traces, COSTS)
    twice.fit(traces, COSTS)
    assert same_memory(once, twice) and same_steps(replay(once, traces, COSTS), replay(twice, traces, COSTS))
    assert same_memory(kind().fit(traces, COSTS), Learner()) == (kind is not Warm)


@pytest.mark.parametrize("kind", [Learner, Warm, lambda: make_policy("ucb1"), lambda: make_policy("thompson")])
def test_a_comparison_starts_each_fold_anew(kind):
    """Neither what the policy did before, nor the order or number of cost models, nor the processes matter."""
    traces = make_rollouts(prompts=6, budget=20)
    controller = {
        name: (0.0, 0.0) for name in (*(make_policy(label).name for label in map(_spec, REQUIRED)), kind().name)
    }
    models = [make_costs(name=name, draft=draft, controller=controller) for name, draft in (("a", 0.01), ("b", 0.03))]
    used = kind().fit(traces, COSTS)
    replay(used, traces, COSTS)

    def cells(policy, costs, jobs=1):
        others = [make_policy(_spec(label)) for label in REQUIRED]
        return {
            (c.costs, c.compression, c.policy): c for c in compare([policy, *others], traces, costs, 3, jobs=jobs).cells
        }

    expected = cells(kind(), models)
    before = copy.deepcopy(used)
    assert cells(used, models) == expected and same_memory(used, before)
    assert cells(kind(), models[::-1], jobs=2) == expected
    assert cells(kind(), models[1:]) == {key: cell for key, cell in expected.items() if key[0] == "b"}


def _spec(label: str) -> str:
    return "fixed:gamma=4" if label == "fixed-4" else label


def test_timing_and_tuning_leave_the_memory_alone():
    traces, policy = make_rollouts(prompts=3), Learner()
    replay(policy, traces, COSTS)
    before = copy.deepcopy(policy)
    assert measure_controller(policy, traces, COSTS) > (0, 0)
    assert same_memory(policy, before)
    fastest_by_compression([policy, Schedule()], traces, COSTS)
    settle_rate(policy, traces, COSTS, rounds=2)
    assert same_memory(policy, before)
    # A candidate is judged by what it does with a new memory.
    rate = [copy.deepcopy(Learner()), policy]
    for candidate in rate:
        settle_rate(candidate, traces, COSTS, rounds=2)
    np.testing.assert_array_equal(rate[0].fitted["rate"], rate[1].fitted["rate"])


class Watcher(Learner):
    """Notes what it is told and shown."""

    name = "watcher"
    features = ("running_acceptance", "compression", "draft_probability")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.acceptance: list[float] = []

    def new_memory(self):
        return super().new_memory() | {"rejections": np.zeros((), dtype=np.int64)}

    def choose_gamma(self, features, state):
        self.acceptance += features["running_acceptance"].tolist()
        return 4

    def keep_drafting(self, features, state):
        return True

    def observe(self, outcome, state):
        self.seen += zip(outcome.drafted.tolist(), outcome.accepted.tolist(), strict=True)
        self.memory["rejections"] = self.memory["rejections"] + int((outcome.accepted < outcome.drafted).sum())


@pytest.mark.parametrize("budget", [7, 30], ids=["budget", "end of the text"])
def test_the_last_step_is_no_rejection(budget):
    """A draft that is always right is accepted to the end: what is cut off there is no fault of it."""
    policy = Watcher()
    run = replay(policy, dense(spelled("1" * 7, gamma_max=4, budget=budget), budget=budget), COSTS)
    # Five tokens, then two: one drafted and the bonus where the budget ends; two drafted, the second of which ends
    # the text, and a bonus that is cut off.
    last = (1, 1) if budget == 7 else (2, 2)
    assert policy.seen == [(4, 4), last]
    assert policy.memory["rejections"] == 0
    assert policy.acceptance == [1 / 2, 5 / 6]
    assert run.tokens.tolist() == [7]


@pytest.mark.parametrize("name", ["ucb1", "exp3", "thompson", "linucb"])
@pytest.mark.parametrize("budget", [40, 70], ids=["budget", "end of the text"])
def test_the_last_step_is_no_rejection_to_a_bandit(name, budget):
    traces = dense(*[spelled("1" * 40, gamma_max=8, budget=budget)] * 4, gamma_max=8, budget=budget)
    policy = make_policy(f'{name}:gammas=[1,4,8],feedback="full"').fit(traces, COSTS)
    replay(policy, traces, COSTS)
    count, tokens = policy.memory["count"].sum(axis=0), policy.memory["tokens"].sum(axis=0)
    assert count.all()
    np.testing.assert_array_equal(tokens, count * [2, 5, 9])  # every token that was ever drafted was right


def test_ask_shows_a_part_and_writes_it_back():
    class Counting(Policy):
        name = "counting"

        def keep_drafting(self, features, state):
            state["asked"] = state["asked"] + 1
            state["table"][:, 0] = features["position"]
            return state["asked"] < 2

    state = {"asked": np.array([0, 1, 0, 5]), "table": np.zeros((4, 2))}
    rows = np.array([1, 2])
    features = Features({"position": np.array([7.0, 8.0])}, 2, "drawn")
    assert ask(Counting(), "keep_drafting", features, state, rows).tolist() == [False, True]
    assert state["asked"].tolist() == [0, 2, 1, 5]
    assert state["table"].tolist() == [[0, 0], [7, 0], [8, 0], [0, 0]]
    kept = select_rows(state, np.array([True, False, False, True]))
    assert kept["asked"].tolist() == [0, 5] and kept["table"].shape == (2, 2)
    assert select_rows(state, rows)["asked"].tolist() == [2, 1]


def test_ask_refuses_what_is_no_answer():
    class Nonsense(Policy):
        name = "nonsense"

        def draw_token(self, features, state):
            return np.ones(3, dtype=bool)

    with pytest.raises(SpecKVError, match=r"nonsense.draw_token must return one value a sequence, \(2,\)"):
        ask(Nonsense(), "draw_token", Features({}, 2, "distribution"), {}, np.arange(2))


def test_batch_size_is_what_the_host_says():
    codes = np.zeros(3, dtype=np.int64)
    tracker = FeatureTracker(["batch_size"], codes + 5, codes, codes / 2, batch_size=3)
    assert tracker.before(3)["batch_size"].tolist() == [3, 3, 3]
    assert tracker.token(1, {}, np.array([2]), "drawn")["batch_size"].tolist() == [3]
    tracker.select(np.array([True, False, True]))
    assert tracker.before(2)["batch_size"].tolist() == [3, 3]
    tracker.batch_size = 2
    assert tracker.before(2)["batch_size"].tolist() == [2, 2]
    assert FeatureTracker(["batch_size"], codes, codes, codes / 2).before(3)["batch_size"].tolist() == [1, 1, 1]
