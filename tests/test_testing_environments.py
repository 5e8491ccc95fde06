"""The kit finds nothing wrong with the environments, and what is wrong with each of these bad ones."""

import gymnasium
import numpy as np
import pytest

from speckv.plugins import register_environments
from speckv.testing import CheckFailed, check_env, env_checks, parametrize, report
from speckv.testing.futures import change_future
from speckv.testing.recordings import make_rollouts
from speckv_envs.recorded import ReplayGame, StopGame
from speckv_envs.replay import ReplayEnv, ReplayVectorEnv
from speckv_envs.stop import ReplayStopEnv

register_environments()
#: Other arguments than the usual ones.
ARGUMENTS = {
    "average": ("speckv/Replay-v0", {"reward": "average", "rate": 20.0}),
    "own-rate": ("speckv/Replay-v0", {"reward": "average"}),
    "tokens": ("speckv/Replay-v0", {"reward": "tokens", "gammas": [0, 2, 4, 8]}),
    "accepted": ("speckv/Replay-v0", {"reward": "accepted"}),
    "probe": ("speckv/Replay-v0", {"probe": True}),
    "stop-average": ("speckv/ReplayStop-v0", {"reward": "average", "rate": {"bf16": 20.0, "nf4": 15.0}}),
}
CHECKS = [
    check
    for subject, (identifier, arguments) in ARGUMENTS.items()
    for check in env_checks(identifier, subject=subject, **arguments)
]


@parametrize(CHECKS)
def test_with_other_arguments(check):
    check()


def test_the_live_environment(small_pair, small_prompts, small_costs):
    made = report(
        env_checks(
            "speckv/ModelPair-v0",
            target=small_pair.target,
            draft=small_pair.draft,
            prompts=[prompt.text for prompt in small_prompts[:4]],
            costs=small_costs,
            max_new_tokens=12,
        )
    )
    assert not made.failures, made
    assert sum(result.status == "passed" for result in made.results) == 5


class _Cheat(ReplayEnv):
    """An environment whose game does something else: `change` turns what a method returned into what it should not."""

    base = ReplayGame

    def __init__(self, traces, costs):
        super().__init__(traces, costs, reward=self.pays)
        env = self

        class Game(self.base):
            def play(self, at, actions, rng):
                return env.change(self, "play", super().play(at, actions, rng))

            def observe(self):
                return env.change(self, "observe", super().observe())

        self.game = Game(1, traces, costs, None, self.pays, None, False)

    pays = "throughput"

    def change(self, game, method, answer):
        return answer


class Leaking(_Cheat):
    def change(self, game, method, answer):
        if method == "observe":
            places = np.minimum(game.session.positions, game.traces.tokens.shape[1])
            answer[:, game.names.index("last_gamma")] = np.minimum(game.traces.run[game.session.rows, places], 8)
        return answer


class Overcounting(_Cheat):
    pays = "tokens"

    def change(self, game, method, answer):
        if method == "play":
            answer.info["committed"] += answer.info["committed"] > 0
            answer.rewards[:] = answer.info["committed"]
        return answer


class Overpaying(_Cheat):
    def change(self, game, method, answer):
        if method == "play":
            answer.rewards[:] += 0.01
        return answer


class Random(_Cheat):
    def change(self, game, method, answer):
        if method == "observe":
            answer[:, game.names.index("running_acceptance")] = np.random.default_rng().random()
        return answer


class Seeded(ReplayEnv):
    """Starts from a seed of its own choice where none is given."""

    def __init__(self, traces, costs):
        super().__init__(traces, costs)

    def reset(self, *, seed=7, options=None):
        return super().reset(seed=seed, options=options)


class Single(ReplayEnv):
    """Pays in a number that is not Python's own."""

    def __init__(self, traces, costs):
        super().__init__(traces, costs, reward="tokens")

    def step(self, action):
        observation, reward, *others = super().step(action)
        return observation, np.float32(reward), *others


class Good(ReplayEnv):
    def __init__(self, traces, costs):
        super().__init__(traces, costs)


class Tired(ReplayVectorEnv):
    """Pays less than the single one."""

    def __init__(self, num_envs, traces, costs, autoreset_mode):
        super().__init__(num_envs, traces, costs, autoreset_mode=autoreset_mode)

    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        return observations, rewards * 0.99, *others


#: Check -> (environment, its vector form), and the other checks that find fault with it as well.
SPECIMENS = {
    "passes_gymnasiums_checker": (Seeded, None, set()),
    "passes_stable_baselines_checker": (Single, None, set()),
    "repeats_its_episodes": (Random, None, {"passes_gymnasiums_checker", "sees_no_future"}),
    "commits_what_is_accepted": (Overcounting, None, {"sees_no_future"}),
    "pays_what_its_information_says": (Overpaying, None, set()),
    "sees_no_future": (Leaking, None, set()),
    "plays_alike_in_vector_form": (Good, Tired, set()),
}


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_bad_environment_is_caught(name):
    env, vector, also = SPECIMENS[name]
    identifier = f"bad/{env.__name__}-v0"
    gymnasium.register(id=identifier, entry_point=env, vector_entry_point=vector)
    try:
        made = report(env_checks(identifier))
        assert {result.check.name for result in made.failures} == {name} | also, str(made)
        assert all(result.message and "\n" not in result.message for result in made.failures)
        with pytest.raises(CheckFailed, match=f"{identifier}: "):
            check_env(identifier)
    finally:
        del gymnasium.registry[identifier]


def test_every_check_has_a_bad_environment():
    assert {check.name for check in CHECKS} == set(SPECIMENS), "add an environment that the new check catches"


def test_a_stop_game_that_leaks():
    class LeakingStop(ReplayStopEnv):
        def __init__(self, traces, costs):
            super().__init__(traces, costs)

            class Game(StopGame):
                def observe(self):
                    return Leaking.change(None, self, "observe", super().observe())

            self.game = Game(1, traces, costs, "throughput", None)

    gymnasium.register(id="bad/Stop-v0", entry_point=LeakingStop)
    try:
        made = report(env_checks("bad/Stop-v0"))
    finally:
        del gymnasium.registry["bad/Stop-v0"]
    (failed,) = made.failures
    assert failed.check.name == "sees_no_future" and "last_gamma is" in failed.message


def test_the_changed_future_is_another_one():
    traces = make_rollouts()
    rng = np.random.default_rng(0)
    changed = change_future(traces, 0, 10, 3, rng)
    assert changed.run[0, 10] == 0 and (changed.run[0, :10] <= 10 - np.arange(10)).all()
    for name, values in traces.signals.items():
        assert (changed.signals[name][0, :10] == values[0, :10]).all()
        assert (changed.signals[name][0, 11:] != values[0, 11:]).mean() > 0.9
        assert (changed.signals[name][1:] == values[1:]).all()
    for index in range(3):
        one, two = (t.drafted_signal("draft_top1", np.array([0]), np.array([10]), index) for t in (traces, changed))
        assert one == two
    assert (changed.limit[0] >= traces.limit[0]).all() and changed.limit.max() <= traces.gamma_max
    assert (changed.tokens[0, :10] == traces.tokens[0, :10]).all()
    assert (changed.tokens[0, 10:] != traces.tokens[0, 10:]).mean() > 0.9
    assert changed.lengths[0] != traces.lengths[0] and (changed.lengths[1:] == traces.lengths[1:]).all()
