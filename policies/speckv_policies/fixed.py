"""A constant gamma."""

import numpy.typing as npt

from speckv import Features, Policy, State


class Fixed(Policy):
    """Drafts the same number of tokens in every step.

    Args:
        gamma: tokens; 4 is the common default.
    """

    name = "fixed"
    source = "Leviathan et al., 2023 (arXiv 2211.17192); gamma 4 is what decoders commonly default to"

    def __init__(self, gamma: int = 4) -> None:
        super().__init__()
        self.gamma = gamma

    @property
    def label(self) -> str:
        return f"fixed-{self.gamma}"

    @property
    def required_gamma(self) -> int:
        return self.gamma

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.gamma
