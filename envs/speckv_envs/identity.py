"""speckv/Identity-v0: the right action is written in the observation."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from speckv.features import IntArray
from speckv.observations import Observations
from speckv_envs.games import GameEnv, GameVectorEnv, Info, Played


class IdentityGame:
    """See `IdentityEnv`."""

    reward = "right"

    def __init__(self, episodes: int, actions: int, steps: int) -> None:
        if actions < 2 or steps < 2:
            raise ValueError(f"actions are {actions} and steps {steps}; both must be 2 or more")
        self.episodes, self.steps = episodes, steps
        self.names = tuple(f"right={action}" for action in range(actions))
        self.observation_space: gymnasium.Space[Observations] = gymnasium.spaces.Box(0, 1, (actions,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(actions)
        self._right, self._played = (np.zeros(episodes, dtype=np.int64) for _ in range(2))

    def start(self, at: IntArray, rng: np.random.Generator, options: Mapping[str, Any]) -> Info:
        self._played[at] = 0
        self._right[at] = rng.integers(self.action_space.n, size=len(at))
        return {}

    def observe(self) -> Observations:
        return np.asarray(self._right[:, None] == np.arange(self.action_space.n), dtype=np.float32)

    def play(self, at: IntArray, actions: IntArray, rng: np.random.Generator) -> Played:
        right = self._right[at]
        self._played[at] += 1
        self._right[at] = rng.integers(self.action_space.n, size=len(at))
        truncated = self._played[at] >= self.steps
        rewards = (actions == right).astype(float)
        return Played(rewards, np.zeros(len(at), dtype=bool), truncated, {"right": right})


class IdentityEnv(GameEnv):
    """
    ## Description
    The right action is written in the observation. A learner that does not solve this within a minute has a fault of
    its own, whatever it says of the other environments.

    ## Action Space
    `Discrete(actions)`.

    ## Observation Space
    `Box(0, 1, (actions,), float32)`: 1 at the place of the right action, 0 elsewhere.

    | name | unit | range |
    | --- | --- | --- |
    | `right=0`, `right=1`, … | 0 or 1 | 0 to 1 |

    ## Rewards
    1 for the right action, 0 for another. The right action of the next step is drawn at random: nothing carries over.

    ## Starting State
    A right action drawn at random.

    ## Episode End
    Truncates after `steps` steps. Never terminates: nothing ends there.

    ## Arguments
    - `actions`: how many, 2 or more; 9 by default.
    - `steps`: of an episode, 2 or more; 32 by default.

    ## Information
    `right`: what the right action was.

    ## Version History
    - v0: first.
    """

    def __init__(self, actions: int = 9, steps: int = 32) -> None:
        super().__init__(IdentityGame(1, actions, steps))


class IdentityVectorEnv(GameVectorEnv):
    """`IdentityEnv`, many episodes at once; see `GameVectorEnv`."""

    def __init__(
        self,
        num_envs: int,
        actions: int = 9,
        steps: int = 32,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(IdentityGame(num_envs, actions, steps), autoreset_mode)
