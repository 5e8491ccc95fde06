"""What every policy of the zoo must survive: nothing accepted, everything accepted, no room, one sequence or many."""

import warnings

import pytest

from speckv.plugins import make_policy, registry
from speckv.policy import Clairvoyant
from speckv.replaying import replay
from speckv.shipped import shipped_costs, shipped_traces

from .synthetic import make_costs, make_rollouts
from .zoo import marked, quick

ZOO = sorted(
    name
    for name, entry in registry().policies.items()
    if entry.origin.startswith("speckv (") and not issubclass(entry.value, Clairvoyant)
)
TRACES = make_rollouts(prompts=9, budget=30)


@pytest.mark.parametrize("name", [marked(name) for name in ZOO])
def test_on_the_shipped_recording(name):
    """A few of its sequences, under both of the cost models that ship with it."""
    traces = shipped_traces().load().take(range(0, 240, 24))
    for costs in shipped_costs():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Stochastic Optimizer")  # few records
            run = replay(quick(name).fit(traces, costs), traces, costs)
        assert run.throughput > 0 and (run.tokens == traces.lengths).all()


@pytest.mark.parametrize("name", ["leviathan", "goodput", "disco", "survival-budget", "online-estimator", "off-switch"])
def test_a_dear_draft_shortens_it(name):
    """The same recording, and so the same acceptance, under two costs: what knows the time acts on it."""
    cheap, dear = (
        replay(make_policy(name).fit(TRACES, costs), TRACES, costs).gamma.mean()
        for costs in (make_costs(draft=0.001), make_costs(draft=0.08))
    )
    assert cheap > dear + 0.3
