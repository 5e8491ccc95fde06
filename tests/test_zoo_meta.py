"""Policies made of others, against decisions made by hand."""

import math

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.policy import Outcome, Policy
from speckv.replaying import replay
from speckv.saving import load_policy, named_policy, save_policy

from .synthetic import dense, make_costs, seconds_of, spelled
from .zoo_by_hand import COSTS, TRACES, Rule, by_hand, played

BF16 = list(COMPRESSIONS).index("bf16")
BEFORE = Features({"compression": np.array([float(BF16)])}, 1, "before")


class TapOut(Rule):
    """Chooses the rule with the largest mean + sqrt(2 ln t / its own pulls)."""

    rules = (
        lambda s: s["draft_top1"] >= 0.6,
        lambda s: math.sqrt(0.15 * s["draft_entropy"]) <= 0.3,
        lambda s: 1 - math.sqrt(0.2 * s["draft_entropy"]) >= 0.5,
        lambda s: s["draft_top1"] - s["draft_top2"] >= 0.3,
    )

    def __init__(self):
        self.all = {}

    def start(self, compression):
        self.rewards = self.all.setdefault(compression, [[] for _ in self.rules])

    def gamma(self):
        unplayed = [arm for arm, rewards in enumerate(self.rewards) if not rewards]
        steps = sum(len(rewards) for rewards in self.rewards)

        def score(arm):
            rewards = self.rewards[arm]
            return sum(rewards) / len(rewards) + math.sqrt(2 * math.log(steps) / len(rewards))

        self.arm = unplayed[0] if unplayed else max(range(len(self.rules)), key=score)
        return 16

    def keep(self, index, signals):
        return self.rules[self.arm](signals)

    def observe(self, drafted, accepted, seconds):
        if drafted:
            self.rewards[self.arm].append(0.5 * accepted / drafted + 0.5 * accepted / 16)


def test_tapout_with_ucb1():
    rule = TapOut()
    expected = by_hand(rule)
    policy = make_policy("tapout")
    assert played(policy) == expected
    np.testing.assert_allclose(policy.memory["pulls"][BF16], [len(rewards) for rewards in rule.all["bf16"]])
    np.testing.assert_allclose(policy.memory["rewards"][BF16], [sum(rewards) for rewards in rule.all["bf16"]])
    assert policy.memory["pulls"][BF16].min() > 5


def test_tapout_explores_by_an_arms_own_pulls():
    """Equal means: the rule that was played least is next, whatever its place."""
    policy = make_policy("tapout")
    policy.memory["pulls"][BF16], policy.memory["rewards"][BF16] = [9, 9, 4, 9], [4.5, 4.5, 2, 4.5]
    state = policy.new_state(1)
    policy.choose_gamma(BEFORE, state)
    assert state["arm"].tolist() == [2]
    # 0.9 + sqrt(2 ln 1004 / 1000) = 1.02 against 0.5 + sqrt(2 ln 1004 / 4) = 2.36
    policy.memory["pulls"][BF16], policy.memory["rewards"][BF16] = [1000, 4, 4, 4], [900, 2, 1, 1]
    policy.choose_gamma(BEFORE, state)
    assert state["arm"].tolist() == [1]
    quiet = make_policy("tapout:exploration=0")
    quiet.memory = policy.memory
    quiet.choose_gamma(BEFORE, state)
    assert state["arm"].tolist() == [0]


def test_tapout_with_thompson_sampling_plays_the_better_rule_more():
    policy = make_policy('tapout:algorithm="thompson"')
    state, arms = policy.new_state(1), []
    for _ in range(400):
        policy.choose_gamma(BEFORE, state)
        arms.append(int(state["arm"][0]))
        accepted = 12 if arms[-1] == 3 else 4
        policy.observe(Outcome(np.array([16]), np.array([accepted]), np.ones(1)), state)
    assert arms[-100:].count(3) > 80 and set(arms[:30]) == {0, 1, 2, 3}
    again = make_policy('tapout:algorithm="thompson"')
    state = again.new_state(1)
    again.choose_gamma(BEFORE, state)
    assert int(state["arm"][0]) == arms[0] and int(again.memory["draws"]) == 1


