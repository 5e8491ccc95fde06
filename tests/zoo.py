"""Policies of the zoo for tests that look at all of them."""

import pytest

from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.training import TrainedPolicy


def marked(name: str, *values: object) -> object:
    """`values`, by default the name, as a parameter of pytest: slow if the policy called `name` trains with torch."""
    marks = [pytest.mark.slow] if make_policy(name).requires else []
    return pytest.param(*(values or (name,)), marks=marks)


def quick(spec: str) -> Policy:
    """A policy that is trained for a moment only, if it takes long to train: what it learns is tested elsewhere."""
    policy = make_policy(spec)
    if isinstance(policy, TrainedPolicy):
        policy.steps = 640
    return policy
