"""Gymnasium environments: the choice of gamma as a decision problem.

Importing this package registers `speckv/Replay-v0` with Gymnasium.
"""

import gymnasium

gymnasium.register(id="speckv/Replay-v0", entry_point="speckv_envs.replay:ReplayEnv")
