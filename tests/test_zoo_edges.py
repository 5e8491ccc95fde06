"""What every policy of the zoo must survive: nothing accepted, everything accepted, no room, one sequence or many."""

import warnings

import numpy as np
import pytest

from speckv.plugins import make_policy, registry
from speckv.policy import Clairvoyant, Policy
from speckv.replaying import replay
from speckv.shipped import shipped_costs, shipped_traces

from .synthetic import dense, make_costs, make_rollouts, spelled

ZOO = sorted(
    name
    for name, entry in registry().policies.items()
    if entry.origin.startswith("speckv (") and not issubclass(entry.policy, Clairvoyant)
)
ONLINE = [name for name in ZOO if make_policy(name).online]
COSTS = make_costs(draft=0.02)
TRACES = make_rollouts(prompts=9, budget=30)


@pytest.fixture(scope="module", params=ZOO)
def policy(request):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Stochastic Optimizer")  # few records
        return make_policy(request.param).fit(TRACES, COSTS)


def watch(policy: Policy, monkeypatch) -> list[bool]:
    """Whether all numbers in state and memory are numbers, noted behind every step."""
    finite, observe = [], policy.observe

    def observed(outcome, state):
        observe(outcome, state)
        finite.append(all(not np.isnan(array).any() for array in (*state.values(), *policy.memory.values())))

    monkeypatch.setattr(policy, "observe", observed)
    return finite


@pytest.mark.parametrize("right", ["1", "0", "10", "1110"])
@pytest.mark.parametrize("top1", [0.0, 0.5, 1.0])
def test_sure_or_unsure_right_or_wrong(policy, right, top1, monkeypatch):
    length = 60
    signals = {"draft_top1": [top1] * length, "draft_top2": [(1 - top1) / 2] * length,
               "draft_top10": [1.0] * length, "draft_entropy": [3.0 * (1 - top1)] * length}  # fmt: skip
    sequence = spelled((right * length)[:length], gamma_max=8, **signals)
    finite = watch(policy, monkeypatch)
    with np.errstate(all="raise", under="ignore"):
        run = replay(policy, dense(sequence, gamma_max=8), COSTS)
    assert all(finite)
    assert int((run.accepted + 1).sum()) >= length and run.gamma.max() <= 8


def test_a_text_of_one_token(policy):
    """There is no room for a draft: gamma is 0 whatever the policy says."""
    run = replay(policy, dense(spelled("1", gamma_max=8), gamma_max=8), COSTS)
    assert run.gamma.tolist() == [0] and run.accepted.tolist() == [0]


def test_many_sequences_are_decided_on_as_one_at_a_time(policy):
    """An online policy runs them one after the other anyway."""
    together = replay(policy, TRACES, COSTS)
    if policy.online:
        policy.forget()
    for row in range(len(TRACES)):
        alone = replay(policy, TRACES.take([row]), COSTS)
        if not policy.online:
            mine = together.sequence == row
            np.testing.assert_array_equal(alone.gamma, together.gamma[mine])
            np.testing.assert_array_equal(alone.forwards, together.forwards[mine])


@pytest.mark.parametrize("policy", ONLINE, indirect=True)
def test_a_batch_of_an_online_policy(policy, monkeypatch):
    """A live decoder may ask an online policy about several sequences at once."""
    monkeypatch.setattr(type(policy), "online", property(lambda self: False))
    policy.forget()
    finite = watch(policy, monkeypatch)
    run = replay(policy, TRACES, COSTS)
    assert all(finite) and len(np.unique(run.sequence)) == len(TRACES)


def test_the_same_policy_decides_the_same_again(policy):
    runs = []
    for _ in range(2):
        policy.forget()
        runs.append(replay(policy, TRACES, COSTS))
    np.testing.assert_array_equal(runs[0].gamma, runs[1].gamma)
    np.testing.assert_array_equal(runs[0].seconds, runs[1].seconds)


def test_on_the_shipped_recording(policy):
    """A few of its sequences, under both of the cost models that ship with it."""
    traces = shipped_traces().load().take(range(0, 240, 24))
    for costs in shipped_costs():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Stochastic Optimizer")
            run = replay(make_policy(policy.name).fit(traces, costs), traces, costs)
        assert run.throughput > 0 and (run.tokens == traces.lengths).all()


@pytest.mark.parametrize("name", ["leviathan", "goodput", "disco", "survival-budget", "online-estimator", "off-switch"])
def test_a_dear_draft_shortens_it(name):
    """The same recording, and so the same acceptance, under two costs: what knows the time acts on it."""
    cheap, dear = (
        replay(make_policy(name).fit(TRACES, costs), TRACES, costs).gamma.mean()
        for costs in (make_costs(draft=0.001), make_costs(draft=0.08))
    )
    assert cheap > dear + 0.3


def test_memory_keeps_its_layout(policy):
    before = {name: (array.dtype, array.shape) for name, array in policy.new_memory().items()}
    replay(policy, TRACES, COSTS)
    assert {name: (array.dtype, array.shape) for name, array in policy.memory.items()} == before
