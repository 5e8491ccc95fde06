"""The Gymnasium environment replays what `replay` replays."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import speckv_envs  # noqa: F401 (registers the environments)
from speckv import SpecKVError, replay
from speckv_policies.fixed import Fixed

from .synthetic import make_costs, make_rollouts


@pytest.fixture
def env():
    return gymnasium.make("speckv/Replay-v0", traces=make_rollouts(), costs=make_costs()).unwrapped


def test_passes_gymnasiums_checker_without_a_warning(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("gammas", [[], [-1, 2], [0, 9]])
def test_gammas_that_were_not_recorded_are_refused(gammas):
    with pytest.raises(SpecKVError, match="gammas must be from 0 to 8"):
        gymnasium.make("speckv/Replay-v0", traces=make_rollouts(), costs=make_costs(), gammas=gammas)


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_an_episode_is_a_replay(env, gamma):
    run = replay(Fixed(gamma), env.traces, env.costs)
    for row in range(len(env.traces)):
        env.reset(options={"sequence": row})
        steps, ended = [], False
        while not ended:
            observation, reward, ended, truncated, info = env.step(np.int64(gamma))
            steps.append((info["gamma"], info["accepted"], info["seconds"]))
            assert reward == pytest.approx(info["committed"] / info["seconds"])
            assert observation in env.observation_space and not truncated
        mine = run.sequence == row
        assert [step[:2] for step in steps] == list(zip(run.gamma[mine], run.accepted[mine], strict=True))
        np.testing.assert_allclose([step[2] for step in steps], run.seconds[mine])


def test_committed_tokens_add_up_to_the_sequence(env):
    _, info = env.reset(seed=5)
    committed, ended = 0, False
    while not ended:
        _, _, ended, _, step = env.step(env.action_space.sample())
        committed += step["committed"]
    assert committed == env.traces.lengths[info["sequence"]]
