"""The policy `streak`. Change the rule and its source, then run the tests and install the project.

Once installed, the policy is listed by `speckv policies` and takes part in `speckv compare`.
"""

from collections import abc

import numpy as np
import numpy.typing as npt

import speckv


class Streak(speckv.Policy):
    """Drafts `long` tokens while the previous step was fully accepted, and `short` otherwise.

    The first step, behind which nothing was rejected yet, is a long one.
    """

    name = "streak"
    features = ("last_gamma", "last_accepted")
    source = "an example; its constants are a guess"

    def __init__(self, long: int = 8, short: int = 2) -> None:
        super().__init__()
        self.long = long
        self.short = short

    def choose_gamma(self, features: speckv.Features, state: speckv.State) -> npt.ArrayLike:
        fully_accepted = features["last_accepted"] == features["last_gamma"]
        return np.where(fully_accepted, self.long, self.short)


@speckv.hookimpl
def speckv_register_policies(register: abc.Callable[[type[speckv.Policy]], None]) -> None:
    register(Streak)
