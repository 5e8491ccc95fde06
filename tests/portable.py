"""Policies of every portable form, and hosts that tell a portable policy no more than they see."""

import functools

import numpy as np

from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.testing.recordings import make_costs, make_rollouts
from speckv.traces import Manifest
from speckv_policies.agents import Agent
from speckv_policies.neural import NeuralHazard

from .synthetic import drafted

#: Every policy of the zoo that has a portable form, and some of them with other parameters.
EXACT = (
    "none", "fixed", "fixed:gamma=7", "best-fixed", "heuristic", "heuristic:start=0,up=3,down=2,largest=6",
    "confidence", "confidence:threshold=0.4,cap=5", "kangaroo", "svip", "svip:scale=0", "p-min:n_max=8,p_min=0.4",
    "p-min:n_max=6,n_min=2,p_min=0.7", "disco", "specdec-pp", "specdec-pp:threshold=0.3,smallest=0",
    "hazard", "boosted-hazard", "neural-hazard", "mlp", "mlp-throughput",
    "dqn", "contextual-bandit", "ppo", "dqn-stop", "ppo-stop", "ltd",
)  # fmt: skip

#: One policy of every form, model and place of a decision.
FORMS = (
    "fixed:gamma=7", "heuristic", "confidence", "p-min:n_max=6,n_min=2,p_min=0.7", "svip:scale=0", "specdec-pp",
    "hazard", "boosted-hazard", "neural-hazard", "mlp-throughput", "dqn", "dqn-stop",
)  # fmt: skip

#: Of networks that decide more than one thing.
SEEDS = {"dqn": 10, "contextual-bandit": 10, "ppo": 10, "dqn-stop": 25, "ppo-stop": 25, "ltd": 5}


@functools.cache
def recording():
    return make_rollouts(prompts=10, gamma_max=8, budget=40, seed=4), make_costs(draft=0.02)


@functools.cache
def fitted(spec: str) -> Policy:
    """A policy that is fitted to `recording`; those that torch trains get networks at random, which are as varied."""
    policy = make_policy(spec)
    random = np.random.default_rng(SEEDS.get(spec, 0))
    if isinstance(policy, NeuralHazard):
        policy.fitted = dict(fitted("hazard").fitted)
        for kind, width in (("first", 3), ("here", 7), ("ahead", 7)):
            policy.fitted |= {f"{kind}_hidden": random.normal(size=(width, 8)), f"{kind}_hidden_bias": np.zeros(8),
                              f"{kind}_out": random.normal(size=8), f"{kind}_out_bias": np.ones(1)}  # fmt: skip
        return policy
    if not isinstance(policy, Agent):
        return policy.fit(*recording())
    width, actions = len(policy.layout.names), len(getattr(policy, "gammas", (0, 1)))
    sizes = (width, 8, 8, actions)
    center = [4.0 if name == "context_length" else 0.5 for name in policy.layout.names]
    policy.fitted = {"center": np.array(center), "scale": random.uniform(0.2, 1, width)}
    for layer in range(3):
        policy.fitted[f"weight_{layer}"] = random.normal(size=sizes[layer : layer + 2])
        policy.fitted[f"bias_{layer}"] = random.normal(size=sizes[layer + 1]) / 4
    policy.fitted = {name: array.astype(np.float32) for name, array in policy.fitted.items()}
    return policy


def decode(rollout, gamma_max: int, budget: int, choose, draw, keep, observe):
    """What a host does with one recorded sequence: (position, gamma, accepted, forwards) of each step.

    Args:
        choose, draw, keep, observe: the decisions, in the form of `speckv.runtime.Sequence`.
    """
    manifest = Manifest(gamma_max, budget, {})
    position, steps = 0, []
    while position < len(rollout.tokens):
        proposed = drafted(rollout, manifest, position)
        most, tokens, forwards = min(choose(), len(proposed)), 0, 0
        while tokens < most:
            forwards += 1
            signals = proposed[tokens][1]
            if not draw(**signals):
                break
            tokens += 1
            if tokens == most or not keep(signals["draft_top1"]):
                break
        right = [accepted for accepted, _ in proposed[:tokens]]
        accepted = right.index(False) if False in right else tokens
        steps.append((position, tokens, accepted, forwards))
        at = min(position + accepted, len(rollout.tokens) - 1)
        observe(tokens, accepted, *(float(rollout.signals[name][at]) for name in ("target_entropy", "target_margin")))
        position += accepted + 1
    return steps
