"""The schedule of transformers' assisted generation."""

import numpy as np
import numpy.typing as npt

from speckv import Features, Outcome, Policy, State


class Heuristic(Policy):
    """Two tokens more after a step that was fully accepted, one fewer otherwise.

    Args:
        start: gamma of a sequence's first step.
        up, down: tokens by which gamma rises and falls.
        largest: upper bound, tokens. transformers has none.
    """

    name = "heuristic"
    source = (
        "transformers, `num_assistant_tokens_schedule='heuristic'`, read in its source: start 5, +2, -1, at least 1; "
        "`largest` is ours"
    )

    def __init__(self, start: int = 5, up: int = 2, down: int = 1, largest: int = 20) -> None:
        super().__init__()
        self.start, self.up, self.down, self.largest = start, up, down, largest

    @property
    def required_gamma(self) -> int:
        return self.start

    def new_state(self, rows: int) -> State:
        return {"gamma": np.full(rows, self.start, dtype=np.int64)}

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return state["gamma"]

    def observe(self, outcome: Outcome, state: State) -> None:
        gamma = outcome.drafted  # what the host had room for, so that the schedule does not run ahead of it
        moved = np.where(outcome.accepted == outcome.drafted, gamma + self.up, np.maximum(gamma - self.down, 1))
        state["gamma"] = np.minimum(moved, self.largest)
