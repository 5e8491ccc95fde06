"""What an environment of this package must keep to, as functions that raise AssertionError.

Gymnasium's and stable-baselines3's checkers say whether an environment can be played; these, whether it tells the
truth about speculative decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from speckv.traces import Rollouts

AnyEnv = gymnasium.Env[Any, Any]

#: How the reward follows from an action and its information, by the environment's `reward`.
_REWARDS: dict[str, Callable[[Any, dict[str, Any]], float]] = {
    "throughput": lambda action, info: info["committed"] / info["seconds"] if info["committed"] else 0.0,
    "average": lambda action, info: info["committed"] - info["rate"] * info["seconds"],
    "tokens": lambda action, info: info["committed"],
    "right": lambda action, info: float(action == info["right"]),
}


@dataclass(frozen=True)
class Episode:
    """One episode; `observations` has one more than the others, and starts with that of the reset."""

    started: dict[str, Any]
    observations: list[Any]
    actions: list[Any]
    rewards: list[float]
    infos: list[dict[str, Any]]


def play(env: AnyEnv, seed: int = 0, sequence: int | None = None, longest: int = 10_000) -> Episode:
    """Play one episode with random actions, to its end."""
    env.action_space.seed(seed)
    observation, started = env.reset(seed=seed, options=None if sequence is None else {"sequence": sequence})
    episode = Episode(started, [observation], [], [], [])
    for _ in range(longest):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation in env.observation_space, f"the observation {observation} is outside its space"
        episode.observations.append(observation)
        episode.actions.append(action)
        episode.rewards.append(float(reward))
        episode.infos.append(info)
        if terminated or truncated:
            return episode
    raise AssertionError(f"an episode does not end within {longest} actions")


def check_committed(env: AnyEnv, episodes: int = 5) -> None:
    """A step commits accepted + 1 tokens; the last may be cut where the text ends. Nothing else commits any."""
    for seed in range(episodes):
        infos = play(env, seed).infos
        for index, info in enumerate(infos):
            gamma, accepted, committed, forwards = (
                info[name] for name in ("gamma", "accepted", "committed", "forwards")
            )
            if not committed:
                assert not any(info[name] for name in ("gamma", "accepted", "seconds", "forwards")), (
                    f"action {index} commits nothing, and yet reports a step: {info}"
                )
                continue
            last = index == len(infos) - 1
            assert committed == accepted + 1 or (last and 0 < committed <= accepted), (
                f"action {index} accepts {accepted} tokens and commits {committed}"
            )
            assert 0 <= accepted <= gamma, f"action {index} accepts {accepted} of {gamma} tokens"
            assert forwards in {gamma, gamma + 1}, f"action {index} drafts {gamma} tokens in {forwards} forwards"
            assert info["seconds"] > 0, f"action {index} takes {info['seconds']} seconds"
        assert infos[-1]["committed"], "the last action of an episode commits nothing"


def check_reward(env: AnyEnv, episodes: int = 3) -> None:
    """Every reward can be computed from its action and information, by what the environment's `reward` names."""
    compute = _REWARDS[env.get_wrapper_attr("reward")]
    for seed in range(episodes):
        episode = play(env, seed)
        for index, (reward, info) in enumerate(zip(episode.rewards, episode.infos, strict=True)):
            expected = compute(episode.actions[index], info)
            assert np.isclose(reward, expected, rtol=1e-9), (
                f"the reward of action {index} is {reward}, and {expected} by its information: {info}"
            )


def check_same_episode(make: Callable[[], AnyEnv], seed: int = 3) -> None:
    """The same seed and actions give the same episode, twice in one environment and in another one.

    Of environments that are declared nondeterministic, measured seconds and the rewards made of them may differ.
    """
    env = make()
    first, *others = play(env, seed), play(env, seed), play(make(), seed)
    measured = env.spec is not None and env.spec.nondeterministic
    for other in others:
        assert first.started == other.started, f"one starts with {first.started}, another with {other.started}"
        assert len(first.actions) == len(other.actions), "one episode is longer than another"
        for index, (one, two) in enumerate(zip(first.observations, other.observations, strict=True)):
            assert np.array_equal(one, two), f"observation {index} differs: {one} and {two}"
        for index, (info, info_2) in enumerate(zip(first.infos, other.infos, strict=True)):
            same = info == info_2 or (measured and {**info, "seconds": 0} == {**info_2, "seconds": 0})
            assert same, f"the information of action {index} differs: {info} and {info_2}"
        assert measured or first.rewards == other.rewards, "the rewards differ"


