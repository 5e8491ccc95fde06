"""The bandits over gamma, against their formulas worked out one number at a time from a log of their own steps."""

import math

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.policy import Outcome
from speckv.replaying import replay
from speckv.saving import load_policy, save_policy
from speckv_policies.bandits import Exp3, LinUcb, Nightjar, Thompson, Ucb1
from speckv_policies.fixed import Fixed

from .synthetic import dense, make_costs, make_rollouts, spelled

BANDITS = (Ucb1, Exp3, Thompson, LinUcb, Nightjar)
GAMMAS = (0, 2, 5)
BF16, NF4 = list(COMPRESSIONS).index("bf16"), list(COMPRESSIONS).index("nf4")
SHOWN = {
    "batch_size": 1,
    "running_acceptance": 0.5,
    "last_gamma": 0,
    "last_accepted": 0,
    "last_mean_entropy": 0,
    "target_entropy": 0,
}


def choose(policy, state, code=BF16, **shown) -> int:
    names = {name: float(value) for name, value in ({"compression": code} | SHOWN | shown).items()}
    features = Features({name: np.array([names[name]]) for name in policy.features}, 1, "before")
    return int(np.asarray(policy.choose_gamma(features, state))[0])


def tell(policy, state, drafted, accepted, seconds) -> None:
    policy.observe(Outcome(np.array([drafted]), np.array([accepted]), np.array([float(seconds)])), state)


class Log:
    """Steps as a list, and what follows from them for each gamma."""

    def __init__(self, full: bool) -> None:
        self.full, self.steps = full, []

    def outcomes(self, gamma):
        """(tokens, inputs) of every step that tells of this gamma."""
        told = (step for step in self.steps if (gamma <= step["gamma"] if self.full else gamma == step["gamma"]))
        return [(1 + min(step["accepted"], gamma), step["inputs"]) for step in told]

    def seconds(self, gamma):
        return [step["seconds"] for step in self.steps if step["gamma"] == gamma]

    def rate(self):
        return max(mean([t for t, _ in self.outcomes(g)]) / mean(self.seconds(g)) for g in GAMMAS)

    def value(self, gamma):
        """Mean tokens - rate * seconds, the variance of the tokens, the squared error of the rest."""
        tokens, seconds = [t for t, _ in self.outcomes(gamma)], self.seconds(gamma)
        variance = (sum((t - mean(tokens)) ** 2 for t in tokens) + ((gamma + 1) / 2) ** 2) / (len(tokens) + 1)
        spread = (sum((s - mean(seconds)) ** 2 for s in seconds) + (mean(seconds) / 2) ** 2) / (len(seconds) + 1)
        return mean(tokens) - self.rate() * mean(seconds), variance, self.rate() ** 2 * spread / len(seconds)


def mean(values):
    return sum(values) / len(values)


def ucb1(log, inputs, gamma, exploration):
    value, variance, error = log.value(gamma)
    own = len(log.outcomes(gamma))
    return value + exploration * math.sqrt(2 * math.log(len(log.steps)) * (variance / own + error))


def linucb(log, inputs, gamma, exploration):
    value, variance, error = log.value(gamma)
    outcomes = log.outcomes(gamma)
    x = np.array([row for _, row in outcomes])
    y = np.array([tokens for tokens, _ in outcomes]) - mean([tokens for tokens, _ in outcomes])
    inverse = np.linalg.inv(x.T @ x + np.eye(5))
    reach = inputs @ inverse @ inputs
    bonus = exploration * math.sqrt(2 * math.log(len(log.steps)) * (variance * reach + error))
    return value + inputs @ inverse @ x.T @ y + bonus


