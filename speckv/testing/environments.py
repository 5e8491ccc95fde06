"""What an environment must keep to.

Gymnasium's and stable-baselines3's checkers say whether an environment can be played; these, whether it tells the
truth about speculative decoding.
"""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from speckv.testing.checks import Check, CheckFailed, CheckSkipped, expecting, make_checks, require, require_package
from speckv.testing.futures import change_future
from speckv.testing.recordings import make_costs, make_rollouts

if TYPE_CHECKING:
    import gymnasium

    AnyEnv = gymnasium.Env[Any, Any]

#: How the reward follows from an action and its information, by the environment's `reward`.
_REWARDS: dict[str, Callable[[Any, dict[str, Any]], float]] = {
    "throughput": lambda action, info: info["committed"] / info["seconds"] if info["committed"] else 0.0,
    "average": lambda action, info: info["committed"] - info["rate"] * info["seconds"],
    "tokens": lambda action, info: info["committed"],
    "accepted": lambda action, info: info["accepted"] / info["seconds"] if info["committed"] else 0.0,
    "right": lambda action, info: float(action == info["right"]),
}


def env_checks(
    identifier: str,
    *,
    subject: str | None = None,
    expected_failed_checks: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Check]:
    """The checks of an environment that is registered with Gymnasium.

    Args:
        identifier: as of `gymnasium.make`.
        subject: what reports call it; its identifier by default.
        expected_failed_checks: name of a check -> why it fails.
        arguments: of the environment. If it takes `traces` and `costs`, it gets small ones made up by the kit, unless
            they are given; they are changed to see whether it looks at the future.

    Raises:
        SpecKVError: no check has such a name.
        gymnasium.error.Error: there is no such environment.
    """
    import gymnasium

    spec = gymnasium.spec(identifier)
    case = _Case(identifier, arguments)
    functions: list[Callable[[_Case], None]] = [
        passes_gymnasiums_checker,
        passes_stable_baselines_checker,
        repeats_its_episodes,
        commits_what_is_accepted,
        pays_what_its_information_says,
        sees_no_future,
    ]
    if spec.vector_entry_point is not None:
        functions.append(plays_alike_in_vector_form)
    return expecting(make_checks(subject or identifier, functions, case), expected_failed_checks)


class _Case:
    """An environment to be checked: how to make it."""

    def __init__(self, identifier: str, arguments: dict[str, Any]) -> None:
        self.identifier, self._given = identifier, arguments

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """What it is made with."""
        import gymnasium
        from gymnasium.envs import registration

        entry = gymnasium.spec(self.identifier).entry_point
        creator: Any = entry if callable(entry) else registration.load_env_creator(str(entry))
        own = inspect.signature(creator).parameters
        made_up = {"traces": make_rollouts(), "costs": make_costs()} if {"traces", "costs"} <= set(own) else {}
        return made_up | self._given

    def make(self, **changed: Any) -> "AnyEnv":
        import gymnasium

        return gymnasium.make(self.identifier, **self.arguments | changed)


@dataclass(frozen=True)
class Episode:
    """One episode; `observations` has one more than the others, and starts with that of the reset."""

    started: dict[str, Any]
    observations: list[Any]
    actions: list[Any]
    rewards: list[float]
    infos: list[dict[str, Any]]


def play(env: "AnyEnv", seed: int = 0, sequence: int | None = None, longest: int = 10_000) -> Episode:
    """Play one episode with random actions, to its end."""
    env.action_space.seed(seed)
    observation, started = env.reset(seed=seed, options=None if sequence is None else {"sequence": sequence})
    episode = Episode(started, [observation], [], [], [])
    for _ in range(longest):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        require(observation in env.observation_space, f"the observation {observation} is outside its space")
        # A host may be shown its own arrays.
        episode.observations.append(copy.copy(observation))
        episode.actions.append(action)
        episode.rewards.append(float(reward))
        episode.infos.append(info)
        if terminated or truncated:
            return episode
    raise CheckFailed(f"an episode does not end within {longest} actions")


def passes_gymnasiums_checker(case: _Case) -> None:
    """Gymnasium's own checker finds nothing, and warns of nothing."""
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(case.make().unwrapped)


def passes_stable_baselines_checker(case: _Case) -> None:
    """The checker of stable-baselines3 finds nothing, and warns of nothing."""
    require_package("stable_baselines3", "rl")
    from stable_baselines3.common.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(case.make().unwrapped)


def repeats_its_episodes(case: _Case) -> None:
    """The same seed and actions give the same episode, twice in one environment and in another one.

    Of environments that are declared nondeterministic, measured seconds and the rewards made of them may differ.
    """
    env, seed = case.make(), 3
    first, *others = play(env, seed), play(env, seed), play(case.make(), seed)
    measured = env.spec is not None and env.spec.nondeterministic
    for other in others:
        require(first.started == other.started, f"one starts with {first.started}, another with {other.started}")
        require(len(first.actions) == len(other.actions), "one episode is longer than another")
        for index, (one, two) in enumerate(zip(first.observations, other.observations, strict=True)):
            require(np.array_equal(one, two), f"observation {index} differs: {one} and {two}")
        for index, (info, info_2) in enumerate(zip(first.infos, other.infos, strict=True)):
            same = info == info_2 or (measured and {**info, "seconds": 0} == {**info_2, "seconds": 0})
            require(same, f"the information of action {index} differs: {info} and {info_2}")
        require(measured or first.rewards == other.rewards, "the rewards differ")