def steps(policy, accepted, seconds=1.0) -> list[int]:
    """Gammas when every step has that many accepted tokens, or as many as were drafted."""
    state, seen = policy.new_state(1), []
    for count in accepted:
        gamma = int(np.broadcast_to(policy.choose_gamma(BEFORE, state), 1)[0])
        seen.append(gamma)
        duration = seconds if np.isscalar(seconds) else seconds(gamma)
        policy.observe(Outcome(np.array([gamma]), np.array([min(count, gamma)]), np.array([duration])), state)
    return seen


def test_hysteresis_by_numbers():
    """The heuristic wants 5, 7, 9, 8, 10, 9 …: a gamma stays for `dwell` steps, and for changes below `margin`."""
    accepted = [5, 7, 9, 0, 10, 0, 0, 0, 0, 0]
    plain = steps(make_policy("heuristic"), accepted)
    assert plain == [5, 7, 9, 11, 10, 12, 11, 10, 9, 8]
    one = make_policy("hysteresis:dwell=1,margin=1").fit(TRACES, COSTS)
    assert steps(one, accepted) == plain
    # What the heuristic sees is what was played: 5 full, 5 full (not 7), …
    #          wants 5  7  7  7 | 7 full: 9  9 | 0 of 7: 6 (one away), 6, 6, …
    dwell = make_policy("hysteresis:dwell=3,margin=2").fit(TRACES, COSTS)
    assert steps(dwell, [9, 9, 9, 9, 0, 0, 0, 0]) == [5, 5, 5, 7, 7, 7, 7, 7]
    assert steps(dwell, [9, 9, 9, 9, 9, 9, 9, 0]) == [5, 5, 5, 7, 7, 7, 9, 9]


def test_hysteresis_switches_less():
    def switches(policy):
        run = replay(policy.fit(TRACES, COSTS), TRACES, COSTS)
        return int(((np.diff(run.sequence) == 0) & (np.diff(run.gamma) != 0)).sum())

    assert switches(make_policy("hysteresis")) < 0.7 * switches(make_policy("heuristic"))


def test_off_switch_by_numbers():
    """Plain decoding takes 1 s a token. Six tokens of which none is accepted take 2 s: half as fast, so that after
    six steps speculation is off for 16, on for 3, and off again."""
    policy = make_policy('off-switch:policy="fixed:gamma=6"').fit(TRACES, COSTS)
    policy.fitted["off-switch.plain_seconds"][BF16] = 1.0

    def seconds(gamma):
        return 2.0 if gamma else 1.0

    off = [6] * 6 + [0] * 16 + [6] * 3 + [0] * 16
    assert steps(policy, [0] * 41, seconds) == off
    # Two tokens in 2 s are as fast as plain decoding, and stay.
    assert steps(policy, [1] * 41, seconds) == [6] * 41
    # Three steps of four tokens, then of one: 4 (0.9^5 + 0.9^4 + 0.9^3) + 0.9^2 + 0.9 + 1 = 10.61 tokens in
    # 2 (1 + 0.9 + … + 0.9^5) = 9.37 s; then 0.9 * 10.61 + 1 = 10.55 in 10.43; then 10.50 in 11.39: off.
    assert steps(policy, [3, 3, 3, 0, 0, 0, 0, 0, 0, 0], seconds) == [6] * 8 + [0] * 2


