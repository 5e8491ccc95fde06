"""Gymnasium environments: the length of a draft as a decision problem.

Importing this package registers them; `gymnasium.make("speckv_envs:speckv/Replay-v0")` imports it, too. Those of other
plugins are there after `speckv.plugins.register_environments()`. Each has its page in the docstring of its class:

- `speckv/Replay-v0`, `speckv_envs.replay.ReplayEnv`: one action a step, how many tokens to draft.
- `speckv/ReplayStop-v0`, `speckv_envs.stop.ReplayStopEnv`: stop or go after each drafted token.
- `speckv/ModelPair-v0`, `speckv_envs.live.ModelPairEnv`: one action a step, with real models.
- `speckv/Identity-v0`, `speckv_envs.identity.IdentityEnv`: a learner's sanity check.

`gymnasium.make_vec` gives all but the live one in NumPy, many episodes at once. `speckv.testing.check_env` checks what
an environment like these must keep to.
"""

from collections.abc import Callable

import gymnasium

import speckv


@speckv.hookimpl
def speckv_register_environments(register: Callable[..., None]) -> None:
    def add(name: str, module: str, vector: bool = True, nondeterministic: bool = False) -> None:
        place = f"speckv_envs.{module}:{name}"
        register(
            id=f"speckv/{name}-v0",
            entry_point=f"{place}Env",
            vector_entry_point=f"{place}VectorEnv" if vector else None,
            nondeterministic=nondeterministic,
        )

    add("Replay", "replay")
    add("ReplayStop", "stop")
    add("ModelPair", "live", vector=False, nondeterministic=True)
    add("Identity", "identity")


speckv_register_environments(gymnasium.register)
