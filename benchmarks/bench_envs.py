"""Environment steps per second of the vector forms, against Gymnasium's SyncVectorEnv of the single ones, in one run.

256 environments on the shipped recording, random actions. The figures are printed beside pytest-benchmark's table.
"""

import time

import gymnasium
import numpy as np
import pytest

import speckv_envs  # noqa: F401 (registers the environments)

ENVIRONMENTS = 256
STEPS = 500
#: What the project promises on a machine with two cores, environment steps per second.
PROMISED = {"speckv/Replay-v0": 300_000}


def play(envs: gymnasium.vector.VectorEnv, actions: np.ndarray) -> None:
    for action in actions:
        envs.step(action)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("speckv/Replay-v0", {}),
        ("speckv/Replay-v0", {"probe": True}),
        ("speckv/ReplayStop-v0", {}),
        ("speckv/Identity-v0", {}),
    ],
    ids=["replay", "replay-probe", "stop", "identity"],
)
def test_vector_form(benchmark, capsys, name: str, arguments: dict, mode: str) -> None:
    vector = gymnasium.make_vec(name, num_envs=ENVIRONMENTS, autoreset_mode=mode, **arguments)
    vector.reset(seed=0)
    actions = np.random.default_rng(0).integers(vector.single_action_space.n, size=(STEPS, ENVIRONMENTS))
    benchmark.pedantic(play, (vector, actions), rounds=7, warmup_rounds=1)
    rate = STEPS * ENVIRONMENTS / benchmark.stats.stats.median

    sync_mode = {"autoreset_mode": vector.metadata["autoreset_mode"]}
    sync = gymnasium.make_vec(
        name, num_envs=ENVIRONMENTS, vectorization_mode="sync", vector_kwargs=sync_mode, **arguments
    )
    sync.reset(seed=0)
    few = actions[:20]
    play(sync, few[:2])
    start = time.perf_counter()
    play(sync, few)
    plain = len(few) * ENVIRONMENTS / (time.perf_counter() - start)
    with capsys.disabled():
        print(
            f"\n{name} {arguments or ''} {mode}: {rate:,.0f} environment steps/s, {plain:,.0f} with SyncVectorEnv, "
            f"{rate / plain:.0f} times"
        )
    assert rate > plain
    if not arguments:
        assert rate >= PROMISED.get(name, 0)
