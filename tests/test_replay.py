"""Replay against a step-by-step reading of the recording, one number at a time."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.errors import SpecKVError
from speckv.features import FEATURES
from speckv.observations import BEFORE
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import measure_controller, replay
from speckv.traces import Manifest, Rollouts

from .synthetic import dense, drafted, make_costs, make_rollouts, make_sequences, spelled, step_seconds

CONTROLLER = (0.0003, 0.00011)


class Constant(Policy):
    name = "constant"

    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features, state):
        return self.gamma


class Draw(Policy):
    name = "draw"
    features = ("draft_entropy", "draft_index")

    def draw_token(self, features, state):
        return (features["draft_entropy"] < 1.0) & (features["draft_index"] < 7)


class Keep(Policy):
    name = "keep"
    features = ("draft_probability",)

    def keep_drafting(self, features, state):
        return features["draft_probability"] > 0.55


class Moody(Policy):
    """Decides everywhere and remembers everything."""

    name = "moody"
    features = ("draft_top1", "draft_probability")

    def new_state(self, rows):
        return {"gamma": np.full(rows, 3), "asked": np.zeros(rows, dtype=np.int64), "late": np.zeros(rows)}

    def choose_gamma(self, features, state):
        return state["gamma"]

    def draw_token(self, features, state):
        state["asked"] = state["asked"] + 1
        return (features["draft_top1"] > 0.3) | (state["asked"] % 5 == 0)

    def keep_drafting(self, features, state):
        return (features["draft_probability"] > 0.5) | (state["asked"] % 3 == 0)

    def observe(self, outcome, state):
        moved = np.where(outcome.accepted == outcome.drafted, state["gamma"] + 2, outcome.accepted)
        state["late"] = state["late"] + outcome.seconds
        state["gamma"] = np.where(state["late"] > 0.8, 0, np.clip(moved, 1, 7))
        state["late"] = np.where(state["late"] > 0.8, 0.0, state["late"])


class Rule:
    """What a policy above decides, for one sequence and with plain numbers."""

    asks = chooses = False

    def gamma(self):
        return 10**6

    def draw(self, signals, index):
        return True

    def keep(self, signals, index):
        return True

    def learn(self, gamma, accepted, seconds):
        pass


class ConstantRule(Rule):
    chooses = True

    def __init__(self, gamma):
        self.gamma = lambda: gamma


class DrawRule(Rule):
    asks = True

    def draw(self, signals, index):
        return signals["draft_entropy"] < 1.0 and index < 7


class KeepRule(Rule):
    asks = True

    def keep(self, signals, index):
        return signals["draft_top1"] > 0.55


class MoodyRule(Rule):
    asks = chooses = True

    def __init__(self):
        self.next, self.asked, self.late = 3, 0, 0.0

    def gamma(self):
        return self.next

    def draw(self, signals, index):
        self.asked += 1
        return signals["draft_top1"] > 0.3 or self.asked % 5 == 0

    def keep(self, signals, index):
        return signals["draft_top1"] > 0.5 or self.asked % 3 == 0

    def learn(self, gamma, accepted, seconds):
        self.late += seconds
        self.next = min(7, max(1, self.next + 2 if accepted == gamma else accepted))
        if self.late > 0.8:
            self.next, self.late = 0, 0.0


PAIRS = {
    "constant-0": (lambda: Constant(0), lambda: ConstantRule(0)),
    "constant-3": (lambda: Constant(3), lambda: ConstantRule(3)),
    "constant-8": (lambda: Constant(8), lambda: ConstantRule(8)),
    "draw": (Draw, DrawRule),
    "keep": (Keep, KeepRule),
    "moody": (Moody, MoodyRule),
}


def decode(rollout, manifest, costs, rule):
    """Decode one sequence step by step: (position, gamma, accepted, forwards, seconds) of each."""
    position, prompt, seen = 0, len(rollout.prompt_tokens), len(rollout.prompt_tokens) - 1
    steps = []
    while position < len(rollout.tokens):
        context = prompt + position  # committed tokens; the draft has seen `seen` of them
        draft = drafted(rollout, manifest, position)
        cap = min(len(draft), rule.gamma())
        gamma = forwards = decisions = 0
        while forwards < cap:
            signals = draft[forwards][1]
            forwards += 1
            # Whether to draw is asked of every token, whether to go on only where there is room for another.
            decisions += rule.asks and (not isinstance(rule, KeepRule) or forwards < cap)
            if rule.asks and not rule.draw(signals, forwards):
                break
            gamma += 1
            if rule.asks and forwards < cap and not rule.keep(signals, forwards):
                break
        accepted = 0
        while accepted < gamma and draft[accepted][0]:
            accepted += 1
        seconds = step_seconds(costs, rollout.compression, context, context - seen, forwards, gamma)
        seconds += rule.chooses * CONTROLLER[0] + decisions * CONTROLLER[1]
        rule.learn(gamma, accepted, seconds)
        steps.append((position, gamma, accepted, forwards, seconds))
        if forwards:
            seen = context + min(accepted, forwards - 1)  # the last forward's token was never fed back
        position += accepted + 1
    return steps


def check(sequences, manifest, costs, policy, rule):
    run = replay(policy(), Rollouts.from_sequences(sequences, manifest), costs, CONTROLLER)
    for row, sequence in enumerate(sequences):
        expected = np.array(decode(sequence, manifest, costs, rule()))
        mine = run.sequence == row
        got = np.column_stack([run.position, run.gamma, run.accepted, run.forwards, run.seconds])[mine]
        np.testing.assert_array_equal(got[:, :4], expected[:, :4])
        np.testing.assert_allclose(got[:, 4], expected[:, 4], rtol=1e-12)
    return run


@pytest.mark.parametrize("name", PAIRS)
def test_replay_is_step_by_step_decoding(name):
    policy, rule = PAIRS[name]
    run = check(make_sequences(prompts=9), Manifest(8, 40, {}), make_costs(), policy, rule)
    if name in {"draw", "keep", "moody"}:
        assert len(np.unique(run.gamma)) > 4
    if name in {"draw", "moody"}:
        assert (run.forwards == run.gamma + 1).any()
    if name == "moody":
        assert ((run.gamma == 0) & (run.forwards == 0)).any(), "no draft falls behind by more than two tokens"


@given(
    seed=st.integers(0, 2**32 - 1),
    gamma_max=st.integers(1, 6),
    budget=st.integers(1, 15),
    name=st.sampled_from(sorted(PAIRS)),
    draft=st.floats(0.001, 0.1),
    lag=st.floats(0, 0.1),
    growth=st.floats(0.5, 4),
)
@settings(max_examples=40, deadline=None)
def test_replay_is_step_by_step_decoding_everywhere(seed, gamma_max, budget, name, draft, lag, growth):
    sequences = make_sequences(2, ["nf4", "bf16"], gamma_max, budget, seed)
    costs = make_costs(draft=draft, lag=lag, growth=growth)
    check(sequences, Manifest(gamma_max, budget, {}), costs, *PAIRS[name])


@pytest.mark.parametrize("name", ["constant-3", "moody"])
def test_steps_cover_every_token(name):
    traces = make_rollouts(prompts=9)
    run = replay(PAIRS[name][0](), traces, make_costs())
    np.testing.assert_array_equal(run.tokens, traces.lengths)
    committed = np.bincount(run.sequence, weights=run.accepted + 1).astype(int)
    # A text that ended by itself may end inside a step: its end token is accepted, and the bonus token is cut off.
    ended = traces.lengths < traces.manifest.max_new_tokens
    assert ended.any() and not ended.all()
    np.testing.assert_array_equal(committed[~ended], traces.lengths[~ended])
    assert set(committed[ended] - traces.lengths[ended]) <= {0, 1}
    ends = run.position + run.accepted + 1
    for row in range(len(traces)):
        mine = run.sequence == row
        np.testing.assert_array_equal(run.position[mine], [0, *ends[mine][:-1]])


@given(order=st.permutations(range(8)), name=st.sampled_from(sorted(PAIRS)))
@settings(max_examples=15, deadline=None)
def test_permuting_sequences_permutes_the_replay(order, name):
    traces, costs = make_rollouts(prompts=4), make_costs()
    whole, permuted = (replay(PAIRS[name][0](), t, costs) for t in (traces, traces.take(order)))
    for new, old in enumerate(order):
        for column in ("position", "gamma", "accepted", "forwards", "seconds"):
            np.testing.assert_array_equal(
                getattr(permuted, column)[permuted.sequence == new], getattr(whole, column)[whole.sequence == old]
            )


def test_tiling_sequences_tiles_the_replay():
    traces, costs = make_rollouts(prompts=4), make_costs()
    once, thrice = (replay(Moody(), t, costs) for t in (traces, traces.take(np.tile(np.arange(8), 3))))
    for column in ("position", "gamma", "accepted", "forwards", "seconds"):
        np.testing.assert_array_equal(getattr(thrice, column), np.tile(getattr(once, column), 3))
    assert thrice.throughput == pytest.approx(once.throughput)


def test_throughput_is_the_ratio_of_the_sums():
    traces = make_rollouts(prompts=4)
    run = replay(Constant(2), traces, make_costs())
    assert run.throughput == pytest.approx(traces.lengths.sum() / run.sequence_seconds.sum())
    assert run.throughput != pytest.approx((traces.lengths / run.sequence_seconds).mean(), rel=1e-3)


def test_controller_seconds_count():
    traces, costs = make_rollouts(prompts=4), make_costs()
    free, dear = replay(Draw(), traces, costs, (0.0, 0.0)), replay(Draw(), traces, costs, (5.0, 0.25))
    assert not free.controller_seconds.any()
    np.testing.assert_allclose(dear.controller_seconds, 0.25 * dear.forwards)  # it decides nothing before the step
    np.testing.assert_allclose(dear.seconds, free.seconds + dear.controller_seconds)
    assert dear.throughput == pytest.approx(traces.lengths.sum() / (free.seconds.sum() + 0.25 * dear.forwards.sum()))
    before = replay(Constant(2), traces, costs, (5.0, 0.25)).controller_seconds
    assert (before == 5.0).all()


def test_costs_know_the_controller_of_default_parameters():
    """With others, a forest of more trees, it takes another time."""
    traces, costs = make_rollouts(prompts=4), make_costs(controller={"fixed": (0.5, 0.1)})
    assert (replay(make_policy("fixed"), traces, costs).controller_seconds == 0.5).all()
    assert not replay(make_policy("fixed:gamma=2"), traces, costs).controller_seconds.any()
    assert not replay(make_policy("none"), traces, costs).controller_seconds.any()


def test_a_replay_can_be_written_to():
    """And the recording stays as it is."""
    traces = make_rollouts(prompts=2)
    run = replay(Constant(2), traces, make_costs(), features=BEFORE)
    replayed = {name: value for name, value in vars(run).items() if isinstance(value, np.ndarray)} | run.features
    recorded = {name: value for name, value in vars(traces).items() if isinstance(value, np.ndarray)} | traces.signals
    shared = [
        (one, other)
        for one, mine in replayed.items()
        for other, theirs in recorded.items()
        if np.shares_memory(mine, theirs)
    ]
    assert not shared and len(replayed) > 11 and "lengths" in recorded


@pytest.mark.parametrize("policy", [Constant(2), Draw(), Keep(), Moody()], ids=lambda policy: policy.name)
def test_decisions_are_timed_where_there_are_some(policy):
    before, inside = measure_controller(policy, make_rollouts(prompts=2), make_costs())
    assert (before > 0) == policy.overrides("choose_gamma")
    assert (inside > 0) == (policy.overrides("draw_token") or policy.overrides("keep_drafting"))


def test_gamma_zero_is_plain_decoding():
    traces, costs = make_rollouts(prompts=4), make_costs()
    run = replay(Constant(0), traces, costs)
    assert len(run.gamma) == traces.lengths.sum()
    assert not run.gamma.any() and not run.accepted.any() and not run.forwards.any()
    row = int(run.sequence[-1])
    compression, prompt = str(traces.compressions[row]), int(traces.prompt_lengths[row])
    by_hand = [step_seconds(costs, compression, prompt + p, 1, 0, 0) for p in range(traces.lengths[row])]
    np.testing.assert_allclose(run.seconds[run.sequence == row], by_hand)


class Answers(Policy):
    """Answers whatever it is told to."""

    name = "answers"

    def __init__(self, gamma=None, draw=None, keep=None):
        super().__init__()
        self.said = {"choose_gamma": gamma, "draw_token": draw, "keep_drafting": keep}

    def overrides(self, method):
        return self.said.get(method) is not None

    def choose_gamma(self, features, state):
        return self.said["choose_gamma"](features.rows)

    def draw_token(self, features, state):
        return self.said["draw_token"](features.rows)

    def keep_drafting(self, features, state):
        return self.said["keep_drafting"](features.rows)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Answers(gamma=lambda n: -1), "answers.choose_gamma returned -1"),
        (Answers(gamma=lambda n: np.full(n, 2.0)), "answers.choose_gamma must return integers and returned float64"),
        (Answers(gamma=lambda n: np.full(n, True)), "answers.choose_gamma must return integers and returned bool"),
        (Answers(gamma=lambda n: np.full(n, np.nan)), "answers.choose_gamma must return integers"),
        (Answers(gamma=lambda n: "four"), "answers.choose_gamma must return integers"),
        (Answers(gamma=lambda n: np.full(n + 1, 2)), r"answers.choose_gamma .* returned shape \(9,\)"),
        (Answers(gamma=lambda n: np.full((n, 1), 2)), r"answers.choose_gamma .* returned shape \(8, 1\)"),
        (Answers(draw=lambda n: np.ones(n)), "answers.draw_token must return booleans and returned float64"),
        (Answers(draw=lambda n: np.ones(1, dtype=bool)), r"answers.draw_token .* returned shape \(1,\)"),
        (Answers(keep=lambda n: np.ones(n, dtype=int)), "answers.keep_drafting must return booleans"),
    ],
)
def test_an_answer_out_of_range_names_the_policy(policy, message):
    with pytest.raises(SpecKVError, match=message):
        replay(policy, make_rollouts(prompts=4), make_costs())


class Remembers(Policy):
    """Keeps how likely its draft is to stand in a state that starts as `first`, and sets it to what `change` makes."""

    name = "remembers"
    features = ("draft_top1",)

    def __init__(self, first=1.0, change=lambda chance: chance):
        super().__init__()
        self.first, self.change = first, change

    def new_state(self, rows):
        return {"chance": np.full(rows, self.first)}

    def draw_token(self, features, state):
        state["chance"] = self.change(state["chance"] * features["draft_top1"])
        return np.full(features.rows, True)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Remembers(1), r"'chance', int64 of shape \(8,\), to float64 of shape \(8,\)"),
        (Remembers(change=lambda chance: chance[:, None]), r"'chance', float64 of shape \(8,\), to float64 .*\(8, 1\)"),
        (Remembers(change=lambda chance: chance[:1]), r"'chance', float64 of shape \(8,\), to float64 .*\(1,\)"),
        (Remembers(change=lambda chance: 1.0), r"'chance', float64 of shape \(8,\), to float64 of shape \(\)"),
        (Remembers(change=lambda chance: chance.astype(str)), r"'chance', float64 of shape \(8,\), to <U32"),
    ],
)
def test_a_state_is_not_cast_behind_the_policys_back(policy, message):
    with pytest.raises(SpecKVError, match=f"remembers.draw_token changed the state {message}"):
        replay(policy, make_rollouts(prompts=4), make_costs())


def test_a_state_that_is_new_inside_the_draft_is_named():
    class Adds(Remembers):
        def draw_token(self, features, state):
            state["more"] = np.ones(features.rows)
            return True

    with pytest.raises(SpecKVError, match="changed the state 'more', which new_state did not make"):
        replay(Adds(), make_rollouts(prompts=4), make_costs())


def test_a_state_may_take_what_it_can_hold():
    traces, costs = make_rollouts(prompts=4), make_costs()
    one, other = (replay(Remembers(change=change), traces, costs) for change in (np.float64, np.float32))
    np.testing.assert_allclose(one.seconds, other.seconds)


def test_a_plain_number_answers_for_all():
    traces, costs = make_rollouts(prompts=4), make_costs()
    one, each = (replay(Answers(gamma=g), traces, costs) for g in (lambda n: 3, lambda n: np.full(n, 3)))
    np.testing.assert_array_equal(one.seconds, each.seconds)


class Reads(Policy):
    """Reads one feature at one decision."""

    name = "reads"

    def __init__(self, feature, decision, declared=True):
        super().__init__()
        self.feature, self.decision = feature, decision
        self.features = (feature,) if declared else ()

    def overrides(self, method):
        return method == self.decision

    def _read(self, features, state):
        assert len(features[self.feature]) == features.rows
        return np.full(features.rows, 1) if self.decision == "choose_gamma" else np.full(features.rows, True)

    choose_gamma = draw_token = keep_drafting = _read


WHEN = {"before": 0, "distribution": 1, "drawn": 2}
DECISIONS = {"choose_gamma": 0, "draw_token": 1, "keep_drafting": 2}


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_can_be_read_once_it_exists(feature, decision):
    traces, costs = make_rollouts(prompts=2), make_costs()
    if WHEN[FEATURES[feature].when] <= DECISIONS[decision]:
        replay(Reads(feature, decision), traces, costs)
    else:
        with pytest.raises(SpecKVError, match=f"'{feature}' does not exist yet"):
            replay(Reads(feature, decision), traces, costs)


def test_a_feature_must_be_declared_and_known():
    traces, costs = make_rollouts(prompts=2), make_costs()
    with pytest.raises(SpecKVError, match="'position' was not asked for"):
        replay(Reads("position", "choose_gamma", declared=False), traces, costs)
    for declared in (True, False):
        with pytest.raises(SpecKVError, match="'tomorrow' is unknown"):
            replay(Reads("tomorrow", "choose_gamma", declared), traces, costs)


def test_features_of_a_sequence_by_hand():
    """Proposals right, right, wrong, right, wrong (two tokens of continuation), right; gamma 3 at most."""
    entropy, top1 = [0.1, 0.2, 0.9, 0.3, 0.8, 0.4, 0.5, 0.6], [0.9, 0.8, 0.3, 0.7, 0.4, 0.6, 0.5, 0.55]
    sequence = spelled(
        "11010111",
        gamma_max=3,
        prompt=5,
        draft_entropy=entropy,
        draft_top1=top1,
        off_draft_entropy=[2.0, 2.1, 1.5, 1.6],
        off_draft_top1=[0.2, 0.1, 0.35, 0.25],
        target_entropy=[1, 2, 3, 4, 5, 6, 7, 8],
        target_margin=[11, 12, 13, 14, 15, 16, 17, 18],
    )
    assert sequence.off_lengths.tolist() == [0, 0, 2, 0, 2, 0, 0, 0]

    class Script(Policy):
        name = "script"

        def new_state(self, rows):
            return {"step": np.zeros(rows, dtype=np.int64)}

        def choose_gamma(self, features, state):
            state["step"] = state["step"] + 1
            return np.array([2, 3, 0, 1])[state["step"] - 1]

    names = [name for name, feature in FEATURES.items() if feature.when == "before"]
    costs = make_costs(draft=0.01, verify=0.05, growth=1.0)
    run = replay(Script(), dense(sequence, gamma_max=3), costs, features=names)
    # Step 1 drafts two right ones and commits 3 (positions 0 to 2). Step 2 starts at 3: right, wrong, and one token
    # of the continuation; commits 2. Step 3 drafts nothing at 5. Step 4 drafts one right token at 6; commits 2.
    assert run.position.tolist() == [0, 3, 5, 6]
    assert run.gamma.tolist() == [2, 3, 0, 1]
    assert run.accepted.tolist() == [2, 1, 0, 1]
    expected = {
        "position": [0, 3, 5, 6],
        "context_length": [5, 8, 10, 11],
        "compression": [1, 1, 1, 1],
        "cost_ratio": [0.2, 0.2, 0.2, 0.2],
        "is_first": [1, 0, 0, 0],
        "last_gamma": [0, 2, 3, 0],
        "last_accepted": [0, 2, 1, 0],
        "last_mean_entropy": [0, 0.15, (0.3 + 0.8 + 1.5) / 3, (0.3 + 0.8 + 1.5) / 3],
        "last_max_entropy": [0, 0.2, 1.5, 1.5],
        "last_mean_top1": [0, 0.85, (0.7 + 0.4 + 0.35) / 3, (0.7 + 0.4 + 0.35) / 3],
        "last_min_top1": [0, 0.8, 0.35, 0.35],
        # Tried: two in step 1; in step 2 the right one and the wrong one, not the one behind it.
        "running_acceptance": [1 / 2, 3 / 4, 4 / 6, 4 / 6],
        "target_entropy": [0, 3, 5, 6],
        "target_margin": [0, 13, 15, 16],
        "batch_size": [1, 1, 1, 1],
    }
    assert expected.keys() == set(names)
    for name in names:
        np.testing.assert_allclose(run.features[name], expected[name], rtol=1e-6, err_msg=name)


def test_a_policy_cannot_change_what_it_is_shown():
    class Vandal(Policy):
        name = "vandal"
        features = ("position",)

        def choose_gamma(self, features, state):
            with contextlib.suppress(ValueError):  # a read-only array
                features["position"][:] = 1000
            return 2

    run = replay(Vandal(), make_rollouts(prompts=2), make_costs(), features=("position",))
    np.testing.assert_array_equal(run.features["position"], run.position)


def test_a_recording_at_a_compression_without_costs_is_refused():
    with pytest.raises(SpecKVError, match="'toy' has no timings for 'nf4'"):
        replay(Constant(2), make_rollouts(prompts=2), make_costs(compressions=["bf16"]))


def test_a_dataset_is_replayed_as_its_rollouts(tmp_path):
    from .synthetic import write_dataset

    dataset = write_dataset(tmp_path / "traces", make_sequences(prompts=2))
    one, other = replay(Constant(2), dataset, make_costs()), replay(Constant(2), dataset.load(), make_costs())
    for field in dataclasses.fields(one):
        if field.name != "features":
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
