"""Learned stop rules: their chances against those of the libraries that learned them, their decisions by hand."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speckv.compression import COMPRESSIONS
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.replaying import replay
from speckv.tuning import seconds_by_compression
from speckv_policies.calibration import calibration
from speckv_policies.hazard import TokenHazard
from speckv_policies.stopping import KINDS, Examples, drafted_tokens, prices

from .synthetic import make_rollouts
from .zoo_by_hand import COSTS, MANIFEST, SEQUENCES, TRACES, drafted

BF16 = list(COMPRESSIONS).index("bf16")
LEARNERS = ("hazard", "token-hazard", "boosted-hazard", "neural-hazard")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def examples(count: int = 400) -> Examples:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(count, 7))
    right = rng.random(count) < 1 / (1 + np.exp(-2 * inputs[:, 0] * (inputs[:, 1] > 0)))
    tokens = rng.integers(0, 30, count)
    return Examples(inputs, right, tokens, np.full(count, -1), rng.integers(0, 5, count))


def test_drafted_tokens_end_with_the_first_wrong_one():
    """Every token of a long draft up to the first wrong one, counted by the rules of the recording itself."""
    found = drafted_tokens(TRACES, COSTS)
    here = followed = starts = 0
    for gamma in (2, MANIFEST.gamma_max):
        for sequence in SEQUENCES:
            position = 0
            while position < len(sequence.tokens):
                possible = drafted(sequence, MANIFEST, position)
                right = [agreed for agreed, _ in possible]
                reached = right.index(False) + 1 if False in right else len(right)
                here, starts = here + reached, starts + (reached > 0)
                followed += sum(right[i] and i + 1 < len(right) for i in range(reached))
                position += sum(right[: right.index(False)] if False in right[:gamma] else right[:gamma]) + 1
    assert (len(found["here"].right), len(found["first"].right), len(found["ahead"].right)) == (here, starts, followed)
    assert 0 < found["ahead"].right.mean() < 1 and (found["ahead"].tokens > 0).all()


@given(
    st.floats(0.05, 0.99),
    st.floats(0.001, 0.2),
    st.lists(st.floats(0, 0.2), min_size=3, max_size=8),
    st.floats(0.1, 60),
    st.floats(0, 1),
)
def test_a_price_is_the_chance_at_which_going_on_becomes_worth_it(persistence, draft, increments, rate, chance):
    verify = np.concatenate([[0.0], np.cumsum([0.05, *increments])])[None]
    price = prices(persistence, draft, verify)[0]
    most = verify.shape[1] - 2
    assert price.shape == (most + 1,) and np.isinf(price[-1])
    for index in range(most):
        worth = max(
            chance * sum(persistence**n for n in range(more))
            - rate * (more * draft + verify[0, index + more + 1] - verify[0, index + 1])
            for more in range(1, most - index + 1)
        )
        if abs(worth) > 1e-9:
            assert (worth > 0) == (chance > rate * price[index])


def test_trees_as_arrays_say_what_scikit_learn_says():
    from sklearn.ensemble import GradientBoostingClassifier

    policy, shown = make_policy("boosted-hazard:trees=12,depth=3"), examples()
    policy.fitted = policy.learn("here", shown, seed=3)
    model = GradientBoostingClassifier(
        n_estimators=12, max_depth=3, learning_rate=0.15, min_samples_leaf=50, subsample=0.5, random_state=3
    ).fit(shown.inputs.astype(np.float32), shown.right)
    other = np.random.default_rng(2).normal(size=(200, 7))
    expected = model.predict_proba(other.astype(np.float32))[:, 1]
    np.testing.assert_allclose(policy.chance("here", other), expected, atol=1e-9)
    assert np.ptp(expected) > 0.3


@pytest.mark.parametrize("name", ["boosted-hazard", "neural-hazard"])
def test_curved_chances_are_learned(name):
    """What a logistic regression can't say: the first input matters only where the second is positive."""
    policy, shown = make_policy(name), examples(4000)
    policy.fitted = policy.learn("here", shown, seed=0)
    inputs = np.zeros((4, 7))
    inputs[:, 0], inputs[:, 1] = [2, -2, 2, -2], [1, 1, -1, -1]
    high, low, flat, same = policy.chance("here", inputs)
    assert high > 0.85 > 0.15 > low and abs(flat - same) < 0.25


