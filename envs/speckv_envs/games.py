"""What all environments share: a game of n episodes side by side, played one at a time or all at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from speckv.errors import SpecKVError
from speckv.features import BoolArray, FloatArray, IntArray
from speckv.observations import Layout, Observations

#: Values by name, one an episode.
Info = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Played:
    """What came of one action in each of n episodes; each array is (n,)."""

    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    info: Info


def space_of(layout: Layout, gamma_max: int, max_new_tokens: int) -> gymnasium.Space[Observations]:
    """Where the vectors of a layout lie."""
    high = layout.largest(gamma_max, max_new_tokens)
    return gymnasium.spaces.Box(np.zeros_like(high), high)


def check_started(started: bool) -> None:
    """Raise Gymnasium's error if there was no reset yet."""
    if not started:
        raise gymnasium.error.ResetNeeded("there is no episode to step in; call reset() before the first step()")


def as_actions(given: Any, shape: tuple[int, ...], count: int, at: IntArray | EllipsisType = ...) -> IntArray:
    """Actions as integers, of this shape.

    Args:
        given: what the agent chose.
        shape: () for a single environment, else (environments,).
        count: how many actions there are.
        at: of the environments whose actions count; all, if not told otherwise.

    Raises:
        SpecKVError: they are no integers, not of that shape, or one that counts is not from 0 to `count` - 1.
    """
    actions = np.asarray(given)
    if actions.shape != shape:
        wanted = f"{shape[0]} actions are needed, one for each environment," if shape else "one action is needed,"
        raise SpecKVError(f"{wanted} and the shape of these is {actions.shape}")
    if actions.dtype.kind not in "iu":
        raise SpecKVError(f"actions are integers, and these are {actions.dtype}")
    actions = np.atleast_1d(actions[at])
    if (wrong := actions[(actions < 0) | (actions >= count)]).size:  # as an index, one below 0 would mean another
        raise SpecKVError(f"the action {wrong[0]} is not one from 0 to {count - 1}")
    return actions.astype(np.int64)


class Game(Protocol):
    """Episodes side by side."""

    episodes: int
    observation_space: gymnasium.Space[Observations]
    action_space: gymnasium.spaces.Discrete
    #: What the numbers of an observation are.
    names: tuple[str, ...]
    #: How rewards are made; see `speckv_envs.rewards.REWARDS`.
    reward: str

    def start(self, at: IntArray, rng: np.random.Generator, options: Mapping[str, Any]) -> Info:
        """Start new episodes at the indices `at`, and say what they are."""

    def observe(self) -> Observations:
        """A new array (episodes, len(names)); of episodes that have ended, the last observation."""

    def play(self, at: IntArray, actions: IntArray, rng: np.random.Generator) -> Played:
        """Act in the episodes at the indices `at`, increasing; both are (n,)."""


class GameEnv(gymnasium.Env[Observations, np.int64]):
    """A single episode of a game."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(self, game: Game) -> None:
        self.game = game
        self.observation_space, self.action_space = game.observation_space, game.action_space
        self.names, self.reward = game.names, game.reward
        self._started = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        super().reset(seed=seed)
        started = self.game.start(np.arange(1), self.np_random, options or {})
        self._started = True
        return self.game.observe()[0], _single(started)

    def step(self, action: np.int64) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        check_started(self._started)
        actions = as_actions(action, (), int(self.game.action_space.n))
        played = self.game.play(np.arange(1), actions, self.np_random)
        ended = bool(played.terminated[0]), bool(played.truncated[0])
        return self.game.observe()[0], float(played.rewards[0]), *ended, _single(played.info)


def _single(info: Info) -> dict[str, Any]:
    return {name: values[0].item() for name, values in info.items()}


class GameVectorEnv(VectorEnv[Observations, IntArray, npt.NDArray[Any]]):
    """All episodes of a game at once.

    An episode that has ended starts anew by itself: in the next step, whose action and reward do not count
    (`AutoresetMode.NEXT_STEP`, Gymnasium's default), or in the same step (`AutoresetMode.SAME_STEP`), which puts the
    last observation and information into `info["final_obs"]` and `info["final_info"]`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium declares it so)
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(self, game: Game, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> None:
        mode = AutoresetMode(autoreset_mode)
        if mode is AutoresetMode.DISABLED:
            raise ValueError("episodes that have ended start anew: autoreset_mode is NEXT_STEP or SAME_STEP")
        self.metadata = {**self.metadata, "autoreset_mode": mode}
        self.game, self.num_envs = game, game.episodes
        self.single_observation_space, self.single_action_space = game.observation_space, game.action_space
        self.observation_space = batch_space(game.observation_space, self.num_envs)
        self.action_space = batch_space(game.action_space, self.num_envs)
        self.names, self.reward = game.names, game.reward
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._waiting = np.zeros(self.num_envs, dtype=bool)
        self._started = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        super().reset(seed=seed)
        everywhere = np.ones(self.num_envs, dtype=bool)
        started = self.game.start(np.arange(self.num_envs), self.np_random, options or {})
        self._waiting, self._started = ~everywhere, True
        return self.game.observe(), self._masked(started, everywhere)

    def step(
        self, actions: IntArray
    ) -> tuple[Observations, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        check_started(self._started)
        starting, playing = self._waiting, ~self._waiting
        at = np.flatnonzero(playing)
        actions = as_actions(actions, (self.num_envs,), int(self.game.action_space.n), at)
        info = self._start(starting)
        played = self.game.play(at, actions, self.np_random)
        observations = self.game.observe()
        rewards, terminated, truncated = (
            self._spread(values, at) for values in (played.rewards, played.terminated, played.truncated)
        )
        ended = terminated | truncated
        happened = {name: self._spread(values, at) for name, values in played.info.items()}
        if self._same_step and ended.any():
            info["final_obs"], info["_final_obs"] = self._objects(observations, ended), ended
            info["final_info"], info["_final_info"] = self._masked(happened, ended), ended
            info |= self._start(ended)
            observations[ended] = self.game.observe()[ended]
            playing = ~ended
        self._waiting = np.zeros_like(ended) if self._same_step else ended
        return observations, rewards, terminated, truncated, info | self._masked(happened, playing)

    def _start(self, mask: BoolArray) -> dict[str, Any]:
        """Start the episodes where `mask` (episodes,) is True."""
        at = np.flatnonzero(mask)
        if not len(at):
            return {}
        started = self.game.start(at, self.np_random, {})
        return self._masked({name: self._spread(values, at) for name, values in started.items()}, mask)

    def _spread(self, values: npt.NDArray[Any], at: IntArray) -> npt.NDArray[Any]:
        """(episodes,): `values` at the indices `at`, 0 elsewhere."""
        if len(at) == self.num_envs:
            return values
        whole = np.zeros(self.num_envs, dtype=values.dtype)
        whole[at] = values
        return whole

    def _objects(self, observations: Observations, mask: BoolArray) -> npt.NDArray[np.object_]:
        """Some of the observations in Gymnasium's form: each an object, None elsewhere."""
        objects = np.full(self.num_envs, None, dtype=object)
        for index in np.flatnonzero(mask):
            objects[index] = observations[index].copy()
        return objects

    @staticmethod
    def _masked(info: Info, mask: BoolArray) -> dict[str, Any]:
        """Information in Gymnasium's form: beside each array, where it holds."""
        masked: dict[str, Any] = {}
        for name, values in info.items():
            masked[name], masked[f"_{name}"] = values, mask
        return masked
