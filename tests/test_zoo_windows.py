"""Schedules of gamma, against decisions made by hand."""

import math

import numpy as np
import pytest

from speckv.features import Features
from speckv.plugins import make_policy
from speckv.policy import Outcome

from .zoo_by_hand import Rule, by_hand, played


def schedule(spec: str, *accepted: int, seconds=None) -> list[int]:
    """Gammas when each step has that many accepted tokens, or as many as were drafted."""
    policy = make_policy(spec)
    state, seen = policy.new_state(1), []
    features = Features({"compression": np.zeros(1)}, 1, "before")
    for number, count in enumerate(accepted):
        gamma = int(np.broadcast_to(policy.choose_gamma(features, state), 1)[0])
        seen.append(gamma)
        duration = 1.0 if seconds is None else seconds[number]
        policy.observe(Outcome(np.array([gamma]), np.array([min(count, gamma)]), np.array([duration])), state)
    return seen


def test_gammatune_by_numbers():
    # 3 full -> 5 full -> 7 full -> 9 full -> 10 at most; 2 of 10: 0.7 * 3 + 0.3 * 2 = 2.7 -> 3; 0: 1.89 -> 2;
    # 0: 1.323 -> 2; 0: 0.9261 -> 1; 0: 0.648 -> 1; full: 1 + 2 = 3
    assert schedule("gammatune", 3, 5, 7, 9, 2, 0, 0, 0, 0, 1, 0) == [3, 5, 7, 9, 10, 3, 2, 2, 1, 1, 3]
    # 0.7 * 3 + 0.3 * 3 is 3, whatever floating point makes of it
    assert schedule("gammatune", 3, 3, 3) == [3, 5, 3]


class GammaTune(Rule):
    def start(self, compression):
        self.mean, self.next = 3.0, 3

    def gamma(self):
        return self.next

    def observe(self, drafted, accepted, seconds):
        if accepted == drafted:
            self.next = accepted + 2
        else:
            self.mean = 0.7 * self.mean + 0.3 * accepted
            self.next = math.ceil(round(self.mean, 9))
        self.next = min(max(self.next, 1), 10)


class DraftWindow(Rule):
    def start(self, compression):
        self.mean, self.idle = 4.0, 0

    def gamma(self):
        if self.mean < 0.3:
            return 2 if self.idle == 15 else 0
        return min(math.ceil(round(self.mean, 9)), 16)

    def observe(self, drafted, accepted, seconds):
        if drafted == 0:
            self.idle += 1
            return
        self.idle = 0
        count = accepted + 1 if accepted == drafted else accepted
        self.mean += (1.3 if count > self.mean else 0.65) * (count - self.mean)
        self.mean = min(max(self.mean, 0.0), 16.0)


def test_draft_window_by_numbers():
    # 4 full: 4 + 1.3 * (5 - 4) = 5.3; 0: 5.3 * 0.35 = 1.855; 0: 0.649; 0: 0.227 < 0.3: 15 steps without a draft,
    # then 2 tokens; 0 of them: 0.0795, and 15 steps again; both: 0.0795 + 1.3 * (3 - 0.0795) = 3.876
    pause = [0] * 15
    seen = schedule("draft-window", 4, 0, 0, 0, *pause, 0, *pause, 2, 0)
    assert seen == [4, 6, 2, 1, *pause, 2, *pause, 2, 4]


def test_hill_climb_by_numbers():
    # At gamma 1 all is accepted, 2 tokens in 1 s: 2 is tried. 3 in 1 s: 2 + (3 - 2) / 4 = 2.25, kept. 3 in 4/3 s:
    # 2.25 again, and 3 is tried. 4 in 4 s: 2.25 + (1 - 2.25) / 4 = 1.9375, 86 % of 2.25, undecided; once more:
    # 1.703, 76 %, rejected.
    seen = schedule("hill-climb", 1, 2, 2, 3, 3, 2, seconds=[1, 1, 4 / 3, 4, 4, 1])
    assert seen == [1, 2, 2, 3, 3, 2]
    # From gamma 2, nothing accepted: 1, then 0.75, 0.5625, 0.42: below 0.5 a token fewer is tried.
    assert schedule("hill-climb:smallest=1,largest=2", 1, 2, 0, 0, 0, 0)[-1] == 1


