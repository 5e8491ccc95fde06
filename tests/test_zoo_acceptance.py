"""Rules on the running acceptance, the forest, and the bound of each task, against decisions made by hand."""

import math

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.policy import Outcome
from speckv.replaying import replay
from speckv.traces import Rollouts

from .synthetic import make_costs, seconds_of
from .zoo_by_hand import COSTS, MANIFEST, SEQUENCES, TRACES, Rule, by_hand, played


def shown(**values) -> Features:
    return Features({name: np.atleast_1d(np.array(value, dtype=float)) for name, value in values.items()},
                    np.size(next(iter(values.values()))), "before")  # fmt: skip


def test_leviathan_by_numbers():
    # a = 0.8, c = 0.1: 1, 1.8 / 1.1, 2.44 / 1.2, 2.952 / 1.3, 3.3616 / 1.4, 3.68928 / 1.5, 3.9514 / 1.6 = 2.4697, …
    # = 1, 1.636, 2.033, 2.271, 2.401, 2.4595, 2.4697, 4.1611 / 1.7 = 2.4477
    # a = 0.5, c = 0.5: 1, 1.5 / 1.5: of equals the smaller; a = 0.5, c = 0.4: 1, 1.0714, 1.75 / 1.8
    policy = make_policy("leviathan")
    features = shown(running_acceptance=[0.8, 0.5, 0.5, 0.0, 1.0], cost_ratio=[0.1, 0.5, 0.4, 0.1, 0.1])
    assert policy.choose_gamma(features, {}).tolist() == [6, 0, 1, 0, 16]
    assert make_policy("leviathan:largest=3").choose_gamma(features, {}).tolist() == [3, 0, 1, 0, 3]


class Leviathan(Rule):
    def start(self, compression):
        self.accepted = self.tried = 0
        self.ratio = seconds_of(COSTS.draft, 1, 256) / seconds_of(COSTS.verify[compression], 1, 256)

    def gamma(self):
        a, c = (self.accepted + 1) / (self.tried + 2), self.ratio
        return max(range(17), key=lambda g: (1 - a ** (g + 1)) / ((1 - a) * (1 + g * c)))

    def observe(self, drafted, accepted, seconds):
        self.accepted += accepted
        self.tried += accepted + (accepted < drafted)


