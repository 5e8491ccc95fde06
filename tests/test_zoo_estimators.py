"""Rules that estimate the chance of a drafted token, against decisions made by hand."""

import math

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.replaying import replay

from .synthetic import drafted, make_costs, seconds_of
from .zoo_by_hand import COSTS, MANIFEST, SEQUENCES, TRACES, Rule, by_hand, played

BF16, NF4 = list(COMPRESSIONS).index("bf16"), list(COMPRESSIONS).index("nf4")
CONTEXT = int(np.median(TRACES.prompt_lengths + TRACES.lengths // 2))
GAMMA_MAX = MANIFEST.gamma_max


def logit(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


#: Made up: of top1, top2 and top10 in logits, entropy, logarithm of the index; the intercept last.
WEIGHTS = [0.9, -0.1, 0.05, -0.3, -0.2, 0.6]


def weigh(index: int, signals: dict[str, float]) -> float:
    inputs = [logit(signals[f"draft_top{k}"]) for k in (1, 2, 10)] + [signals["draft_entropy"], math.log(index)]
    return sigmoid(sum(w * x for w, x in zip(WEIGHTS, inputs, strict=False)) + WEIGHTS[-1])


class Disco(Rule):
    def gamma(self):
        return 20

    def start(self, compression):
        self.threshold = {"bf16": 0.6, "nf4": 0.8}[compression]

    def keep(self, index, signals):
        return weigh(index, signals) >= self.threshold


class SpecDec(Rule):
    smallest, threshold = 2, 0.7

    def gamma(self):
        self.survival = 1.0
        return 20

    def keep(self, index, signals):
        self.survival *= weigh(index, signals)
        return index < self.smallest or 1 - self.survival <= self.threshold


def test_disco_stops_at_its_threshold():
    policy = make_policy("disco")
    threshold = np.zeros(len(COMPRESSIONS))
    threshold[[BF16, NF4]] = 0.6, 0.8
    policy.fitted = {"weights": np.array(WEIGHTS), "threshold": threshold}
    assert played(policy) == by_hand(Disco())


@pytest.mark.parametrize(("smallest", "threshold"), [(2, 0.7), (4, 0.5), (0, 0.3)])
def test_specdec_stops_when_a_rejection_is_likely_enough(smallest, threshold):
    policy = make_policy(f"specdec-pp:smallest={smallest},threshold={threshold}")
    policy.fitted = {"weights": np.array(WEIGHTS)}
    rule = SpecDec()
    rule.smallest, rule.threshold = smallest, threshold
    assert played(policy) == by_hand(rule)


def test_training_takes_every_token_up_to_the_first_wrong_one():
    from speckv_policies.estimators import drafted_tokens

    signals, right = drafted_tokens(TRACES, COSTS)
    expected = []
    for sequence in SEQUENCES:
        position = 0
        while position < len(sequence.tokens):
            step = drafted(sequence, MANIFEST, position)
            accepted = next((n for n, (good, _) in enumerate(step) if not good), len(step))
            for index, (good, values) in enumerate(step[: accepted + 1], start=1):
                expected.append((index, round(values["draft_top1"], 6), round(values["draft_entropy"], 6), good))
            position += accepted + 1
    got = zip(signals["draft_index"], signals["draft_top1"].round(6), signals["draft_entropy"].round(6), right,
              strict=True)  # fmt: skip
    assert sorted((int(i), float(p), float(h), bool(good)) for i, p, h, good in got) == sorted(expected)


@pytest.mark.parametrize("name", ["disco", "specdec-pp", "survival-budget"])
def test_estimators_learn_that_sure_tokens_are_right(name):
    from speckv_policies.estimators import chance

    policy = make_policy(name).fit(TRACES, COSTS)
    weights = policy.fitted["weights"]

    def inputs(top1):
        full = [logit(top1), logit((1 - top1) / 2), logit(0.999), 3 * (1 - top1), 0.0]
        return np.array([full if len(weights) > 2 else full[:1]])

    sure, unsure = (float(chance(inputs(top1), weights)[0]) for top1 in (0.95, 0.3))
    assert sure > 0.6 > 0.4 > unsure


def test_the_weight_makes_specdec_more_careful():
    gammas = [
        replay(make_policy(f"specdec-pp:weight={weight}").fit(TRACES, COSTS), TRACES, COSTS).gamma.mean()
        for weight in (1.0, 6.0)
    ]
    assert gammas[0] > gammas[1] + 0.5


def test_disco_takes_the_fastest_threshold_of_each_compression():
    costs = make_costs(draft=0.03)
    policy = make_policy("disco").fit(TRACES, costs)
    for code, name in ((BF16, "bf16"), (NF4, "nf4")):
        part = TRACES.take(TRACES.compressions == name)
        speeds = []
        for threshold in policy.THRESHOLDS:
            other = make_policy(f"disco:threshold={threshold}").fit(TRACES, costs)
            np.testing.assert_array_equal(other.fitted["weights"], policy.fitted["weights"])
            speeds.append(replay(other, part, costs).throughput)
        assert policy.fitted["threshold"][code] == policy.THRESHOLDS[int(np.argmax(speeds))]


class Budget(Rule):
    """Looks through all lengths that are still possible, one by one."""

    gain, weights, ahead = 0.01, (0.8, 0.3), 0.75

    def __init__(self, costs=COSTS):
        self.costs = costs

    def start(self, compression):
        draft = seconds_of(self.costs.draft, 1, CONTEXT)
        verify = [seconds_of(self.costs.verify[compression], n, CONTEXT) for n in range(1, GAMMA_MAX + 2)]
        self.draft_seconds, self.verify = draft, verify

    def here(self, index, signals):
        return sigmoid(self.weights[0] * logit(signals["draft_top1"]) + self.weights[1])

    def best(self, drawn, here):
        speeds = {}
        survival, tokens = self.survival * here, self.tokens
        for length in range(drawn + 1, GAMMA_MAX + 1):
            tokens += survival
            survival *= self.ahead
            speeds[length] = tokens / (length * self.draft_seconds + self.verify[length])
        length = max(speeds, key=speeds.get)
        return length, speeds[length]

    def gamma(self):
        self.survival, self.tokens = 1.0, 1.0
        length, speed = self.best(0, self.ahead)
        return length if speed >= (1 + self.gain) / self.verify[0] else 0

    def draw(self, index, signals):
        here = self.here(index, signals)
        length, speed = self.best(index - 1, here)
        forwards = index * self.draft_seconds
        draw = speed >= (1 + self.gain) * self.tokens / (forwards + self.verify[index - 1])
        self.survival *= here
        self.tokens += self.survival
        better = speed >= (1 + self.gain) * self.tokens / (forwards + self.verify[index])
        self.aim = length if better else index
        return draw

    def keep(self, index, signals):
        return self.aim > index


@pytest.mark.parametrize("gain", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("draft", [0.002, 0.01, 0.02, 0.06])
def test_survival_budget(draft, gain):
    costs = make_costs(draft=draft, stair=0.03)
    policy = make_policy(f"survival-budget:gain={gain}").fit(TRACES, costs)
    policy.fitted |= {"weights": np.array(Budget.weights), "ahead": np.array(Budget.ahead)}
    rule = Budget(costs)
    rule.gain = gain
    assert played(policy) == by_hand(rule)


def test_the_budget_crosses_a_flat_piece_of_the_staircase():
    """A second verified token is dear, the third and fourth cost nothing more. One token alone does not pay, three do:
    1.8 / 0.112 = 16.1 and 2.952 / 0.116 = 25.4 tokens a second against 1 / 0.06 = 16.7."""
    policy = make_policy("survival-budget")
    verify = np.zeros((len(COMPRESSIONS), 6))
    verify[BF16] = [0, 0.06, 0.11, 0.11, 0.11, 0.3]
    policy.fitted = {"weights": np.array([0.0, logit(0.8)]), "ahead": np.array(0.8), "draft_seconds": np.array(0.002),
                     "verify_seconds": verify}  # fmt: skip
    before = Features({"compression": np.array([float(BF16)])}, 1, "before")
    assert policy.choose_gamma(before, policy.new_state(1)).tolist() == [3]
    verify[BF16] = [0, 0.06, 0.11, 0.16, 0.21, 0.3]
    assert policy.choose_gamma(before, policy.new_state(1)).tolist() == [0]


class Online(Budget):
    """Keeps the labels, and takes the Newton step from all of them at once."""

    every, damping, ridge, positions = 100, 50.0, 0.001, 16

    def __init__(self):
        super().__init__()
        self.all = {}

    def start(self, compression):
        super().start(compression)
        first = {"w": np.array([0.5] + [-0.2] * self.positions), "labels": [], "steps": 0, "right": 7.0, "tried": 10.0}
        self.mine, self.idle = self.all.setdefault(compression, first), 0

    def gamma(self):
        self.ahead, self.seen = self.mine["right"] / self.mine["tried"], []
        return max(super().gamma(), int(self.idle == 15))

    def here(self, index, signals):
        place, value = min(index, self.positions), logit(signals["draft_top1"])
        self.seen[index - 1 :] = [(value, place)]
        return sigmoid(self.mine["w"][0] * value + self.mine["w"][place])

    def draw(self, index, signals):
        return super().draw(index, signals) or self.idle == 15

    def keep(self, index, signals):
        return super().keep(index, signals) and self.idle != 15

    def observe(self, drafted, accepted, seconds):
        mine, tried = self.mine, min(accepted + 1, drafted)
        self.idle = 0 if drafted else self.idle + 1
        if not drafted:
            return
        mine["right"] += accepted
        mine["tried"] += tried
        mine["labels"] += [(*self.seen[k], k < accepted) for k in range(tried)]
        mine["steps"] += 1
        if mine["steps"] % self.every == 0:
            self.newton(mine)

    def newton(self, mine):
        x = np.zeros((len(mine["labels"]), 1 + self.positions))
        for row, (value, place, _) in enumerate(mine["labels"]):
            x[row, 0], x[row, place] = value, 1.0
        y = np.array([right for *_, right in mine["labels"]], dtype=float)
        p = 1 / (1 + np.exp(-x @ mine["w"]))
        hessian = (x.T * (p * (1 - p))) @ x + self.ridge * np.eye(x.shape[1])
        move = np.linalg.solve(hessian, x.T @ (y - p) - self.ridge * mine["w"])
        move = np.array([min(max(step, -1.0), 1.0) for step in move])
        labels = np.append(len(y), x[:, 1:].sum(axis=0))
        mine["w"] = mine["w"] + move * labels / (labels + self.damping)
        mine["labels"] = []


@pytest.mark.parametrize("every", [100, 10])
def test_online_estimator(every):
    policy, rule = make_policy(f"online-estimator:every={every}").fit(TRACES, COSTS), Online()
    rule.every = every
    assert played(policy) == by_hand(rule)
    for name, code in (("bf16", BF16), ("nf4", NF4)):
        np.testing.assert_allclose(policy.memory["coefficients"][code], rule.all[name]["w"])
        assert policy.memory["tried"][code] == rule.all[name]["tried"]
    assert every == 100 or abs(rule.all["bf16"]["w"][0] - 0.5) > 0.05  # it has moved


def test_the_online_estimator_learns_the_draft_it_sees():
    """The slope tends to that of the recording: chances near those that a regression on all tokens gives."""
    from speckv_policies.estimators import chance, drafted_tokens, fit_logistic
    from speckv_policies.estimators import logit as logits

    cheap = make_costs(draft=0.001)
    policy = make_policy("online-estimator").fit(TRACES, cheap)
    for _ in range(8):
        replay(policy, TRACES, cheap)
    signals, right = drafted_tokens(TRACES, COSTS)
    weights = fit_logistic(logits(signals["draft_top1"])[:, None], right)
    for top1 in (0.4, 0.7, 0.95):
        mine = sigmoid(policy.memory["coefficients"][BF16, 0] * logit(top1) + policy.memory["coefficients"][BF16, 1])
        assert mine == pytest.approx(float(chance(np.array([[logit(top1)]]), weights)[0]), abs=0.12)