def commits_what_is_accepted(case: _Case) -> None:
    """A step commits accepted + 1 tokens; the last may be cut where the text ends. Nothing else commits any."""
    env = case.make()
    for seed in range(5):
        infos = play(env, seed).infos
        if not any("committed" in info for info in infos):
            raise CheckSkipped("its information has no `committed`: it decodes nothing")
        for index, info in enumerate(infos):
            gamma, accepted, committed, forwards = (
                info[name] for name in ("gamma", "accepted", "committed", "forwards")
            )
            if not committed:
                require(
                    not any(info[name] for name in ("gamma", "accepted", "seconds", "forwards")),
                    f"action {index} commits nothing, and yet reports a step: {info}",
                )
                continue
            last = index == len(infos) - 1
            require(
                committed == accepted + 1 or (last and 0 < committed <= accepted),
                f"action {index} accepts {accepted} tokens and commits {committed}",
            )
            require(0 <= accepted <= gamma, f"action {index} accepts {accepted} of {gamma} tokens")
            require(forwards in {gamma, gamma + 1}, f"action {index} drafts {gamma} tokens in {forwards} forwards")
            require(info["seconds"] > 0, f"action {index} takes {info['seconds']} seconds")
        require(infos[-1]["committed"], "the last action of an episode commits nothing")


def pays_what_its_information_says(case: _Case) -> None:
    """Every reward can be computed from its action and information, by what the environment's `reward` names."""
    env = case.make()
    if not env.has_wrapper_attr("reward"):
        raise CheckSkipped(f"it has no attribute `reward` that names one of {', '.join(_REWARDS)}")
    name = env.get_wrapper_attr("reward")
    require(name in _REWARDS, f"its `reward` is {name!r}; it must be one of {', '.join(_REWARDS)}")
    for seed in range(3):
        episode = play(env, seed)
        for index, (reward, info) in enumerate(zip(episode.rewards, episode.infos, strict=True)):
            expected = _REWARDS[name](episode.actions[index], info)
            require(
                np.isclose(reward, expected, rtol=1e-9),
                f"the reward of action {index} is {reward}, and {expected} by its information: {info}",
            )


def sees_no_future(case: _Case) -> None:
    """No observation depends on what is recorded of the future.

    An episode is played; then, for each of its observations, the recording is changed wherever the decoder had not
    been by then, and the same actions must lead to the same observations. A drafted token that waits for the target
    has been seen; whether it is right has not.
    """
    if "traces" not in case.arguments:
        raise CheckSkipped("it takes no `traces` that could be changed")
    traces = case.arguments["traces"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sequence = int(rng.integers(len(traces)))
        env = case.make()
        episode = play(env, seed, sequence)
        require(env.has_wrapper_attr("names"), "it has no attribute `names` that says what the numbers it shows are")
        names = env.get_wrapper_attr("names")
        position = 0
        for index, observation in enumerate(episode.observations[:-1]):
            drafted = int(observation[names.index("draft_index")]) if "draft_index" in names else 0
            other = case.make(traces=change_future(traces, sequence, position, drafted, rng))
            seen, _ = other.reset(seed=seed, options={"sequence": sequence})
            for action in episode.actions[:index]:
                seen, *_ = other.step(action)
            for name, one, two in zip(names, observation, seen, strict=True):
                require(
                    one == two,
                    f"observation {index}, behind {position} committed and {drafted} drafted tokens: {name} is {one}, "
                    f"and {two} once the recorded future is changed",
                )
            position += episode.infos[index]["committed"]


def plays_alike_in_vector_form(case: _Case) -> None:
    """Each place of the vector form plays as the single one does, up to the end of its first episode.

    The environments must know `options={"sequence": row}`, or start without any choice of their own.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    if "traces" not in case.arguments:
        raise CheckSkipped("it takes no `traces`: what an episode is made of can't be chosen")
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        vector = gymnasium.make_vec(
            case.identifier,
            num_envs=24,
            vectorization_mode="vector_entry_point",
            autoreset_mode=mode,
            **case.arguments,
        )
        _require_alike(case.make(), vector)


def _require_alike(single: "AnyEnv", vector: "gymnasium.vector.VectorEnv[Any, Any, Any]") -> None:
    count = vector.num_envs
    vector.action_space.seed(0)
    observations, started = vector.reset(seed=0)
    actions, played = [], []
    going = np.ones(count, dtype=bool)
    while going.any():
        actions.append(vector.action_space.sample())
        played.append(vector.step(actions[-1]))
        going &= ~(played[-1][2] | played[-1][3])
    for place in range(count):
        observation, _ = single.reset(options={"sequence": int(started["sequence"][place])})
        require(np.array_equal(observation, observations[place]), f"place {place} starts with another observation")
        for index, (action, (many, rewards, terminated, truncated, info)) in enumerate(
            zip(actions, played, strict=True)
        ):
            observation, reward, *ended, single_info = single.step(action[place])
            where = f"place {place}, action {index}"
            require(reward == rewards[place], f"{where}: rewards {reward} and {rewards[place]}")
            require(ended == [terminated[place], truncated[place]], f"{where}: only one of the two ends")
            if any(ended) and "final_obs" in info:
                many, info = info["final_obs"], info["final_info"]
            require(np.array_equal(observation, many[place]), f"{where}: {observation} and {many[place]}")
            for name, value in single_info.items():
                require(info[f"_{name}"][place] and info[name][place] == value, f"{where}: {name} differs")
            if any(ended):
                break
