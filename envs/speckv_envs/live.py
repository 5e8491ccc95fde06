"""speckv/ModelPair-v0: choosing gamma while real models decode."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.live.decoder import Prompt, SpeculativeDecoder
from speckv.live.drafting import Drafter
from speckv.live.models import LanguageModel
from speckv.live.sampling import Sampler
from speckv.observations import BEFORE, Layout, Observations
from speckv.policy import Policy, State
from speckv_envs.games import as_actions, check_started, space_of
from speckv_envs.recorded import as_gammas
from speckv_envs.rewards import REWARDS, check_reward, rate_of


class _Told(Policy):
    """Plays the gamma that it was told last."""

    name = "told"
    features = BEFORE

    def __init__(self, gamma: int = 0) -> None:
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.gamma


class ModelPairEnv(gymnasium.Env[Observations, np.int64]):
    """
    ## Description
    An episode is one text, decoded by a real model pair. In each step the agent chooses how many tokens the draft
    model proposes; `SpeculativeDecoder` runs the step, and its duration is measured. With a greedy sampler the same
    actions give the same tokens, but never the same seconds: the environment is nondeterministic.

    ## Action Space
    `Discrete(len(gammas))`: an index into `gammas`. A gamma beyond what the text still has room for is cut, and a
    draft ends with an end-of-sequence token.

    ## Observation Space
    `Box(0, high, (19,), float32)`: the 19 numbers of `speckv/Replay-v0`, in the same order, units and ranges.

    ## Rewards
    The forms of `speckv/Replay-v0`, with measured seconds.

    ## Starting State
    A prompt drawn at random (`options={"sequence": index}` chooses one), nothing committed.

    ## Episode End
    Terminates with an end-of-sequence token or `max_new_tokens` tokens. Never truncates.

    ## Arguments
    - `target`: a `speckv.live.models.LanguageModel`.
    - `draft`: another one with the same tokenizer, or a drafter that gives the draft's signals.
    - `prompts`: texts, chats or token ids.
    - `costs`: a `CostModel` of this pair on this machine, for `cost_ratio` and the default of `rate`.
    - `max_new_tokens`: of each text; 64 by default.
    - `gammas`: the choices; by default 0 to 8.
    - `reward`, `rate`: as of `speckv/Replay-v0`.
    - `sampler`: greedy by default.

    ## Information
    After a reset `sequence`, the index of the prompt. After a step what `speckv/Replay-v0` tells.

    ## Version History
    - v0: first.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Drafter,
        prompts: Sequence[Prompt],
        costs: CostModel,
        max_new_tokens: int = 64,
        gammas: Sequence[int] = tuple(range(9)),
        reward: str = "throughput",
        rate: float | Mapping[str, float] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        if not prompts:
            raise SpecKVError("there is no prompt to decode; give one or more")
        self.gammas = as_gammas(gammas, max(gammas, default=0))
        gamma_max = int(self.gammas.max())
        self._told = _Told()
        self.decoder = SpeculativeDecoder(target, draft, self._told, sampler=sampler, gamma_max=gamma_max, costs=costs)
        self.prompts = [self.decoder.tokens_of(prompt) for prompt in prompts]
        self.max_new_tokens, self.reward = max_new_tokens, check_reward(reward)
        context = sum(map(len, self.prompts)) // len(prompts)
        self.rate = rate_of(target.compression, rate, costs, context)
        self.layout = Layout(BEFORE)
        self.names = self.layout.names
        self.observation_space = space_of(self.layout, gamma_max, max_new_tokens)
        self.action_space = gymnasium.spaces.Discrete(len(self.gammas))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(self.prompts)))
        index = (options or {}).get("sequence", drawn)
        if not isinstance(index, int | np.integer) or not 0 <= index < len(self.prompts):
            raise SpecKVError(f"options['sequence'] is {index}; it must be from 0 to {len(self.prompts) - 1}")
        noise = int(self.np_random.integers(2**31))
        self._decoding = self.decoder.start([self.prompts[index]], self.max_new_tokens, seed=noise)
        return self._observe(), {"sequence": int(index)}

    def step(self, action: np.int64) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        check_started(hasattr(self, "_decoding"))
        (index,) = as_actions(action, (), len(self.gammas))
        self._told.gamma = int(self.gammas[index])
        self._decoding.step()
        step = self._decoding.sequences[0].steps[-1]
        info: dict[str, Any] = {
            "gamma": step.gamma,
            "accepted": step.accepted,
            "committed": step.committed,
            "seconds": step.seconds,
            "forwards": step.forwards,
        }
        if self.reward == "average":
            info["rate"] = self.rate
        numbers = (np.array([number]) for number in (step.committed, step.accepted, step.seconds, self.rate))
        reward = float(REWARDS[self.reward](*numbers)[0])
        return self._observe(), reward, not self._decoding.going, False, info

    def _observe(self) -> Observations:
        observation: Observations = self.layout.vectors(self._decoding.tracker.before(1), 1)[0]
        return observation
