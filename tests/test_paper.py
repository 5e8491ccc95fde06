"""The paper's numbers from the paper's data, to the printed digit."""

import csv

import numpy as np
import pytest

from speckv.paper import protocol
from speckv.paper.data import GAMMAS, PaperData, find_oddities

from .paper_files import find_published, write_paper

TABLE1 = {
    "fp16": {"Fixed-4": 3.67, "Fixed-best": 5.67, "Task-oracle": 2.68, "SpecKV-fast": 5.68},
    "int8": {"Fixed-4": 3.75, "Fixed-best": 5.84, "Task-oracle": 5.43, "SpecKV-fast": 5.85},
    "nf4": {"Fixed-4": 3.78, "Fixed-best": 5.92, "Task-oracle": 4.09, "SpecKV-fast": 5.93},
    "overall": {"Fixed-4": 3.73, "Fixed-best": 5.81, "Task-oracle": 4.07, "SpecKV-fast": 5.82},
}


@pytest.fixture(scope="module")
def paper():
    return PaperData.read(find_published())


@pytest.fixture(scope="module")
def simulation(paper):
    """The policies on the test rows, the forest left out."""
    judge = protocol.make_predictors()[protocol.FAST]
    judge.fit(protocol.anticipating_inputs(paper.steps), paper.steps.acceptance)
    _, test = protocol.split(paper.steps)
    return protocol.simulate(paper.steps, paper.best_gamma, test, {"SpecKV-fast": judge})


def test_records(paper):
    train, test = protocol.split(paper.steps)
    assert (len(paper.steps), len(train), len(test)) == (5112, 4089, 1023)
    assert paper.published["records"] == {"total": 5112, "train": 4089, "test": 1023}


def test_table1(paper, simulation):
    assert protocol.make_table1(paper.steps, simulation) == TABLE1
    printed = paper.published["table1"]
    assert {c: {p: printed[c][p] for p in values} for c, values in TABLE1.items()} == TABLE1


def test_table2(paper, simulation):
    table = protocol.make_table2(paper.steps, simulation)
    assert len(table) == 12 and table == paper.published["table2"]
    assert table[0] == {"compression": "fp16", "task": "code", "fixed_4": 3.95, "speckv": 6.32, "improvement_pct": 60.0}


def test_improvement(paper, simulation):
    assert simulation.improvement_pct == paper.published["improvement_pct"] == 56.0


@pytest.mark.slow  # one and a half million random rows
def test_intervals_and_paired_test(paper, simulation):
    intervals, paired = protocol.bootstrap(simulation)
    printed = paper.published["intervals"]
    assert intervals["Fixed-4"] == {"mean": 3.731, "low": 3.666, "high": 3.794}
    assert intervals == {name: printed[name] for name in intervals} and len(intervals) == 4
    assert (
        paired["p"] == 0.0 and paired["mean_difference"] == paper.published["paired_test"]["mean_difference"] == 2.091
    )


def test_predictors(paper):
    models = {name: protocol.make_predictors()[name] for name in ("Ridge", protocol.FAST)}
    scores = protocol.compare_predictors(paper.steps, models)
    assert scores["MLP-16"] == paper.published["predictors"]["MLP-16"] == {"mse": 0.0896, "correlation": 0.6853}
    assert scores["Ridge"] == {"mse": 0.0909, "correlation": 0.6809}


def test_earlier_predictors(paper):
    scores = protocol.compare_earlier_predictors(paper.steps, forest=False)
    printed = paper.published["earlier_predictors"]
    assert len(scores) == 3 and scores == {name: printed[name] for name in scores}


def test_correlations(paper):
    correlations = protocol.correlate(paper.steps)
    assert correlations["mean_draft_entropy"] == -0.5579 and correlations["mean_draft_confidence"] == 0.5701
    assert all(abs(abs(correlations[name]) - 0.56) < 0.02 for name in ("mean_draft_entropy", "mean_draft_confidence"))


def test_optimal_gammas(paper):
    found = protocol.find_optimal_gammas(paper.runs)
    assert len(found) == 12 and found == paper.published["optimal_gamma"]


def test_share_of_gamma_8(simulation):
    assert np.mean(simulation.choices["SpecKV-fast"] == 8) == pytest.approx(0.93, abs=0.005)


def test_oddities_of_the_step_log(paper):
    oddities = find_oddities(paper.steps)
    assert {name: int(rows.sum()) for name, rows in oddities.items()} == {"cut_short": 178, "overrun": 174}
    # Told independently: what was accepted of what was drafted is the published rate, and runs of 81 tokens overran.
    with (find_published() / "phase2_step_results.csv").open() as file:
        rates = np.array([float(row["acceptance_rate"]) for row in csv.DictReader(file)])
    some = paper.steps.accepted > 0
    np.testing.assert_allclose(paper.steps.accepted[some] / rates[some], paper.steps.drafted[some], atol=1e-6)
    assert np.array_equal(np.unique(paper.steps.run[oddities["overrun"]]), np.flatnonzero(paper.runs.tokens == 81))


def test_differences_name_their_place():
    published = {
        "a": {"x": 1.0, "y": 2.0},
        "rows": [{"name": "n", "value": 3}],
        "unknown": 4,
        "more": {"z": [{"v": 1}]},
    }
    reproduced = {"a": {"x": 1.0, "y": 2.5}, "rows": [{"name": "m", "value": 3}, {"name": "n", "value": 5}]}
    assert protocol.find_differences(published, reproduced) == [
        {"what": "a y", "published": 2.0, "reproduced": 2.5},
        {"what": "rows n value", "published": 3, "reproduced": 5},
        {"what": "unknown", "published": 4, "reproduced": None},
        {"what": "more z v", "published": 1, "reproduced": None},
    ]


def test_rows_in_another_order_do_not_differ():
    rows = [{"compression": "fp16", "task": task, "tokens": tokens} for task, tokens in (("code", 1.0), ("math", 2.0))]
    assert protocol.find_differences(rows[::-1], rows) == []
    (missing,) = protocol.find_differences(rows, rows[:1], "table2")[-1:]
    assert missing == {"what": "table2 fp16 math tokens", "published": 2.0, "reproduced": None}


def test_made_up_data_gives_made_up_numbers(tmp_path, paper, simulation):
    """The digits come from the data: other data gives others."""
    other = PaperData.read(write_paper(tmp_path / "paper"))
    assert protocol.correlate(other.steps) != protocol.correlate(paper.steps)
    assert set(np.unique(other.steps.gamma)) == set(GAMMAS)