def check_no_future(make: Callable[[Rollouts], AnyEnv], traces: Rollouts, seed: int = 0) -> None:
    """No observation depends on what is recorded of the future.

    An episode is played; then, for each of its observations, the recording is changed wherever the decoder had not
    been by then, and the same actions must lead to the same observations. A drafted token that waits for the target
    has been seen; whether it is right has not.

    Args:
        make: an environment on these traces.
    """
    rng = np.random.default_rng(seed)
    env = make(traces)
    sequence = int(rng.integers(len(traces)))
    episode = play(env, seed, sequence)
    names = env.get_wrapper_attr("names")
    position = 0
    for index, observation in enumerate(episode.observations[:-1]):
        drafted = int(observation[names.index("draft_index")]) if "draft_index" in names else 0
        other = make(change_future(traces, sequence, position, drafted, rng))
        seen, _ = other.reset(seed=seed, options={"sequence": sequence})
        for action in episode.actions[:index]:
            seen, *_ = other.step(action)
        for name, one, two in zip(names, observation, seen, strict=True):
            assert one == two, (
                f"observation {index}, behind {position} committed and {drafted} drafted tokens: {name} is {one}, and "
                f"{two} once the recorded future is changed"
            )
        position += episode.infos[index]["committed"]


def change_future(traces: Rollouts, row: int, position: int, drafted: int, rng: np.random.Generator) -> Rollouts:
    """Traces in which all that comes behind a moment of one sequence is another story.

    Args:
        row: the sequence.
        position, drafted: the moment: so many tokens are committed, and so many of the next step are drafted. They stay
            as they are, but for the first of them being wrong.
    """
    runs, limits = traces.run.copy(), traces.limit.copy()
    signals = {name: array.copy() for name, array in traces.signals.items()}
    off_signals = {name: array.copy() for name, array in traces.off_signals.items()}
    budget = traces.manifest.max_new_tokens
    starts = np.arange(runs.shape[1])
    reaching = (starts <= position) & (starts + runs[row] >= position)  # drafts that are right up to the moment
    runs[row] = np.where(starts > position, 0, np.where(reaching, position - starts, runs[row]))
    roomy = np.minimum(traces.gamma_max, np.maximum(budget - starts - 1, 0))
    length = traces.lengths[row]
    limits[row] = np.where((reaching | (starts > position)) & (starts < length), roomy, limits[row])
    for name, array in signals.items():
        array[row, position:] = rng.random(array.shape[1] - position)
        if name not in off_signals:
            continue
        off = off_signals[name]
        off[row, position:] = rng.random(off[row, position:].shape)
        for index in range(drafted):
            value = traces.drafted_signal(name, np.array([row]), np.array([position]), index)
            if index == 0:
                array[row, position] = value[0]
            else:
                off[row, position, index - 1] = value[0]
    return replace(traces, run=runs, limit=limits, signals=signals, off_signals=off_signals)


def check_vector_form(single: AnyEnv, vector: gymnasium.vector.VectorEnv[Any, Any, Any], seed: int = 0) -> None:
    """Each place of the vector form plays as the single one does, up to the end of its first episode.

    The environments must know `options={"sequence": row}`.
    """
    count = vector.num_envs
    vector.action_space.seed(seed)
    observations, started = vector.reset(seed=seed)
    actions, played = [], []
    going = np.ones(count, dtype=bool)
    while going.any():
        actions.append(vector.action_space.sample())
        played.append(vector.step(actions[-1]))
        going &= ~(played[-1][2] | played[-1][3])
    for place in range(count):
        observation, _ = single.reset(options={"sequence": int(started["sequence"][place])})
        assert np.array_equal(observation, observations[place]), f"place {place} starts with another observation"
        for index, (action, (many, rewards, terminated, truncated, info)) in enumerate(
            zip(actions, played, strict=True)
        ):
            observation, reward, *ended, single_info = single.step(action[place])
            where = f"place {place}, action {index}"
            assert reward == rewards[place], f"{where}: rewards {reward} and {rewards[place]}"
            assert ended == [terminated[place], truncated[place]], f"{where}: only one of the two ends"
            if any(ended) and "final_obs" in info:
                many, info = info["final_obs"], info["final_info"]
            assert np.array_equal(observation, many[place]), f"{where}: {observation} and {many[place]}"
            for name, value in single_info.items():
                assert info[f"_{name}"][place] and info[name][place] == value, f"{where}: {name} differs"
            if any(ended):
                break
