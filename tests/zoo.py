"""Policies of the zoo for tests that look at all of them."""

from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.training import TrainedPolicy


def quick(spec: str) -> Policy:
    """A policy that is trained for a moment only, if it takes long to train: what it learns is tested elsewhere."""
    policy = make_policy(spec)
    if isinstance(policy, TrainedPolicy):
        policy.steps = 640
    return policy
