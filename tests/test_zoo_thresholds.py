"""Stop rules on the draft's own signals, against decisions made by hand."""

import math

import numpy as np
import pytest

from speckv.plugins import make_policy
from speckv.replaying import replay

from .synthetic import dense, spelled
from .zoo_by_hand import COSTS, Rule, by_hand, played


def gammas(spec: str, **signals) -> list[int]:
    """Gammas on ten tokens that are all right, with drafts of up to four tokens."""
    return [step[0] for step in played(make_policy(spec), dense(spelled("1" * 10, gamma_max=4, **signals)))[0]]


def test_kangaroo_stops_behind_the_unsure_token():
    top1 = [0.9, 0.5, 0.3, 0.8, 0.95, 0.9, 0.39, 0.9, 0.9, 0.9]
    # 0.9 0.5 | 0.3 is the bonus | 0.8 0.95 0.9 0.39 | bonus | one token of room
    assert gammas("kangaroo", draft_top1=top1) == [2, 4, 1]
    assert gammas("kangaroo:threshold=0.35", draft_top1=top1) == [3, 4, 0]
    assert gammas("kangaroo:cap=1", draft_top1=top1) == [1, 1, 1, 1, 1]
    assert gammas("kangaroo:cap=0", draft_top1=top1) == [0] * 10


def test_svip_stops_behind_the_token_of_high_entropy():
    entropy = [0.1, 0.59, 0.61, 0.0, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0]  # 0.15 * 0.6 = 0.3^2
    assert gammas("svip", draft_entropy=entropy) == [3, 1, 3]
    assert gammas("svip:threshold=0.4", draft_entropy=entropy) == [4, 4]  # 0.15 * 1.07 = 0.4^2
    assert gammas("svip:scale=0.85", draft_entropy=entropy) == [2, 2, 3]  # 0.85 * 0.106 = 0.3^2


def test_p_min_does_not_draw_the_unsure_token():
    top1 = [0.9, 0.4, 0.9, 0.3, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9]
    traces = dense(spelled("1" * 10, gamma_max=4, draft_top1=top1))
    steps = played(make_policy("p-min:n_max=4,p_min=0.5"), traces)[0]
    assert [(gamma, forwards) for gamma, _, forwards in steps] == [(1, 2), (1, 2), (0, 1), (4, 4)]
    assert gammas("p-min:n_max=4,p_min=0.5,n_min=1", draft_top1=top1) == [1, 1, 4, 0]
    assert gammas("p-min:n_max=4,p_min=0.5,n_min=2", draft_top1=top1) == [3, 4, 0]
    assert gammas("p-min", draft_top1=top1) == [3, 3, 1]  # as shipped, llama.cpp never stops


class DraftVerify(Rule):
    cap = 8
    memory_share, smoothing, target, move = 0.5, 0.9, 0.9, 0.01

    def __init__(self, start=0.8):
        self.first = start

    def start(self, compression):
        self.threshold, self.acceptance, self.stopped = self.first, 0.0, False

    def gamma(self):
        self.stopped = False
        return self.cap

    def keep(self, index, signals):
        self.stopped = signals["draft_top1"] < self.threshold
        return not self.stopped

    def observe(self, drafted, accepted, seconds):
        if drafted == 0:
            return
        self.acceptance = self.memory_share * self.acceptance + (1 - self.memory_share) * accepted / drafted
        aim = self.threshold
        if self.acceptance < self.target:
            aim += self.move
        elif self.may_lower():
            aim -= self.move
        moved = self.smoothing * self.threshold + (1 - self.smoothing) * aim
        self.threshold = min(max(moved, 0.0), 1.0)

    def may_lower(self):
        return self.stopped


class AdaEdl(DraftVerify):
    cap, k = 20, 0.2

    def draw(self, index, signals):
        return 1 - math.sqrt(self.k * signals["draft_entropy"]) >= self.threshold

    def keep(self, index, signals):
        return True

    def may_lower(self):
        return True


