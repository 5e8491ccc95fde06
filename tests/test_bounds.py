"""The oracle against brute force, and everything else against the oracle."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv import bounds
from speckv.bounds import oracle
from speckv.costs import CostModel, Timings
from speckv.plugins import make_policy, registry
from speckv.policy import Clairvoyant, Policy
from speckv.replaying import replay
from speckv.traces import Manifest, Rollouts

from .synthetic import dense, drafted, make_costs, make_rollouts, make_sequences, spelled, step_seconds
from .zoo import quick


def brute_force(rollout, manifest, costs, position=0, lag=1) -> float:
    """Seconds of the fastest of all sequences of gammas and draft forwards."""
    if position >= len(rollout.tokens):
        return 0.0
    draft = drafted(rollout, manifest, position)
    context = len(rollout.prompt_tokens) + position
    ways = []
    for forwards in range(len(draft) + 1):
        for gamma in {forwards, max(forwards - 1, 0)}:
            accepted = 0
            while accepted < gamma and draft[accepted][0]:
                accepted += 1
            seconds = step_seconds(costs, rollout.compression, context, lag, forwards, gamma)
            # The draft has been fed its first forwards - 1 tokens, and keeps those that were accepted.
            next_lag = accepted + 1 - min(accepted, forwards - 1) if forwards else lag + 1
            ways.append(seconds + brute_force(rollout, manifest, costs, position + accepted + 1, next_lag))
    return min(ways)


@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 5),
    gamma_max=st.integers(1, 4),
    draft=st.floats(0.001, 0.2),
    lag=st.floats(0, 0.1),
    stair=st.floats(0, 0.1),
)
@settings(max_examples=40, deadline=None)
def test_oracle_is_brute_force(seed, budget, gamma_max, draft, lag, stair):
    sequences = make_sequences(2, ["bf16", "nf4"], gamma_max, budget, seed)
    manifest, costs = Manifest(gamma_max, budget, {}), make_costs(draft=draft, lag=lag, stair=stair)
    found = oracle(Rollouts.from_sequences(sequences, manifest), costs)
    np.testing.assert_allclose(found.seconds, [brute_force(s, manifest, costs) for s in sequences], rtol=1e-12)


def test_in_slices_the_oracle_is_the_same(monkeypatch):
    """Of sequences of several lengths and compressions."""
    traces, costs = make_rollouts(prompts=7, budget=24), make_costs(lag=0.01)
    assert len(set(traces.lengths)) > 1 and len(set(traces.compressions)) > 1
    whole = oracle(traces, costs)
    for cells in (1, 3_000):
        monkeypatch.setattr(bounds, "_CELLS", cells)
        found = oracle(traces, costs)
        for name in ("seconds", "gammas", "forwards"):
            np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


def test_the_oracle_of_long_texts_stays_in_memory(monkeypatch):
    """8 MB at once if it were not in slices."""
    traces = make_rollouts(prompts=20, compressions=["bf16"], gamma_max=2, budget=200)
    monkeypatch.setattr(bounds, "_CELLS", 200_000)
    tracemalloc.start()
    oracle(traces, make_costs())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4e6


@given(seed=st.integers(0, 2**32 - 1), draft=st.floats(0.001, 0.2), lag=st.floats(0, 0.2))
@settings(max_examples=8, deadline=None)
def test_replaying_the_plan_takes_its_seconds(seed, draft, lag):
    traces, costs = make_rollouts(prompts=3, seed=seed), make_costs(draft=draft, lag=lag)
    run = replay(make_policy("oracle"), traces, costs)
    np.testing.assert_allclose(run.sequence_seconds, oracle(traces, costs).seconds, rtol=1e-12)


def test_the_lag_matters():
    """With a draft that pays dearly for what it has not seen, a plan that ignores the lag is not the best."""
    sequences = make_sequences(6, ["bf16"], 3, 6, seed=5)
    manifest = Manifest(3, 6, {})
    blind, dear = make_costs(lag=0.0), make_costs(lag=0.09)
    traces = Rollouts.from_sequences(sequences, manifest)
    truth = np.array([brute_force(s, manifest, dear) for s in sequences])
    np.testing.assert_allclose(oracle(traces, dear).seconds, truth)

    class Blind(Clairvoyant):
        name = "blind"

        def foresee(self, traces, costs):
            plan = oracle(traces, blind)
            return plan.gammas, plan.forwards

    assert replay(Blind(), traces, dear).seconds.sum() > truth.sum() * 1.01


COSTS = {
    "cheap draft": make_costs(draft=0.002),
    "usual": make_costs(),
    "dear draft": make_costs(draft=0.06, lag=0.01),
    "steep target": make_costs(stair=0.05),
}


@pytest.mark.parametrize("costs", [COSTS["cheap draft"], COSTS["dear draft"]], ids=["cheap draft", "dear draft"])
def test_no_policy_beats_the_oracle(costs):
    traces = make_rollouts(prompts=4, budget=24)
    best = oracle(traces, costs).seconds
    names = [name for name in registry().policies if name != "oracle"]
    assert len(names) > 5
    for name in names:
        fitted = quick(name).fit(traces, costs)
        seconds = replay(fitted, traces, costs, controller=(0.0, 0.0)).sequence_seconds
        assert (seconds >= best * (1 - 1e-12)).all(), name


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_the_judge_stands_between_best_fixed_and_oracle(costs):
    traces = make_rollouts(prompts=6)
    rate = {}
    for name in ("best-fixed", "perfect-judge", "oracle"):
        rate[name] = replay(make_policy(name).fit(traces, costs), traces, costs).throughput
    assert rate["best-fixed"] <= rate["perfect-judge"] <= rate["oracle"]
    if costs is COSTS["usual"]:
        assert rate["best-fixed"] * 1.02 < rate["perfect-judge"] < rate["oracle"] / 1.02


def test_the_oracle_drafts_all_or_nothing_when_that_is_best():
    traces = make_rollouts(prompts=3)
    run = replay(make_policy("oracle"), traces, make_costs(draft=10.0))
    assert not run.gamma.any()
    free = replay(make_policy("oracle"), traces, make_costs(draft=1e-9, lag=0.0, stair=1e-9))
    np.testing.assert_array_equal(free.accepted, free.gamma)  # nothing in vain
    assert len(free.gamma) == len(replay(make_policy("fixed:gamma=8"), traces, make_costs()).gamma)  # fewest steps


def test_no_policy_with_a_spare_forward_beats_the_oracle():
    """Two forwards of one token can be faster than one of two, as with a kernel made for one token."""
    tokens, contexts = np.array([1, 2, 3, 17]), np.array([1])
    slow = Timings(tokens, contexts, np.array([[0.001], [0.2], [0.4], [3.0]]))
    costs = CostModel("one-token kernel", slow, {"bf16": Timings(tokens, contexts, np.full((4, 1), 0.05))})

    class Spare(Policy):
        name = "spare"
        features = ("draft_index",)

        def draw_token(self, features, state):
            return features["draft_index"] < 2

    traces = dense(spelled("1" * 20, gamma_max=2), gamma_max=2)
    seconds = replay(Spare(), traces, costs).sequence_seconds
    assert (seconds >= oracle(traces, costs).seconds * (1 - 1e-12)).all()