def test_a_network_by_hand():
    policy, shown = make_policy("neural-hazard:hidden=2,epochs=5"), examples()
    policy.fitted = policy.learn("ahead", shown, seed=0)
    again = make_policy("neural-hazard:hidden=2,epochs=5").learn("ahead", shown, seed=0)
    assert all((again[key] == array).all() for key, array in policy.fitted.items())
    hidden, bias, out, last = (policy.fitted[f"ahead_{part}"] for part in ("hidden", "hidden_bias", "out", "out_bias"))
    x = shown.inputs[7]
    units = [math.tanh(sum(x[i] * hidden[i, unit] for i in range(7)) + bias[unit]) for unit in range(2)]
    by_hand = sigmoid(sum(u * w for u, w in zip(units, out, strict=True)) + last[0])
    assert float(policy.chance("ahead", shown.inputs)[7]) == pytest.approx(by_hand)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("right", [True, False])
def test_one_class_alone_is_its_share(name, right):
    policy, shown = make_policy(name), examples(60)
    shown = Examples(shown.inputs, np.full(60, right), shown.tokens, shown.previous, shown.prompts)
    policy.fitted = policy.learn("here", shown, seed=0)
    chances = policy.chance("here", shown.inputs)
    assert (chances > 0.9).all() if right else (chances < 0.1).all()


