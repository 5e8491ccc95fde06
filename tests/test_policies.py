"""What each policy of the zoo decides, against decisions made by hand."""

import math
import warnings

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.plugins import make_policy, registry
from speckv.policy import Outcome, Policy
from speckv.replaying import replay
from speckv.saving import load_policy, save_policy
from speckv_policies.stopping import prices

from .synthetic import dense, make_costs, make_rollouts, spelled
from .zoo import quick

ZOO = sorted(name for name, entry in registry().policies.items() if entry.origin.startswith("speckv ("))
BF16, NF4 = list(COMPRESSIONS).index("bf16"), list(COMPRESSIONS).index("nf4")


def shown(when: str = "before", **values) -> Features:
    """Features of one sequence."""
    return Features({name: np.array([float(value)]) for name, value in values.items()}, 1, when)


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=9, budget=24)


@pytest.fixture(scope="module")
def costs():
    return make_costs()


@pytest.fixture(scope="module")
def cheap_and_dear():
    """Costs of a cheap and of a dear draft."""
    return make_costs(draft=0.001), make_costs(draft=0.08)


def gammas(policy: Policy, traces, costs) -> list[int]:
    return replay(policy, traces, costs).gamma.tolist()


_TRAINED: dict[tuple, tuple] = {}


def fitted(policy: str | Policy, traces, costs) -> Policy:
    """A trained policy. Those asked for by name are trained once and must not be changed."""
    if isinstance(policy, str):
        key = (policy, id(traces), id(costs))
        if key not in _TRAINED:
            _TRAINED[key] = fitted(quick(policy), traces, costs), traces, costs  # which keeps the ids taken
        return _TRAINED[key][0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Stochastic Optimizer")  # few records
        return policy.fit(traces, costs)


def test_the_zoo_is_whole():
    assert set(ZOO) >= {"none", "fixed", "best-fixed", "heuristic", "confidence", "mlp", "mlp-throughput", "hazard",
                        "perfect-judge", "oracle"}  # fmt: skip


def test_none_and_fixed(traces, costs):
    assert set(gammas(make_policy("none"), traces, costs)) == {0}
    run = replay(make_policy("fixed:gamma=3"), traces, costs)
    np.testing.assert_array_equal(run.gamma, np.minimum(3, traces.limit[run.sequence, run.position]))
    assert make_policy("fixed:gamma=3").label == "fixed-3" and make_policy("fixed").label == "fixed-4"


def test_heuristic_schedule():
    """5 at first; two more after a full acceptance, one fewer otherwise, at least 1, at most `largest`."""
    policy = make_policy("heuristic:largest=8")
    state, seen = policy.new_state(1), []
    for accepted in (5, 7, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1):
        gamma = int(np.asarray(policy.choose_gamma(shown(), state))[0])
        seen.append(gamma)
        policy.observe(Outcome(np.array([gamma]), np.array([min(accepted, gamma)]), np.array([1.0])), state)
    assert seen == [5, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert state["gamma"].tolist() == [3]


def test_heuristic_keeps_sequences_apart():
    always, never = spelled("1" * 30, gamma_max=8), spelled("0" * 30, gamma_max=8)
    run = replay(make_policy("heuristic"), dense(always, never, gamma_max=8), make_costs())
    assert run.gamma[run.sequence == 0].tolist() == [5, 7, 8, 6]  # 6, 8 and 9 tokens; then 7 are left
    assert run.gamma[run.sequence == 1].tolist()[:6] == [5, 4, 3, 2, 1, 1]


def test_confidence_stops_behind_the_unsure_token():
    top1 = [0.9, 0.5, 0.3, 0.8, 0.95, 0.9, 0.39, 0.9, 0.9, 0.9]
    traces = dense(spelled("1" * 10, gamma_max=4, draft_top1=top1))
    for spec, expected in {
        # 0.9 0.5 0.3 | 0.8 is the bonus | 0.95 0.9 0.39 | bonus | one token of room
        "confidence:threshold=0.4,cap=4": [3, 3, 1],
        "confidence:threshold=0.4,cap=2": [2, 2, 1, 1],
        "confidence:threshold=0.0,cap=4": [4, 4],
        "confidence:threshold=0.6,cap=4": [2, 4, 1],
        "confidence:threshold=0.4,cap=0": [0] * 10,
    }.items():
        assert gammas(make_policy(spec), traces, make_costs()) == expected, spec


def test_confidence_is_tuned_by_compression(traces):
    costs = make_costs(draft=0.03)
    policy = fitted("confidence", traces, costs)
    for code, name in ((BF16, "bf16"), (NF4, "nf4")):
        part = traces.take(traces.compressions == name)
        best = replay(policy, part, costs).throughput
        for threshold in (0.0, 0.3, 0.6, 0.9):
            for cap in (0, 2, 4, 8):
                other = make_policy(f"confidence:threshold={threshold},cap={cap}")
                assert replay(other, part, costs).throughput <= best * (1 + 1e-12)
        assert policy.fitted["cap"][code] in policy.CAPS and policy.fitted["threshold"][code] in policy.THRESHOLDS


@pytest.mark.parametrize("draft", [0.001, 0.02, 0.5])
def test_best_fixed_is_the_best_of_all(draft, traces):
    costs = make_costs(draft=draft, stair=0.03)
    policy = fitted("best-fixed", traces, costs)
    for code, name in ((BF16, "bf16"), (NF4, "nf4")):
        part = traces.take(traces.compressions == name)
        rates = [replay(make_policy(f"fixed:gamma={gamma}"), part, costs).throughput for gamma in range(9)]
        assert policy.fitted["gamma"][code] == int(np.argmax(rates))
        assert set(gammas(policy, part, costs)) == set(
            gammas(make_policy(f"fixed:gamma={np.argmax(rates)}"), part, costs)
        )
    if draft == 0.5:
        assert policy.fitted["gamma"][[BF16, NF4]].tolist() == [0, 0]
    else:
        assert policy.fitted["gamma"][[BF16, NF4]].min() > 0


def test_best_fixed_prefers_the_smaller_of_equals():
    """With a draft that is never right and costs nothing, every gamma takes the same time."""
    traces = dense(spelled("0" * 12, gamma_max=4))
    costs = make_costs(draft=1e-300, lag=0.0, stair=0.0)
    assert fitted("best-fixed", traces, costs).fitted["gamma"][BF16] == 0


@pytest.mark.parametrize("name", ["mlp", "mlp-throughput"])
def test_mlp_predicts_what_scikit_learn_predicts(name, traces, costs, monkeypatch):
    import sklearn.neural_network

    made = []

    class Watched(sklearn.neural_network.MLPRegressor):
        def fit(self, x, y):
            made.append(self)
            return super().fit(x, y)

    monkeypatch.setattr(sklearn.neural_network, "MLPRegressor", Watched)
    policy = fitted(name, traces, costs)
    (model,) = made
    inputs, _ = policy._records(traces, costs, 0)
    center, scale = inputs.mean(axis=0), np.where(inputs.std(axis=0) == 0, 1, inputs.std(axis=0))
    raw = inputs[:50, :5]
    names = ("last_mean_entropy", "last_mean_top1", "last_max_entropy", "last_min_top1", "compression")
    features = Features({name: raw[:, n] for n, name in enumerate(names)}, len(raw), "before")
    predicted = policy.predict(features)
    assert predicted.shape == (len(raw), len(policy.gammas)) and np.ptp(predicted) > 0.05
    for column, gamma in enumerate(policy.gammas):
        full = np.column_stack([raw, np.full(len(raw), float(gamma))])
        expected = np.clip(model.predict((full - center) / scale), 0, 1)
        np.testing.assert_allclose(predicted[:, column], expected, atol=1e-9)
    # What is played: most tokens a step, and tokens against seconds at the policy's own rate.
    chosen = policy.choose_gamma(features, {})
    for row in range(len(raw)):
        values = []
        for column, gamma in enumerate(policy.gammas):
            value = predicted[row, column] * gamma + 1
            if name == "mlp-throughput":
                code = int(raw[row, 4])
                value -= policy.fitted["rate"][code] * policy.fitted["seconds"][code, column]
            values.append(value)
        assert chosen[row] == policy.gammas[int(np.argmax(values))]


def test_mlp_trains_on_the_previous_step(traces, costs):
    """Records hold what was known before the step, and what then came of it."""
    inputs, rates = make_policy("mlp:records=100000")._records(traces, costs, 0)
    run = replay(make_policy("fixed:gamma=4"), traces, costs, features=("last_mean_top1", "last_min_top1"))
    whole = run.gamma == 4
    mine = inputs[:, 5] == 4
    expected = sorted(zip(run.features["last_mean_top1"][whole], run.accepted[whole] / 4, strict=True))
    np.testing.assert_allclose(sorted(zip(inputs[mine, 1], rates[mine], strict=True)), expected)
    assert len(make_policy("mlp:records=30")._records(traces, costs, 0)[1]) == 30


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


class ByHand:
    """A hazard policy with small arrays, and its decisions worked out one number at a time."""

    gamma_max = 4

    def __init__(self, rate: float, draft: float = 0.02, persistence: float = 0.7):
        self.policy = make_policy("hazard")
        verify = np.zeros((len(COMPRESSIONS), self.gamma_max + 2))
        verify[BF16] = [0, 0.05, 0.05, 0.09, 0.09, 0.14]
        rates = np.zeros(len(COMPRESSIONS))
        rates[BF16] = rate
        self.rate, self.draft, self.persistence, self.verify = rate, draft, persistence, verify[BF16].tolist()
        self.policy.fitted = {
            "first": np.array([0.8, -0.5, 0.3, 0.1]),
            "here": np.array([0.9, -0.1, -0.4, 0.2, 0.3, -0.2, 0.1, 0.05]),
            "ahead": np.array([0.4, 0.1, -0.6, 0.1, 0.5, -0.1, 0.2, -0.3]),
            "persistence": np.array(persistence),
            "draft_seconds": np.array(draft),
            "verify_seconds": verify,
            "price": prices(persistence, draft, verify),
            "rate": rates,
        }

    def worth(self, index: int, chance: float) -> float:
        """The most that another 1, 2, … tokens behind `index` drafted ones are worth."""
        best = -math.inf
        for more in range(1, self.gamma_max - index + 1):
            tokens = chance * sum(self.persistence**n for n in range(more))
            seconds = more * self.draft + self.verify[index + more + 1] - self.verify[index + 1]
            best = max(best, tokens - self.rate * seconds)
        return best

    def weigh(self, name: str, inputs: list[float]) -> float:
        weights = self.policy.fitted[name]
        return sigmoid(sum(w * x for w, x in zip(weights[:-1], inputs, strict=True)) + weights[-1])


BEFORE = {"running_acceptance": 0.75, "target_entropy": 0.4, "target_margin": 2.5}
TOKENS = [(0.9, 0.05, 0.4), (0.45, 0.3, 1.6), (0.2, 0.15, 2.8), (0.97, 0.01, 0.1)]


@pytest.mark.parametrize("rate", [0.5, 6.0, 9.0, 12.0, 16.0, 20.0, 26.0, 40.0])
@pytest.mark.parametrize("draft", [0.005, 0.02, 0.05])
def test_hazard_by_hand(rate, draft):
    hand = ByHand(rate, draft)
    policy, state = hand.policy, hand.policy.new_state(1)
    before = [logit(0.75), 0.4, math.log1p(2.5)]
    chosen = policy.choose_gamma(shown(compression=BF16, **BEFORE), state)
    assert int(np.asarray(chosen)[0]) == (4 if hand.worth(0, hand.weigh("first", before)) > 0 else 0)
    survival = 1.0
    for index, (top1, top2, entropy) in enumerate(TOKENS, start=1):
        features = shown("distribution", compression=BF16, draft_index=index, draft_top1=top1, draft_top2=top2,
                         draft_entropy=entropy, **BEFORE)  # fmt: skip
        inputs = [logit(top1), logit(top2), entropy, math.sqrt(entropy), *before]
        survival *= hand.weigh("here", inputs)
        more = hand.worth(index, survival * hand.weigh("ahead", inputs))
        place = rate * (hand.verify[index + 1] - hand.verify[index])
        assert bool(policy.draw_token(features, state)[0]) == (max(more, 0) + survival > place)
        assert bool(policy.keep_drafting(features, state)[0]) == (more > 0)


def test_hazard_by_hand_says_both_yes_and_no():
    """The cases above include drafts that start and don't, tokens that are drawn and not, drafts that stop."""
    starts = {ByHand(rate).worth(0, 0.7) > 0 for rate in (0.5, 40.0)}
    assert starts == {True, False}
    hand, state = ByHand(20.0, 0.005), ByHand(20.0).policy.new_state(1)
    answers = []
    for top1, top2, entropy in (TOKENS[0], TOKENS[2]):
        features = shown("distribution", compression=BF16, draft_index=2, draft_top1=top1, draft_top2=top2,
                         draft_entropy=entropy, **BEFORE)  # fmt: skip
        answers.append(bool(hand.policy.draw_token(features, state)[0]))
    assert answers == [True, False]


def test_hazard_learns_what_the_signals_say(traces, costs):
    policy = fitted("hazard", traces, costs)
    here, ahead = policy.fitted["here"], policy.fitted["ahead"]
    assert here.shape == ahead.shape == (8,) and policy.fitted["first"].shape == (4,)
    sure, unsure = (
        [logit(p), logit((1 - p) / 2), 3 * (1 - p), math.sqrt(3 * (1 - p)), 0.5, 0.5, 1.0] for p in (0.95, 0.3)
    )
    chances = [sigmoid(float(np.dot(here[:-1], x) + here[-1])) for x in (sure, unsure)]
    assert chances[0] > 0.8 > 0.5 > chances[1]
    assert 0.3 < policy.fitted["persistence"] < 1


def test_hazard_settles_on_a_rate_that_it_reaches(traces, costs):
    policy = fitted("hazard", traces, costs)
    for code, name in ((BF16, "bf16"), (NF4, "nf4")):
        reached = replay(policy, traces.take(traces.compressions == name), costs).throughput
        assert reached >= policy.fitted["rate"][code] * (1 - 1e-9)


@pytest.mark.parametrize("name", ["best-fixed", "confidence", "mlp-throughput", "hazard", "oracle", "perfect-judge"])
def test_costs_change_the_choice(name, traces, cheap_and_dear):
    cheap, dear = (np.mean(gammas(fitted(name, traces, costs), traces, costs)) for costs in cheap_and_dear)
    assert cheap > dear + 0.5


@pytest.mark.parametrize("name", ["none", "fixed", "heuristic", "mlp"])
def test_costs_do_not_change_the_choice_of_the_others(name, traces, costs, cheap_and_dear):
    cheap, dear = (gammas(fitted(name, traces, model), traces, costs) for model in cheap_and_dear)
    assert cheap == dear


def test_saved_parameters_come_back(tmp_path):
    policy = make_policy("heuristic:start=2,up=3,down=2,largest=7")
    save_policy(policy, tmp_path / "saved")
    assert repr(load_policy(tmp_path / "saved")) == repr(policy) == "Heuristic(start=2, up=3, down=2, largest=7)"


def test_saved_numbers_keep_their_shape(tmp_path):
    hand = ByHand(9.0)
    save_policy(hand.policy, tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    assert {key: array.shape for key, array in loaded.fitted.items()} == {
        key: array.shape for key, array in hand.policy.fitted.items()
    }


@pytest.mark.parametrize("name", ["mlp", "mlp-throughput"])
def test_mlp_on_a_recording_with_a_small_gamma_max(name):
    with pytest.raises(SpecKVError, match="gamma"):
        fitted(name, make_rollouts(prompts=6, gamma_max=4), make_costs())
