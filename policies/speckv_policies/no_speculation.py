"""Plain decoding."""

import numpy.typing as npt

from speckv import Features, Policy, State


class NoSpeculation(Policy):
    """Never drafts: the target decodes one token a step. The baseline that speculation has to beat."""

    name = "none"
    source = "plain autoregressive decoding"

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return 0