@pytest.mark.parametrize("name", LEARNERS)
def test_what_was_never_seen_leaves_no_nan(name):
    """Drafts of one token say nothing of the one behind it; and no timings are known of some compressions."""
    traces = make_rollouts(prompts=3, gamma_max=1, budget=12)
    policy = make_policy(name)
    if name == "token-hazard":
        policy = make_policy("token-hazard:trust=[1.0,1.0]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.fit(traces, COSTS)
        threshold = policy.fitted["rate"][:, None] * policy.fitted["price"]
        assert len(replay(policy, traces, COSTS).gamma)
    assert not any(np.isnan(array).any() for array in (*policy.fitted.values(), threshold))


@pytest.mark.parametrize("count", [2, 3])
def test_trees_of_a_few_examples(count):
    policy, shown = make_policy("boosted-hazard"), examples(count)
    shown = dataclasses.replace(shown, right=np.arange(count) == 0)
    policy.fitted = policy.learn("here", shown, seed=0)
    assert np.isfinite(policy.chance("here", shown.inputs)).all()


class ByHand:
    """A token hazard with small tables, and its decisions worked out one number at a time."""

    inputs = (0.5, 0.2, 0.3)
    seen = {10: (2.0, 1.5), 11: (-3.0, 0.7)}  # noqa: RUF012
    pairs = {(10, 11): (1.0, 0.5)}  # noqa: RUF012
    unseen = (0.4, 0.0)

    def __init__(self, rate: float, share: float, factor: float) -> None:
        self.policy = make_policy("token-hazard")
        self.rate, self.share, self.factor = rate, share, factor
        codes = len(COMPRESSIONS)
        end = np.iinfo(np.int64).max
        self.here, self.drawn = np.linspace(-0.4, 0.5, 8), np.linspace(0.6, -0.3, 12)
        self.price = [0.01, 0.02, 0.03, 0.04, math.inf]
        self.policy.fitted = {
            "first": np.array([0.8, -0.5, 0.3, 0.1]),
            "here": self.here,
            "ahead_drawn": self.drawn,
            "ahead_average": np.array(0.9),
            "ahead_token": np.array([10, 11, end]),
            "ahead_token_odds": np.array([*self.seen.values(), self.unseen]),
            "ahead_pair": np.array([11 * 2**32 + 11, end]),
            "ahead_pair_odds": np.array([*self.pairs.values(), self.unseen]),
            "trust": np.tile((share, factor), (codes, 1)),
            "price": np.tile(self.price, (codes, 1)),
            "rate": np.full(codes, rate),
        }


SHOWN = {"running_acceptance": 0.75, "target_entropy": 0.4, "target_margin": 2.5, "compression": BF16}
DRAFT = [(0.9, 0.05, 0.4, 10), (0.45, 0.3, 1.6, 11), (0.8, 0.1, 0.7, 12), (0.97, 0.01, 0.1, 10)]


def features(when: str, **values: float) -> Features:
    return Features({name: np.array([float(value)]) for name, value in values.items()}, 1, when)


@pytest.mark.parametrize("rate", [1.0, 8.0, 14.0, 20.0, 40.0])
@pytest.mark.parametrize(("share", "factor"), [(1.0, 1.0), (0.5, 0.8), (0.0, 1.0)])
def test_token_hazard_by_hand(rate, share, factor):
    hand = ByHand(rate, share, factor)
    state = hand.policy.new_state(1)
    before = [logit(0.75), 0.4, math.log1p(2.5)]
    first = sigmoid(0.8 * before[0] - 0.5 * before[1] + 0.3 * before[2] + 0.1)
    chosen = int(np.asarray(hand.policy.choose_gamma(features("before", **SHOWN), state))[0])
    assert chosen == (4 if first > rate * 0.01 else 0)
    survival, previous = 1.0, -1
    for index, (top1, top2, entropy, token) in enumerate(DRAFT, start=1):
        shown = features("drawn", draft_index=index, draft_top1=top1, draft_top2=top2, draft_entropy=entropy,
                         draft_token=token, **SHOWN)  # fmt: skip
        inputs = [logit(top1), logit(top2), entropy, math.sqrt(entropy), *before]
        survival *= sigmoid(float(np.dot([*inputs, 1.0], hand.here)))
        odds = [*hand.seen.get(token, hand.unseen), *hand.pairs.get((previous, token), hand.unseen)]
        behind = share * float(np.dot([*inputs, *odds, 1.0], hand.drawn)) + (1 - share) * 0.9
        goes_on = survival * factor * sigmoid(behind) > rate * hand.price[index]
        assert bool(hand.policy.keep_drafting(shown, state)[0]) == goes_on
        previous = token


def test_counts_of_tokens_are_shrunk_to_the_average():
    shown = examples(300)
    fitted = TokenHazard(shrinkage=4.0).learn("ahead", shown, seed=0)
    table = dict(zip(fitted["ahead_token"].tolist(), fitted["ahead_token_odds"].tolist(), strict=True))
    average, of_7 = (shown.right.sum() + 0.5) / (len(shown.right) + 1), shown.right[shown.tokens == 7]
    share = (of_7.sum() + 4 * average) / (len(of_7) + 4)
    assert table[7] == pytest.approx([logit(share), math.log1p(len(of_7))])
    assert fitted["ahead_token_odds"][-1] == pytest.approx([logit(average), 0.0])


def test_counts_of_tokens_leave_the_own_prompt_out():
    """If no token stands in two prompts, its counts tell nothing, although they would give the labels away."""
    shown = examples(300)
    alone = Examples(shown.inputs, shown.prompts % 2 == 0, 100 + shown.prompts, shown.previous, shown.prompts)
    assert TokenHazard().learn("ahead", alone, seed=0)["ahead_drawn"][7:11] == pytest.approx(0.0)


def test_how_prompts_are_numbered_does_not_matter():
    shown = examples(300)
    renumbered = dataclasses.replace(shown, prompts=300 * shown.prompts)
    one, other = (TokenHazard().learn("ahead", part, seed=0)["ahead_drawn"] for part in (shown, renumbered))
    assert one == pytest.approx(other)


def test_trust_is_chosen_where_it_was_not_learned(monkeypatch):
    """The ids that the candidates are fitted to and those that they are played on, and which of them is taken."""
    learned, played, seconds = [], [], []

    class Noting(TokenHazard):
        def fit(self, traces, costs, seed=0):
            learned.append(set(traces.ids))
            return super().fit(traces, costs, seed)

    def noting(candidates, traces, costs):
        played.append(set(traces.ids))
        seconds.append(seconds_by_compression(candidates, traces, costs))
        return seconds[-1]

    monkeypatch.setattr("speckv.tuning.seconds_by_compression", noting)
    policy = Noting().fit(TRACES, COSTS)
    everything, *inner = learned
    assert len(inner) == len(played) == 2 and set.union(*played) == everything == set(TRACES.ids)
    for fitted, other in zip(inner, played, strict=True):
        assert fitted == everything - other and fitted and other
    best = np.sum(seconds, axis=0).argmin(axis=0)
    assert policy.fitted["trust"].tolist() == [list(TokenHazard.TRUST[way]) for way in best]


def test_trust_that_is_given_is_kept():
    fixed = make_policy("token-hazard:trust=[0.5,0.9]").fit(TRACES, COSTS)
    assert {tuple(row) for row in fixed.fitted["trust"].tolist()} == {(0.5, 0.9)}


@pytest.mark.parametrize("name", LEARNERS)
def test_hazards_beat_what_they_start_from(name):
    policy = make_policy(name).fit(TRACES, COSTS)
    plain, run = replay(make_policy("none"), TRACES, COSTS), replay(policy, TRACES, COSTS)
    assert run.throughput > 1.05 * plain.throughput
    assert len(set(run.gamma.tolist())) > 2


def test_calibration_on_held_out_prompts():
    found = calibration(make_policy("hazard"), TRACES, COSTS, folds=3)
    assert tuple(found) == KINDS
    assert found["here"].ece < 0.1 and found["here"].brier < 0.25
    counted = {kind: len(part.right) for kind, part in drafted_tokens(TRACES, COSTS).items()}
    assert {kind: int(found[kind].tokens.sum()) for kind in KINDS} == counted