@pytest.mark.parametrize("feedback", ["bandit", "full"])
@pytest.mark.parametrize("exploration", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("kind", "score"), [(Ucb1, ucb1), (LinUcb, linucb)], ids=["ucb1", "linucb"])
def test_the_highest_bound_is_played(kind, score, exploration, feedback):
    rng = np.random.default_rng(3)
    policy = kind(GAMMAS, feedback, exploration)
    state, log, played = policy.new_state(1), Log(feedback == "full"), []
    for step in range(60):
        shown = {
            "running_acceptance": rng.uniform(),
            "last_gamma": rng.integers(0, 3),
            "last_mean_entropy": rng.gamma(1.0),
            "target_entropy": rng.gamma(1.0),
        }
        shown["last_accepted"] = rng.integers(0, shown["last_gamma"] + 1)
        share = shown["last_accepted"] / shown["last_gamma"] if shown["last_gamma"] else 0.5
        inputs = np.array(
            [
                1.0,
                shown["running_acceptance"],
                share,
                math.exp(-shown["last_mean_entropy"]),
                math.exp(-shown["target_entropy"]),
            ]
        )
        gamma = choose(policy, state, **shown)
        if step < 3:
            assert gamma == GAMMAS[step], "each is played once, from the shortest"
        else:
            scores = [score(log, inputs, g, exploration) for g in GAMMAS]
            assert gamma == GAMMAS[int(np.argmax(scores))]
        accepted, seconds = int(min(rng.geometric(0.35) - 1, gamma)), 1 + 0.2 * gamma + rng.uniform(0, 0.3)
        tell(policy, state, gamma, accepted, seconds)
        log.steps.append({"gamma": gamma, "accepted": accepted, "seconds": seconds, "inputs": inputs})
        played.append(gamma)
    assert len(set(played[3:])) > 1 or exploration == 0


@pytest.mark.parametrize("switching", [0.0, 0.5, 5.0])
def test_nightjar_charges_for_a_change_of_gamma(switching):
    """The bound of `ucb1`, less the charge on every gamma but the one played last, each batch size with its own log."""
    rng = np.random.default_rng(3)
    policy = Nightjar(GAMMAS, switching=switching)
    state, logs, last, changes = policy.new_state(1), {}, None, 0
    for _ in range(80):
        batch = int(rng.choice([1, 3, 4, 7]))
        log = logs.setdefault({1: "1", 3: "3 to 4", 4: "3 to 4", 7: "5 to 8"}[batch], Log(full=False))
        gamma = choose(policy, state, batch_size=batch)
        if len(log.steps) < len(GAMMAS):
            assert gamma == GAMMAS[len(log.steps)], "each is played once, from the shortest"
        else:
            scores = [ucb1(log, None, g, 1.0) - switching * (g != last) for g in GAMMAS]
            assert gamma == GAMMAS[int(np.argmax(scores))]
            changes += gamma != last
        accepted, seconds = int(min(rng.geometric(0.35) - 1, gamma)), 1 + 0.05 * batch * gamma + rng.uniform(0, 0.3)
        tell(policy, state, gamma, accepted, seconds)
        log.steps.append({"gamma": gamma, "accepted": accepted, "seconds": seconds, "inputs": None})
        last = gamma
    assert changes == 0 if switching == 5.0 else changes > 5


def test_nightjar_stops_speculating_in_large_batches():
    """A token drafted costs as many seconds as there are sequences: alone it pays, beside 31 others it does not."""
    policy = Nightjar((0, 4))
    played = {1: [], 32: []}
    for step in range(200):
        batch = (1, 32)[step % 2]
        state = policy.new_state(batch)
        names = {"compression": BF16, "batch_size": batch}
        features = Features({name: np.full(batch, float(value)) for name, value in names.items()}, batch, "before")
        gammas = np.asarray(policy.choose_gamma(features, state))
        policy.observe(Outcome(gammas, np.minimum(gammas, 2), 1 + 0.1 * batch * gammas), state)
        played[batch] += gammas.tolist()
    assert np.mean(np.equal(played[1], 4)) > 0.9 and np.mean(np.equal(played[32], 0)) > 0.9


