"""The paper's study on a recording: the profiling grid by replay, and what comes of its choices."""

import numpy as np
import pytest

from speckv.paper import protocol, study, timing
from speckv.paper.data import GAMMAS, SIGNALS
from speckv.plugins import make_policy
from speckv.replaying import replay
from speckv.shipped import shipped_costs, shipped_traces


@pytest.fixture(scope="module")
def few():
    """Two prompts of each task of the shipped recording, at all compressions."""
    traces = shipped_traces().load()
    prompts = [np.unique(traces.ids[traces.tasks == task])[:2] for task in np.unique(traces.tasks)]
    return traces.take(np.isin(traces.ids, np.concatenate(prompts)))


@pytest.fixture(scope="module")
def grid(few):
    return study.profile(few, shipped_costs())


def test_the_grid_is_the_replay_of_fixed_gammas(few, grid):
    costs = shipped_costs()
    for gamma in GAMMAS:
        run = replay(make_policy(f"fixed:gamma={gamma}"), few, costs[1])
        drafted = run.gamma > 0
        rows = grid.steps.gamma == gamma
        assert np.array_equal(grid.steps.accepted[rows], run.accepted[drafted])
        assert np.array_equal(grid.seconds[costs[1].name][rows], run.seconds[drafted])
        assert (grid.steps.drafted[rows] <= gamma).all()
    assert set(grid.steps.task) == {"code", "math", "chat", "summarization"}
    starts = np.flatnonzero(np.diff(grid.steps.run, prepend=-1))
    assert (grid.steps.number[starts] == 0).all() and len(starts) == len(GAMMAS) * len(few)


def test_the_signals_are_those_of_the_drafted_block(few, grid):
    random = np.random.default_rng(0)
    for row in random.choice(len(grid.steps), 200, replace=False):
        where = np.array([grid.sequence[row]]), np.array([grid.position[row]])
        block = {
            name: np.array([few.drafted_signal(name, *where, index)[0] for index in range(grid.steps.drafted[row])])
            for name in ("draft_entropy", "draft_top1")
        }
        bits, confidence = block["draft_entropy"] / np.log(2), block["draft_top1"]
        expected = [bits.mean(), confidence.mean(), bits.max(), confidence.min()]
        np.testing.assert_allclose(grid.steps.signals[row], expected, rtol=1e-5)
    assert len(SIGNALS) == 4


def test_what_happens_is_what_the_recording_knows(few, grid):
    """The tokens of a choice are those that the log itself has where that gamma was played."""
    rows = np.flatnonzero(grid.steps.gamma == 6)
    played = protocol.Simulation(rows, {"six": np.full(len(rows), 6)}, {})
    assert np.array_equal(study._play(few, grid, played)["six"], grid.steps.tokens[rows])


def test_decision_times(few):
    inputs = np.array([[1.0, 0.8, 2.0, 0.5, 0.0, 4.0]])
    ridge = protocol.make_predictors()["Ridge"].fit(np.random.default_rng(0).random((50, 6)), np.arange(50.0))
    assert 1e-6 < timing.time_predictor(ridge, inputs, repeats=5) < 0.5


@pytest.mark.slow
def test_numpy_decides_faster_than_scikit_learn(few, grid):
    model = protocol.make_predictors()[protocol.FAST]
    model.fit(protocol.anticipating_inputs(grid.steps), grid.steps.acceptance)
    theirs = timing.time_predictor(model, protocol.anticipating_inputs(grid.steps))
    assert timing.time_policy(few, shipped_costs()) < theirs / 3
