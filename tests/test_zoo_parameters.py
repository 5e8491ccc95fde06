"""Every parameter of every policy of the zoo reaches an action, and a value out of range is one line."""

import inspect
import warnings

import pytest

from speckv.errors import SpecKVError
from speckv.plugins import make_policy, registry
from speckv.policy import Policy
from speckv.replaying import replay

from .synthetic import make_costs, make_rollouts
from .zoo import marked

ZOO = sorted(name for name, entry in registry().policies.items() if entry.origin.startswith("speckv ("))

#: (policy, parameter) -> another value. A policy may be given with other parameters, without which this one has no say.
PARAMETERS = {
    ("fixed", "gamma"): 2,
    ("heuristic", "start"): 2,
    ("heuristic", "up"): 1,
    ("heuristic", "down"): 3,
    ("heuristic", "largest"): 3,
    ("gammatune", "start"): 2,
    ("gammatune", "smallest"): 3,
    ("gammatune", "largest"): 4,
    ("gammatune", "up"): 1,
    ("gammatune", "memory_share"): 0.3,
    ("draft-window", "start"): 2.0,
    ("draft-window", "up"): 0.8,
    ("draft-window", "down"): 0.3,
    ("draft-window", "off_below"): 1.2,
    ("draft-window:off_below=2.0", "probe"): 4,
    ("draft-window:off_below=2.0", "probe_every"): 3,
    ("draft-window", "largest"): 3,
    ("hill-climb", "smallest"): 2,
    ("hill-climb", "largest"): 2,
    ("hill-climb", "shrink_below"): 0.7,
    ("hill-climb", "grow_from"): 0.95,
    ("hill-climb", "keep_from"): 1.2,
    ("hill-climb", "reject_below"): 0.5,
    ("hill-climb", "weight"): 0.6,
    ("tiers", "tiers"): (1, 2, 3, 4),
    ("tiers", "start"): 5,
    ("tiers", "weight"): 0.8,
    ("tiers", "every"): 2,
    ("tiers", "warm_up"): 0,
    ("tiers", "down"): 1.5,
    ("tiers", "up"): 1.0,
    ("leviathan", "largest"): 2,
    ("goodput", "start"): 0.2,
    ("goodput", "weight"): 0.5,
    ("goodput:start=0.1,weight=0.01", "probe_every"): 3,
    ("dsde", "smallest"): 4,
    ("dsde", "largest"): 5,
    ("dsde", "sharpness"): 5.0,
    ("dsde", "decay"): 0.3,
    ("dsde", "short"): 3,
    ("dsde", "long"): 10,
    ("confidence", "threshold"): 0.8,
    ("confidence", "cap"): 2,
    ("adaptive-confidence", "threshold"): 0.95,
    ("adaptive-confidence", "cap"): 3,
    ("adaptive-confidence", "miss_weight"): 0.5,
    ("adaptive-confidence", "least_samples"): 20,
    ("adaptive-confidence", "window"): 8,
    ("p-min", "n_max"): 2,
    ("p-min:p_min=0.8", "n_min"): 2,
    ("p-min", "p_min"): 0.8,
    ("kangaroo", "threshold"): 0.9,
    ("kangaroo", "cap"): 2,
    ("svip", "scale"): 0.4,
    ("svip", "threshold"): 0.5,
    ("svip", "cap"): 2,
    ("draft-verify", "threshold"): 0.5,
    ("draft-verify", "cap"): 2,
    ("draft-verify:step=0.5", "target"): 0.3,
    ("draft-verify", "step"): 0.5,
    ("draft-verify:step=0.5", "memory_share"): 0.95,
    ("draft-verify:step=0.5", "smoothing"): 0.5,
    ("adaedl", "scale"): 0.05,
    ("adaedl", "threshold"): 0.8,
    ("adaedl", "cap"): 2,
    ("adaedl:step=0.5", "target"): 0.3,
    ("adaedl", "step"): 0.5,
    ("adaedl:step=0.5", "memory_share"): 0.95,
    ("adaedl:step=0.5", "smoothing"): 0.5,
    ("disco", "threshold"): 0.95,
    ("disco", "cap"): 2,
    ("specdec-pp", "threshold"): 0.3,
    ("specdec-pp", "weight"): 1.0,
    ("specdec-pp", "smallest"): 4,
    ("specdec-pp", "largest"): 3,
    ("survival-budget", "gain"): 0.2,
    ("online-estimator", "slope"): 0.1,
    ("online-estimator", "intercept"): -2.0,
    ("online-estimator", "start"): 0.4,
    ("online-estimator", "every"): 10,
    ("online-estimator:every=10", "damping"): 0.0,
    ("online-estimator:every=10,damping=0.0", "ridge"): 50.0,
    ("online-estimator:every=10,damping=0.0", "positions"): 1,
    ("online-estimator:start=0.1", "probe_every"): 3,
    ("online-estimator", "gain"): 0.2,
    ("hazard", "regularisation"): 0.001,
    ("token-hazard", "regularisation"): 0.0001,
    ("token-hazard", "shrinkage"): 500.0,
    ("token-hazard", "trust"): (0.0, 0.5),
    ("boosted-hazard", "trees"): 1,
    ("boosted-hazard", "depth"): 1,
    ("boosted-hazard", "learning_rate"): 0.01,
    ("neural-hazard", "hidden"): 1,
    ("neural-hazard", "epochs"): 1,
    ("neural-hazard", "weight_decay"): 1.0,
    ("mlp", "gammas"): (1, 3),
    ("mlp", "hidden"): 1,
    ("mlp", "records"): 40,
    ("mlp", "random_state"): 1,
    ("mlp-throughput", "gammas"): (1, 3),
    ("mlp-throughput", "hidden"): 1,
    ("mlp-throughput", "records"): 40,
    ("mlp-throughput", "random_state"): 1,
    ("forest", "gammas"): (1, 3),
    ("forest", "trees"): 2,
    ("forest", "records"): 40,
    ("forest:trees=3", "random_state"): 1,
    ("ucb1", "gammas"): (1, 3),
    ("ucb1", "feedback"): "full",
    ("ucb1", "exploration"): 0.3,
    ("exp3", "gammas"): (1, 3),
    ("exp3", "feedback"): "full",
    ("exp3", "exploration"): 0.3,
    ("exp3", "random_state"): 1,
    ("thompson", "gammas"): (1, 3),
    ("thompson", "feedback"): "full",
    ("thompson", "exploration"): 0.3,
    ("thompson", "random_state"): 1,
    ("linucb", "gammas"): (1, 3),
    ("linucb", "feedback"): "full",
    ("linucb", "exploration"): 0.3,
    ("nightjar", "gammas"): (1, 3),
    ("nightjar", "feedback"): "full",
    ("nightjar", "exploration"): 0.3,
    ("nightjar", "switching"): 2.0,
    **{
        (f"{name}:steps=1280", parameter): value
        for name, more in {
            "dqn": {"gammas": (1, 3), "discount": 0.9},
            "ppo": {"gammas": (1, 3), "discount": 0.9},
            "contextual-bandit": {"gammas": (1, 3)},
            "dqn-stop": {},
            "ppo-stop": {"steps": 10_000},
            "ltd": {},
        }.items()
        for parameter, value in ({"steps": 2560, "hidden": 8, "learning_rate": 0.01} | more).items()
    },
    ("tapout", "algorithm"): "thompson",
    ("tapout", "arms"): ("margin",),
    ("tapout", "exploration"): 0.01,
    ("tapout", "share"): 0.0,
    ("tapout", "cap"): 2,
    ('tapout:algorithm="thompson"', "random_state"): 1,
    ("hysteresis", "policy"): "fixed:gamma=2",
    ("hysteresis", "dwell"): 2,
    ("hysteresis", "margin"): 4,
    ("explore", "policy"): "fixed:gamma=2",
    ("explore", "epsilon"): 0.9,
    ("explore:epsilon=0.5", "largest"): 2,
    ("explore:epsilon=0.5", "random_state"): 1,
    ("off-switch", "policy"): "fixed:gamma=8",
    ('off-switch:policy="fixed:gamma=8"', "decay"): 0.2,
    ('off-switch:policy="fixed:gamma=8"', "patience"): 2,
    ('off-switch:policy="fixed:gamma=8",probe_every=2', "probe"): 1,
    ('off-switch:policy="fixed:gamma=8"', "probe_every"): 3,
    ("perfect-judge", "cap"): 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=9, budget=60)