def test_off_switch_knows_the_time_of_plain_decoding():
    policy = make_policy("off-switch").fit(TRACES, COSTS)
    context = int(np.median(TRACES.prompt_lengths + TRACES.lengths // 2))
    expected = seconds_of(COSTS.verify["bf16"], 1, context) + COSTS.overhead
    assert policy.fitted["off-switch.plain_seconds"][BF16] == pytest.approx(expected)


def test_the_policy_inside_learns_from_its_own_steps_only():
    """While the switch is off, the heuristic keeps its gamma: nothing drafted is no full acceptance."""
    policy = make_policy("off-switch:patience=1,probe_every=3,probe=1").fit(TRACES, COSTS)
    policy.fitted["off-switch.plain_seconds"][BF16] = 1.0
    # 5 tokens, none accepted, 9 s: off for three steps, and on with the heuristic's next gamma, 4
    assert steps(policy, [0] * 9, 9.0) == [5, 0, 0, 0, 4, 0, 0, 0, 3]


def test_off_switch_keeps_sequences_apart():
    always, never = spelled("1" * 60, gamma_max=8), spelled("0" * 60, gamma_max=8)
    costs = make_costs(draft=0.04)
    traces = dense(always, never, gamma_max=8)
    policy = make_policy('off-switch:policy="fixed:gamma=4"').fit(traces, costs)
    run = replay(policy, traces, costs)
    assert run.gamma[run.sequence == 0].min() == 4 or run.gamma[run.sequence == 0][:-1].min() == 4
    assert run.gamma[run.sequence == 1].tolist()[:8] == [4] * 6 + [0] * 2
    alone = replay(policy, dense(never, gamma_max=8), costs)
    assert alone.gamma.tolist() == run.gamma[run.sequence == 1].tolist()


INSIDE = ["best-fixed", "svip", "p-min:p_min=0.6", "tiers", "survival-budget", "tapout"]


@pytest.mark.parametrize("inside", INSIDE)
def test_an_off_switch_that_never_switches_is_the_policy_inside(inside, tmp_path):
    wrapper = make_policy(f'off-switch:policy="{inside}",patience=1000000').fit(TRACES, COSTS)
    plain = make_policy(inside).fit(TRACES, COSTS)
    assert wrapper.online == plain.online
    assert wrapper.kind == ("both" if plain.kind != "before" else "before")
    save_policy(wrapper, tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    expected = played(plain)
    assert played(wrapper) == expected == played(loaded)
    if wrapper.online:
        assert played(wrapper) == played(plain)  # the memory of the first time included
        wrapper.forget()
        assert played(wrapper) == expected


def test_a_state_of_the_policy_inside_is_not_cast(monkeypatch):
    """Where only some of the sequences' steps were its own, what it has learned is put back row by row."""

    class Counts(Policy):
        name = "counts"

        def new_state(self, rows):
            return {"share": np.ones(rows, dtype=np.int64)}

        def choose_gamma(self, features, state):
            return 4

        def observe(self, outcome, state):
            state["share"] = outcome.accepted / 4

    monkeypatch.setattr("speckv_policies.meta.named_policy", lambda spec: Counts())
    policy = make_policy("off-switch:patience=1,probe_every=3,probe=1").fit(TRACES, COSTS)
    policy.fitted["off-switch.plain_seconds"][BF16] = 1.0
    state = policy.new_state(2)
    state["off-switch.pause"] = np.array([0, 2])
    state["off-switch.plain"] = np.zeros(2)
    with pytest.raises(SpecKVError, match=r"counts.observe changed the state 'share', int64 .* to float64"):
        policy.observe(Outcome(np.array([4, 0]), np.array([3, 0]), np.ones(2)), state)


def test_hysteresis_over_a_policy_without_a_gamma_is_refused(monkeypatch):
    class StopOnly(Policy):
        name = "stop-only"

        def keep_drafting(self, features, state):
            return False

    monkeypatch.setattr("speckv_policies.meta.named_policy", lambda spec: StopOnly())
    with pytest.raises(SpecKVError, match="chooses no gamma"):
        make_policy("hysteresis").fit(TRACES, COSTS)


def test_hysteresis_leaves_stops_inside_the_draft_alone():
    steady = make_policy('hysteresis:policy="kangaroo",dwell=1,margin=1').fit(TRACES, COSTS)
    assert played(steady) == played(make_policy("kangaroo"))
    assert steady.features == ("draft_top1",)


def test_an_unknown_policy_inside_is_named():
    with pytest.raises(SpecKVError, match="'kangarou' is unknown; did you mean 'kangaroo'"):
        make_policy('off-switch:policy="kangarou"').fit(TRACES, COSTS)


def explored(spec, steps=3000):
    """Gammas and propensities of many steps with nothing accepted, asked one at a time."""
    policy = make_policy(spec).fit(TRACES, COSTS)
    state, seen = policy.new_state(1), []
    for _ in range(steps):
        gamma = int(policy.choose_gamma(BEFORE, state)[0])
        seen.append((gamma, float(np.asarray(policy.propensity(state))[0])))
        policy.observe(Outcome(np.array([gamma]), np.array([0]), np.array([1.0])), state)
    return np.array(seen)


def test_explore_plays_what_it_says():
    gamma, chance = explored('explore:policy="fixed:gamma=3",epsilon=0.4,largest=3').T
    assert set(chance[gamma == 3].round(9)) == {0.7} and set(chance[gamma != 3].round(9)) == {0.1}
    counts = np.bincount(gamma.astype(int))
    assert abs(counts[3] / 3000 - 0.7) < 0.04 and (np.abs(counts[:3] / 3000 - 0.1) < 0.03).all()
    beyond, certain = explored('explore:policy="fixed:gamma=5",epsilon=0.25,largest=2').T
    assert set(certain[beyond == 5]) == {0.75} and set(beyond) == {0, 1, 2, 5}


def test_explore_draws_other_lots_for_the_next_text_and_the_same_for_another_process(tmp_path):
    policy = make_policy('explore:policy="fixed:gamma=4",epsilon=1').fit(TRACES, COSTS)
    first, second = played(policy), played(policy)
    assert first != second
    assert played(make_policy('explore:policy="fixed:gamma=4",epsilon=1').fit(TRACES, COSTS)) == first
    save_policy(policy, tmp_path / "saved")
    assert played(load_policy(tmp_path / "saved")) == played(policy) not in (first, second)


def test_explore_without_lots_is_the_policy_inside():
    inside = make_policy("best-fixed").fit(TRACES, COSTS)
    assert played(make_policy("explore:policy=best-fixed,epsilon=1e-9").fit(TRACES, COSTS)) == played(inside)
    online = make_policy("explore:policy=ucb1,epsilon=1e-9").fit(TRACES, COSTS)
    assert played(online) == played(make_policy("ucb1").fit(TRACES, COSTS))


def lots(policy, *features):
    """What is chosen in the first step of each of 4000 rows, and the chances that are stated."""
    policy.fit(TRACES, COSTS)
    rows = Features({name: np.repeat(BEFORE[name], 4000) for name in policy.features}, 4000, "before")
    state = policy.new_state(4000)
    chosen = np.broadcast_to(policy.choose_gamma(rows, state), 4000)
    return chosen, np.broadcast_to(policy.propensity(state), 4000)


LOTS = 'explore:policy="fixed:gamma=3",epsilon=0.5,largest=4'


@pytest.mark.parametrize("wrapper", ["hysteresis", "off-switch", "explore"])
def test_a_wrapper_states_the_chances_of_what_is_inside(wrapper):
    policy = make_policy(wrapper)
    type(policy).__init__(policy, policy=LOTS)
    chosen, chance = lots(policy)
    known = ~np.isnan(chance)
    assert 0 in chosen and known.any()
    for gamma in np.unique(chosen[known]):
        share = (chosen == gamma).mean()
        assert abs(chance[known & (chosen == gamma)].mean() - share) < 5 * np.sqrt(share / 4000)


def test_hysteresis_knows_the_chances_of_a_change_alone():
    policy = make_policy("hysteresis")
    type(policy).__init__(policy, policy=LOTS, dwell=2, margin=2)
    policy.fit(TRACES, COSTS)
    state, seen = policy.new_state(1), []
    for _ in range(200):
        held, free = int(state["hysteresis.gamma"][0]), state["hysteresis.age"][0] >= 2
        gamma = int(policy.choose_gamma(BEFORE, state)[0])
        seen.append((bool(free), gamma != held, float(policy.propensity(state)[0])))
    assert {chance for free, _, chance in seen if not free} == {1}
    assert {round(chance, 9) for free, changed, chance in seen if free and changed} <= {0.1, 0.6}
    assert all(np.isnan(chance) for free, changed, chance in seen if free and not changed)


def test_explore_refuses_what_it_could_not_give_a_chance():
    with pytest.raises(SpecKVError, match="'svip' stops inside the draft"):
        make_policy("explore:policy=svip").fit(TRACES, COSTS)


def test_a_policy_without_lots_is_certain():
    assert (replay(make_policy("heuristic"), TRACES, COSTS).propensity == 1).all()


def test_a_name_means_the_same_whatever_lies_in_the_folder_at_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_policy(make_policy("fixed:gamma=7"), tmp_path / "heuristic")
    assert make_policy("explore").inner.name == named_policy("heuristic").name == "heuristic"
    assert make_policy("explore:policy=./heuristic").inner.gamma == named_policy("./heuristic").gamma == 7