class HillClimb(Rule):
    smallest, largest = 1, 16

    def start(self, compression):
        self.width, self.trial = self.smallest, 0
        self.acceptance = self.speed = None

    def gamma(self):
        return self.width + self.trial

    def observe(self, drafted, accepted, seconds):
        if drafted < self.width + self.trial:
            self.trial = 0
            return
        rate, speed = accepted / drafted, (accepted + 1) / seconds
        first = self.acceptance is None
        self.acceptance = rate if first else self.acceptance + 0.25 * (rate - self.acceptance)
        self.speed = speed if first else self.speed + 0.25 * (speed - self.speed)
        if self.trial:
            if self.speed >= 0.97 * self.before:
                self.width, self.trial = self.width + self.trial, 0
            elif self.speed < 0.8 * self.before:
                self.speed, self.trial = self.before, 0
        else:
            self.before = self.speed
            if self.acceptance >= 0.75 and self.width < self.largest:
                self.trial = 1
            elif self.acceptance < 0.5 and self.width > self.smallest:
                self.trial = -1


class Tiers(Rule):
    """One mean and one tier for each compression, over all sequences."""

    tiers = (1, 3, 5, 7)

    def __init__(self):
        self.all = {}

    def start(self, compression):
        self.mine = self.all.setdefault(compression, {"mean": 2.0, "tier": 1, "steps": 0})

    def gamma(self):
        return self.tiers[self.mine["tier"]]

    def observe(self, drafted, accepted, seconds):
        if drafted == 0:
            return
        mine = self.mine
        mine["mean"] = 0.8 * mine["mean"] + 0.2 * accepted
        mine["steps"] += 1
        if mine["steps"] <= 10 or (mine["steps"] - 10) % 5:
            return
        while mine["tier"] > 0 and mine["mean"] <= self.tiers[mine["tier"] - 1] - 0.75:
            mine["tier"] -= 1
        while mine["tier"] < 3 and mine["mean"] > self.tiers[mine["tier"]] - 0.5:
            mine["tier"] += 1


@pytest.mark.parametrize(
    ("name", "rule"),
    [("gammatune", GammaTune), ("draft-window", DraftWindow), ("hill-climb", HillClimb), ("tiers", Tiers)],
)
def test_schedule_on_recorded_sequences(name, rule):
    expected = by_hand(rule())
    assert played(make_policy(name)) == expected
    assert len({gamma for sequence in expected for gamma, *_ in sequence}) > 2


def test_tiers_by_numbers():
    # The mean starts at 2 and moves by a fifth to 3 a step: after 15 it is 2.96 > 2.5, and one tier up is enough,
    # since 2.96 is not above 4.5. All 5 accepted: after 5 more 5 - 2.04 * 0.8^5 = 4.33, and after 10 4.78 > 4.5.
    assert schedule("tiers", *[9] * 26) == [3] * 15 + [5] * 10 + [7]
    # Nothing is accepted: 2 * 0.8^15 = 0.07 <= 1 - 0.75
    assert schedule("tiers", *[0] * 16) == [3] * 15 + [1]
    # From 2 at gamma 7 down to 0.07: all tiers at once
    assert schedule("tiers:start=7", *[0] * 20)[-1] == 1
    # 1 of 5 each time: the mean falls from 4 towards 1, and stops at the tier 3, since 1.1 is not at most 0.25
    assert schedule("tiers:start=5", *[1] * 30)[-1] == 3


def test_what_tiers_learn_outlives_a_sequence():
    policy = make_policy("tiers")
    features = Features({"compression": np.zeros(1)}, 1, "before")
    for _ in range(2):
        state = policy.new_state(1)
        for _ in range(8):
            gamma = policy.choose_gamma(features, state)
            policy.observe(Outcome(gamma, gamma, np.ones(1)), state)
    assert policy.choose_gamma(features, policy.new_state(1)).tolist() == [5]
    assert policy.choose_gamma(Features({"compression": np.ones(1)}, 1, "before"), policy.new_state(1)).tolist() == [3]
    assert policy.forget().choose_gamma(features, policy.new_state(1)).tolist() == [3]
