"""What every policy of the zoo must survive: nothing accepted, everything accepted, no room, one sequence or many."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from speckv.errors import SpecKVError
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


@pytest.mark.parametrize("name", [marked(name) for name in ZOO])
def test_on_a_compression_that_it_was_not_fitted_to(name):
    """Whose forwards were not timed then, either."""
    costs = make_costs()
    known = replace(costs, verify={"nf4": costs.verify["nf4"]})
    policy = quick(name).fit(TRACES.take(TRACES.compressions == "nf4"), known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = replay(policy, TRACES.take(TRACES.compressions == "bf16"), costs)
    assert run.throughput > 0
    if name in {"survival-budget", "online-estimator"}:
        assert run.gamma.mean() < 0.5


NO_ROOM = make_rollouts(prompts=2, budget=1)


@pytest.mark.parametrize("name", ["mlp", "mlp-throughput", "forest"])
def test_who_needs_drafts_to_learn_from_says_so(name):
    with pytest.raises(SpecKVError, match="no step of these traces has room for a draft of 2 tokens"):
        make_policy(name).fit(NO_ROOM, make_costs())


def test_texts_without_room_for_a_draft_teach_nothing():
    policy = make_policy("survival-budget").fit(NO_ROOM, make_costs())
    assert all(np.isfinite(values).all() for values in policy.fitted.values())
    assert replay(policy, TRACES, make_costs()).throughput > 0