class Goodput(Rule):
    def __init__(self):
        self.acceptance = {}

    def start(self, compression):
        self.compression, self.idle = compression, 0
        self.acceptance.setdefault(compression, 0.7)
        context = int(np.median(TRACES.prompt_lengths + TRACES.lengths // 2))
        draft = seconds_of(COSTS.draft, 1, context)
        self.seconds = [
            gamma * draft + seconds_of(COSTS.verify[compression], gamma + 1, context)
            for gamma in range(MANIFEST.gamma_max + 1)
        ]

    def gamma(self):
        a = self.acceptance[self.compression]
        best = max(
            range(len(self.seconds)), key=lambda g: sum(a**i for i in range(g + 1)) / self.seconds[g]
        )  # fmt: skip
        return max(best, int(self.idle == 15))

    def observe(self, drafted, accepted, seconds):
        self.idle = self.idle + 1 if drafted == 0 else 0
        if drafted:
            rate = accepted / (accepted + (accepted < drafted))
            old = self.acceptance[self.compression]
            self.acceptance[self.compression] = old + 0.05 * (rate - old)


@pytest.mark.parametrize(("name", "rule"), [("leviathan", Leviathan), ("goodput", Goodput)])
def test_on_recorded_sequences(name, rule):
    expected = by_hand(rule())
    assert played(make_policy(name).fit(TRACES, COSTS)) == expected
    assert len({gamma for sequence in expected for gamma, *_ in sequence}) > 2


def test_goodput_finds_back_from_drafting_nothing():
    policy = make_policy("goodput:start=0.0,weight=0.5").fit(TRACES, COSTS)
    features, state = shown(compression=[list(COMPRESSIONS).index("bf16")]), policy.new_state(1)
    seen = []
    for _ in range(20):
        gamma = policy.choose_gamma(features, state)
        seen.append(int(gamma[0]))
        policy.observe(Outcome(gamma, gamma, np.ones(1)), state)
    # One accepted token of one: the acceptance is 0.5, and two tokens cost 0.01 + 0.05 against 1.5 expected.
    assert seen[:16] == [0] * 15 + [1] and min(seen[16:]) > 0


def test_a_cost_makes_goodput_act():
    cheap, dear = (make_policy("goodput").fit(TRACES, make_costs(draft=draft)) for draft in (0.001, 0.1))
    code = list(COMPRESSIONS).index("bf16")
    choices = [int(policy.choose_gamma(shown(compression=[code]), policy.new_state(1))[0]) for policy in (cheap, dear)]
    assert choices[0] > 2 and choices[1] == 0


class Dsde(Rule):
    def start(self, compression):
        self.divergences = []

    def gamma(self):
        if not self.divergences:
            return 10
        short, long = self.variance(10), self.variance(30)
        unsteady = short / long if long > 0 else 1.0
        factor = math.exp(2 * self.divergences[-1]) - 1
        return round(min(max((1 - factor * unsteady) * 8 + 2, 2), 10))

    def variance(self, steps):
        values = self.divergences[-steps:][::-1]
        weights = [0.85**age for age in range(len(values))]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        return sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / sum(weights)


def test_dsde():
    policy = make_policy("dsde")
    rng = np.random.default_rng(0)
    state, rule = policy.new_state(1), Dsde()
    rule.start("bf16")
    first = shown(last_gamma=0, last_accepted=0, last_mean_top1=0)
    assert policy.choose_gamma(first, state).tolist() == [10] == [rule.gamma()]
    seen = set()
    for _ in range(60):
        gamma, c = int(rng.integers(0, 7)), float(rng.uniform(0.3, 0.95))
        accepted = int(rng.integers(0, gamma + 1))
        if gamma:
            f = accepted / (accepted + (accepted < gamma))
            rule.divergences.append(-f * math.log(c) - (1 - f) * math.log(1 - c))
        chosen = policy.choose_gamma(shown(last_gamma=gamma, last_accepted=accepted, last_mean_top1=c), state)
        assert chosen.tolist() == [rule.gamma()]
        seen.add(int(chosen[0]))
    assert len(seen) > 4 and {2} < seen


def test_dsde_by_numbers():
    # Two of two accepted at 0.9: ln(1 / 0.9) = 0.10536, factor e^0.2107 - 1 = 0.2346; one step has no variance, so
    # unsteadiness is 1: (1 - 0.2346) * 8 + 2 = 8.12
    policy = make_policy("dsde")
    state = policy.new_state(1)
    assert policy.choose_gamma(shown(last_gamma=2, last_accepted=2, last_mean_top1=0.9), state).tolist() == [8]
    # None of two at 0.9: ln(1 / 0.1) = 2.3, factor 99: as few as there may be
    assert policy.choose_gamma(shown(last_gamma=2, last_accepted=0, last_mean_top1=0.9), state).tolist() == [2]


def test_the_forest_predicts_what_scikit_learn_predicts():
    from sklearn.ensemble import RandomForestRegressor

    policy = make_policy("forest:trees=20").fit(TRACES, COSTS)
    inputs, rates = policy._records(TRACES, COSTS, 0)
    model = RandomForestRegressor(n_estimators=20, random_state=42).fit(inputs, rates)
    names = ("last_mean_entropy", "last_mean_top1", "last_max_entropy", "last_min_top1", "compression")
    rng = np.random.default_rng(1)
    x = np.concatenate([inputs[:300, :5], rng.uniform(0, 2, (100, 5))])
    predicted = policy.predict(shown(**{name: x[:, column] for column, name in enumerate(names)}))
    for column, gamma in enumerate(policy.gammas):
        expected = model.predict(np.column_stack([x, np.full(len(x), float(gamma))]))
        np.testing.assert_allclose(predicted[:, column], expected, rtol=1e-12)
    chosen = policy.choose_gamma(shown(**{name: x[:, column] for column, name in enumerate(names)}), {})
    for row in range(len(x)):
        tokens = [predicted[row, column] * gamma + 1 for column, gamma in enumerate(policy.gammas)]
        assert chosen[row] == policy.gammas[tokens.index(max(tokens))]


def test_task_oracle_is_the_best_gamma_of_each_task_and_compression():
    costs = make_costs(draft=0.03)
    run = replay(make_policy("task-oracle"), TRACES, costs)
    chosen = set()
    for task in np.unique(TRACES.tasks):
        for compression in np.unique(TRACES.compressions):
            rows = np.flatnonzero((TRACES.tasks == task) & (TRACES.compressions == compression))
            part = Rollouts.from_sequences([SEQUENCES[row] for row in rows], MANIFEST)
            seconds = [replay(make_policy(f"fixed:gamma={g}"), part, costs).seconds.sum() for g in range(13)]
            assert run.sequence_seconds[rows].sum() == pytest.approx(min(seconds))
            chosen.add(int(np.argmin(seconds)))
    assert len(chosen) > 1
    best_fixed = replay(make_policy("best-fixed").fit(TRACES, costs), TRACES, costs)
    assert run.throughput > best_fixed.throughput