@pytest.mark.parametrize("move", [0.01, 0.4])
def test_draft_and_verify(move):
    rule = DraftVerify()
    rule.move = move
    assert played(make_policy(f"draft-verify:step={move}")) == by_hand(rule)


@pytest.mark.parametrize("move", [0.01, 0.4])
def test_adaedl(move):
    rule = AdaEdl(0.5)
    rule.move = move
    assert played(make_policy(f"adaedl:step={move}")) == by_hand(rule)


def test_a_draft_of_full_length_does_not_lower_the_threshold():
    """Everything is accepted: with cap 2 each draft is full, with cap 8 the host's four tokens are."""
    signals = {"draft_top1": [0.81] * 40}
    traces = dense(spelled("1" * 40, gamma_max=4, **signals))
    for spec in ("draft-verify:cap=2", "draft-verify"):
        policy, seen = make_policy(spec), []
        observe = policy.observe
        policy.observe = lambda outcome, state, observe=observe, seen=seen: (
            observe(outcome, state), seen.append(float(state["threshold"][0]))
        )  # fmt: skip
        replay(policy, traces, COSTS)
        # 0, 0.5, 0.75, 0.875 are below the target of 0.9: three times up by (1 - 0.9) * 0.01, then held.
        np.testing.assert_allclose(seen[:6], [0.801, 0.802, 0.803, 0.803, 0.803, 0.803])


class Confidence(Rule):
    """The threshold comes from scikit-learn's ROC curve, as in transformers."""

    cap, weight, least, window = 20, 3.0, 6, 10**9

    def start(self, compression):
        self.threshold, self.samples = 0.4, []

    def gamma(self):
        self.draft = []
        return self.cap

    def keep(self, index, signals):
        self.draft.append(signals["draft_top1"])
        return signals["draft_top1"] >= self.threshold

    def observe(self, drafted, accepted, seconds):
        from sklearn.metrics import roc_curve

        tried = accepted + (accepted < drafted)
        new = [(p, place < accepted) for place, p in enumerate(self.draft[:tried])]
        self.samples = (self.samples + new)[-self.window :]
        labels = [right for _, right in self.samples]
        if new and len(labels) >= self.least and len(set(labels)) == 2:
            fpr, tpr, thresholds = roc_curve(labels, [p for p, _ in self.samples])
            self.threshold = thresholds[np.argmin(fpr + self.weight * (1 - tpr))]


@pytest.mark.parametrize(("weight", "window"), [(3.0, 256), (0.5, 256), (3.0, 7)])
def test_adaptive_confidence(weight, window):
    rule = Confidence()
    rule.weight, rule.window = weight, window
    assert played(make_policy(f"adaptive-confidence:miss_weight={weight},window={window}")) == by_hand(rule)


def test_adaptive_confidence_by_numbers():
    """Drafts: 0.9 right, 0.8 right, 0.7 wrong; 0.6 right, 0.5 right, 0.45 wrong. Then the costs are, from the top,
    0 + 3 * 3/4; 0 + 3 * 2/4; 1/2 + 3 * 2/4; 1/2 + 3 * 1/4; 1/2 + 0; 1 + 0: the threshold is 0.5."""
    top1 = [0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.49, 0.9, 0.9, 0.9, 0.9]
    off = {"off_draft_top1": [0.1] * 6}
    sequence = spelled("11011011111", gamma_max=4, draft_top1=top1, **off)
    policy, seen = make_policy("adaptive-confidence"), []
    observe = policy.observe
    policy.observe = lambda outcome, state: (observe(outcome, state), seen.append(float(state["threshold"][0])))
    run = replay(policy, dense(sequence), COSTS)
    np.testing.assert_allclose(seen[:2], [0.4, 0.5], atol=1e-6)
    # 0.9 0.8 0.7 and, behind the wrong one, 0.1; the same again; then 0.49 is below the new threshold.
    assert run.gamma.tolist()[:3] == [4, 4, 1]