@pytest.fixture(scope="module")
def costs():
    return make_costs(draft=0.02)


def test_all_parameters_are_tested():
    found = {(name, key) for name in ZOO for key in inspect.signature(registry().policies[name].value).parameters}
    assert found == {(spec.partition(":")[0], parameter) for spec, parameter in PARAMETERS}


def actions(policy: Policy, traces, costs) -> list[tuple[int, int]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Stochastic Optimizer")  # few records
        run = replay(policy.fit(traces, costs), traces, costs)
    return list(zip(run.gamma.tolist(), run.forwards.tolist(), strict=True))


@pytest.mark.parametrize(
    ("spec", "parameter"), [marked(spec, spec, parameter) for spec, parameter in PARAMETERS], ids=str
)
def test_every_parameter_changes_an_action(spec, parameter, traces, costs):
    policy = make_policy(spec)
    changed = type(policy)(**policy.get_params() | {parameter: PARAMETERS[spec, parameter]})
    assert changed.label != policy.label
    assert actions(policy, traces, costs) != actions(changed, traces, costs)


@pytest.mark.parametrize(
    "spec",
    [
        "gammatune:start=0", "gammatune:largest=2", "gammatune:up=1.5", "gammatune:memory_share=1.1",
        "draft-window:down=2", "draft-window:probe=0", "hill-climb:smallest=0", "hill-climb:reject_below=0.99",
        "hill-climb:weight=0", "tiers:start=4", "tiers:tiers=[3,1]", "tiers:tiers=[]", "tiers:every=0",
        "leviathan:largest=0", "goodput:start=2", "goodput:probe_every=0", "dsde:short=40", "dsde:decay=0",
        "adaptive-confidence:threshold=-0.1", "adaptive-confidence:cap=0", "adaptive-confidence:window=1",
        "p-min:n_min=4", "p-min:p_min=NaN", "kangaroo:cap=-1", "svip:scale=-1", "draft-verify:target=2",
        "adaedl:scale=-1", "disco:threshold=2", "specdec-pp:weight=0", "specdec-pp:smallest=30",
        "survival-budget:gain=-0.1", "token-hazard:shrinkage=0", "token-hazard:trust=[1]",
        "boosted-hazard:trees=0", "boosted-hazard:learning_rate=2", "neural-hazard:hidden=0",
        "neural-hazard:weight_decay=-1", "online-estimator:ridge=0", "online-estimator:positions=0", "forest:trees=0",
        "forest:gammas=[]", "mlp:hidden=0", 'tapout:algorithm="best"', 'tapout:arms=["none"]', "tapout:cap=0",
        "hysteresis:dwell=0", "off-switch:decay=1.5", "nightjar:switching=-1", "ppo:steps=0", "ppo:discount=2",
        "dqn:gammas=[3]", "dqn-stop:hidden=0", "ltd:learning_rate=-1",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_line_that_names_it(spec):
    with pytest.raises(SpecKVError) as caught:
        make_policy(spec)
    message = str(caught.value)
    assert "\n" not in message and spec.partition(":")[2].partition("=")[0] in message
    assert "must" in message