def test_the_bonus_divides_by_the_gammas_own_pulls():
    """gamma 1 was played nine times, gamma 2 once, in equal seconds; what is worth as much is then played by bonus."""
    policy = Ucb1((1, 2))
    for name, sums in {
        "plays": [9, 1],
        "seconds": [9, 1],
        "squared_seconds": [9, 1],
        "count": [9, 1],
        "tokens": [18, 2],
        "squared_tokens": [36, 4],
    }.items():
        policy.memory[name][BF16] = sums
    # Tokens: variance (0 + 1) / 10 by 9, and (0 + 2.25) / 2 by 1. Seconds, at 2 tokens a second: 4 * 0.25 / 10 by 9,
    # and 4 * 0.25 / 2 by 1. The value is 2 - 2 * 1 for both.
    value, error = policy._values(np.array([BF16]))
    np.testing.assert_allclose(value, [[0.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(error**2, [[0.1 / 9 + 0.1 / 9, 1.125 + 0.5]])
    np.testing.assert_allclose(policy._patience(np.array([BF16])), [[math.sqrt(2 * math.log(10))]])
    assert choose(policy, policy.new_state(1)) == 2


@pytest.mark.parametrize("kind", BANDITS)
def test_what_a_step_tells(kind):
    """Tokens of gamma 0, 2 and 5 after a step, by feedback; nothing of what is longer, or did not fit."""
    steps = [  # gamma chosen, drafted, accepted -> count and tokens with bandit and with full feedback
        ((5, 5, 3), [0, 0, 1], [0, 0, 4], [1, 1, 1], [1, 3, 4]),
        ((5, 5, 1), [0, 0, 1], [0, 0, 2], [1, 1, 1], [1, 2, 2]),
        ((5, 5, 5), [0, 0, 1], [0, 0, 6], [1, 1, 1], [1, 3, 6]),
        ((2, 2, 2), [0, 1, 0], [0, 3, 0], [1, 1, 0], [1, 3, 0]),
        ((2, 2, 0), [0, 1, 0], [0, 1, 0], [1, 1, 0], [1, 1, 0]),
        ((0, 0, 0), [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]),
        ((5, 3, 3), [0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 3, 0]),
        ((5, 0, 0), [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]),
    ]
    for (gamma, drafted, accepted), *expected in steps:
        for feedback, (count, tokens) in {"bandit": expected[:2], "full": expected[2:]}.items():
            policy = kind(GAMMAS, feedback)
            state = policy.new_state(1)
            choose(policy, state)
            state["arm"][:] = GAMMAS.index(gamma)
            tell(policy, state, drafted, accepted, 0.25)
            memory, row = policy.memory, int(state["code"][0])
            assert memory["count"][row].tolist() == count and memory["tokens"][row].tolist() == tokens
            assert memory["squared_tokens"][row].tolist() == [value**2 for value in tokens]
            assert memory["plays"][row].tolist() == [float(g == gamma == drafted) for g in GAMMAS]
            assert memory["seconds"].sum() == 0.25 * (gamma == drafted)
            for sums in (memory[name] for name in ("plays", "seconds", "count", "tokens")):
                assert not np.delete(sums, row, axis=0).any(), "other contexts learn nothing"


@pytest.mark.parametrize("kind", BANDITS)
@pytest.mark.parametrize("feedback", ["bandit", "full"])
def test_sequences_of_a_batch_teach_as_in_turn(kind, feedback):
    together, apart = kind(GAMMAS, feedback), kind(GAMMAS, feedback)
    state, shown = together.new_state(2), {"compression": np.array([BF16, NF4], dtype=float)}
    shown |= {name: np.full(2, float(value)) for name, value in SHOWN.items()}
    together.choose_gamma(Features({name: shown[name] for name in together.features}, 2, "before"), state)
    state["arm"][:] = 2
    together.observe(Outcome(np.array([5, 5]), np.array([1, 4]), np.array([0.5, 0.75])), state)
    for code, accepted, seconds in ((BF16, 1, 0.5), (NF4, 4, 0.75)):
        alone = apart.new_state(1)
        choose(apart, alone, code)
        alone["arm"][:] = 2
        tell(apart, alone, 5, accepted, seconds)
    for name in set(together.memory) - {"draws"}:
        np.testing.assert_allclose(together.memory[name], apart.memory[name])


def filled(kind, *arguments, **keywords):
    """A policy that has played every gamma 20 times."""
    policy = kind(GAMMAS, *arguments, **keywords)
    state, rng = policy.new_state(1), np.random.default_rng(0)
    for _ in range(20):
        for arm, gamma in enumerate(GAMMAS):
            choose(policy, state)
            state["arm"][:] = arm
            tell(policy, state, gamma, min(gamma, int(rng.integers(0, 4))), 1 + 0.3 * gamma)
    return policy


def test_thompson_draws_from_its_posterior():
    policy = filled(Thompson, exploration=0.5)
    value, error = policy._values(np.array([BF16]))
    scores = np.concatenate(
        [policy._scores(Features({}, 1, "before"), {"code": np.array([BF16])}, np.array([False])) for _ in range(4000)]
    )
    np.testing.assert_allclose(scores.mean(axis=0), value[0], atol=5 * 0.5 * error.max() / 60)
    np.testing.assert_allclose(scores.std(axis=0), 0.5 * error[0], rtol=0.1)
    assert policy.memory["draws"] == 60 + 4000
    greedy = filled(Thompson, exploration=0.0)
    assert {choose(greedy, greedy.new_state(1)) for _ in range(20)} == {GAMMAS[int(value[0].argmax())]}


@pytest.mark.parametrize("feedback", ["bandit", "full"])
def test_exp3_by_hand(feedback):
    policy = filled(Exp3, feedback, exploration=0.3)
    policy.memory["weights"][BF16] = [-1.0, 0.0, -0.5]
    weights = [math.exp(-1), 1.0, math.exp(-0.5)]
    chance = [0.7 * weight / sum(weights) + 0.1 for weight in weights]
    state = policy.new_state(1)
    drawn = [choose(policy, state) for _ in range(4000)]
    np.testing.assert_allclose([drawn.count(gamma) / 4000 for gamma in GAMMAS], chance, atol=0.03)
    # gamma 2 is told of by gamma 2 alone, or by 2 and 5.
    seen = chance if feedback == "bandit" else [1.0, chance[1] + chance[2], chance[2]]
    np.testing.assert_allclose(state["chance"][0], chance)
    state["arm"][:] = 1
    np.testing.assert_allclose(policy.propensity(state), [chance[1]])
    tell(policy, state, 2, 1, 1.6)
    _, paid, _, _ = policy._estimates(np.array([BF16]))
    expected = [-1.0, 0.0, -0.5]
    for arm, tokens in ((1, 2),) if feedback == "bandit" else ((0, 1), (1, 2)):
        expected[arm] += 0.3 / 3 * (tokens - paid[0, arm]) / 6 / seen[arm]
    np.testing.assert_allclose(policy.memory["weights"][BF16], np.array(expected) - max(expected))


def test_exp3_learns_nothing_from_what_it_did_not_draw():
    policy = Exp3(GAMMAS)
    state = policy.new_state(1)
    for gamma in GAMMAS:
        assert choose(policy, state) == gamma and policy.propensity(state).tolist() == [1]
        tell(policy, state, gamma, 0, 1.0)
    assert not policy.memory["weights"].any() and np.isfinite(policy.memory["weights"]).all()
    tell(policy, state, choose(policy, state), 0, 2.0)
    assert policy.memory["weights"].any()


def test_thompson_does_not_know_its_chances():
    policy = Thompson(GAMMAS)
    state = policy.new_state(1)
    for gamma in GAMMAS:
        assert choose(policy, state) == gamma and policy.propensity(state).tolist() == [1]
        tell(policy, state, gamma, 0, 1.0)
    choose(policy, state)
    assert np.isnan(policy.propensity(state)).all()
    greedy = filled(Thompson, exploration=0.0)
    choose(greedy, state := greedy.new_state(1))
    assert greedy.propensity(state).tolist() == [1]


def iid(chance: float, sequences: int = 40, length: int = 90, gamma_max: int = 8):
    """A recording whose proposals are right at one chance, whatever came before."""
    rng = np.random.default_rng(7)
    letters = ("".join("01"[int(right)] for right in rng.random(length) < chance) for _ in range(sequences))
    return dense(*(spelled(text, gamma_max) for text in letters), gamma_max=gamma_max)


@pytest.mark.slow
@pytest.mark.parametrize("feedback", ["bandit", "full"])
@pytest.mark.parametrize("kind", BANDITS)
@pytest.mark.parametrize(("chance", "draft"), [(0.9, 0.004), (0.3, 0.03)], ids=["long", "short"])
def test_it_comes_to_play_the_best(kind, feedback, chance, draft):
    """After some hundred steps most are within 5 % of the best throughput; EXP3, which is slow, is on its way."""
    gammas, traces, costs = (0, 2, 4, 8), iid(chance), make_costs(draft=draft, stair=0.0, growth=1.0)
    rates = {gamma: replay(Fixed(gamma), traces, costs).throughput for gamma in gammas}
    best = max(rates.values())
    assert min(rates.values()) < 0.75 * best
    run = replay(kind(gammas, feedback), traces, costs)
    late = run.sequence >= 27
    assert (~late).sum() > 350
    reached = (run.accepted + 1)[late].sum() / run.seconds[late].sum()
    good = np.isin(run.gamma[late], [gamma for gamma, rate in rates.items() if rate > 0.95 * best]).mean()
    assert reached > (0.9 if kind is not Exp3 else 0.75) * best
    assert good > (0.6 if kind is not Exp3 else 0.3)


@pytest.mark.parametrize("kind", BANDITS)
def test_it_plays_with_what_its_host_can(kind):
    costs = make_costs()
    for gamma_max in (4, 16):
        traces = make_rollouts(prompts=4, gamma_max=gamma_max)
        for gammas in ((0, 1, gamma_max), (gamma_max,)):
            run = replay(kind(gammas), traces, costs)
            assert set(run.gamma) <= set(range(gamma_max + 1)) and gamma_max in run.gamma
    policy = kind()
    assert policy.required_gamma == 8
    with pytest.raises(SpecKVError, match="plays gamma 8, above the gamma_max of 4"):
        replay(policy, make_rollouts(prompts=1, gamma_max=4), costs)


@pytest.mark.parametrize("kind", BANDITS)
def test_it_needs_no_fit_and_fit_forgets(kind):
    traces, costs = make_rollouts(prompts=4), make_costs()
    policy = kind()
    first = replay(policy, traces, costs).gamma
    np.testing.assert_array_equal(replay(policy.fit(traces, costs), traces, costs).gamma, first)


@pytest.mark.parametrize("kind", BANDITS)
@pytest.mark.parametrize("feedback", ["bandit", "full"])
def test_saved_in_mid_stream_it_goes_on_alike(kind, feedback, tmp_path):
    traces, costs = make_rollouts(prompts=6), make_costs()
    policy = kind(feedback=feedback)
    replay(policy, traces.take(range(6)), costs)
    save_policy(policy, tmp_path / "saved")
    loaded, rest = load_policy(tmp_path / "saved"), traces.take(range(6, 12))
    np.testing.assert_array_equal(replay(policy, rest, costs).gamma, replay(loaded, rest, costs).gamma)
    for name, array in policy.memory.items():
        np.testing.assert_array_equal(array, loaded.memory[name])


@pytest.mark.parametrize("name", ["ucb1", "exp3", "thompson", "linucb"])
@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ('feedback="half"', "feedback is 'half'; it must be 'bandit' or 'full'"),
        ("gammas=[2,1]", "gammas are .*2, 1.*; they must be whole numbers from 0, rising"),
        ("gammas=[]", "gammas are"),
        ("gammas=[-1,2]", "gammas are"),
        ("gammas=[1.5]", "gammas are"),
        ("exploration=-1", "exploration is -1; it must be"),
    ],
)
def test_a_parameter_out_of_range(name, parameter, message):
    with pytest.raises(SpecKVError, match=message):
        make_policy(f"{name}:{parameter}")


@pytest.mark.parametrize("parameter", ["exploration=0", "exploration=2", "random_state=-1"])
def test_parameters_of_exp3_out_of_range(parameter):
    with pytest.raises(SpecKVError, match="must be"):
        make_policy(f"exp3:{parameter}")
