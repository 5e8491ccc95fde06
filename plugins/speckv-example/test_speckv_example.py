"""What every policy must keep to, and what this one decides."""

import numpy as np
from speckv_example import Streak

from speckv import features, testing


@testing.parametrize(testing.policy_checks(Streak()))
def test_keeps_to_the_contract(check: testing.Check) -> None:
    check()


def test_decides_by_the_last_step() -> None:
    """Three sequences: the first in its first step, the second after a rejection, the third after none."""
    seen = {"last_gamma": np.array([0.0, 4.0, 4.0]), "last_accepted": np.array([0.0, 1.0, 4.0])}
    chosen = Streak(long=6, short=1).choose_gamma(features.Features(seen, 3, "before"), {})
    assert np.asarray(chosen).tolist() == [6, 1, 6]
