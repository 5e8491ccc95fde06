"""The simplest policy, which checks play where any would do."""

from speckv.features import Features
from speckv.policy import Policy, State


class Constant(Policy):
    """Drafts the same number of tokens in every step."""

    name = "constant"

    def __init__(self, gamma: int) -> None:
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features: Features, state: State) -> int:
        return self.gamma
