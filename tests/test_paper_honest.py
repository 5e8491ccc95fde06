"""What the paper's protocol hides: splits, lagged signals, replay-match, and tokens per second."""

import dataclasses

import numpy as np
import pytest

from speckv.paper import honest, protocol
from speckv.paper.data import COMPRESSIONS, GAMMAS, PaperData
from speckv.paper.honest import Evidence

from .paper_files import find_published, write_paper


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Made-up data of the same form."""
    return PaperData.read(write_paper(tmp_path_factory.mktemp("made") / "paper", prompts=2))


@pytest.fixture(scope="module")
def paper():
    return PaperData.read(find_published())


def test_lagged_signals_are_the_previous_steps(made):
    lagged = honest.find_lagged_signals(made.steps)
    first = made.steps.number == 0
    assert (lagged[first] == 0).all() and first.sum() == 96
    later = np.flatnonzero(~first)
    assert np.array_equal(lagged[later], made.steps.signals[later - 1])
    assert np.array_equal(made.steps.run[later], made.steps.run[later - 1])


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_is_in_one_fold(seed):
    random = np.random.default_rng(seed)
    tasks = np.repeat(["code", "math"], 200)
    prompts = np.array([f"{task} {random.integers(7)}" for task in tasks])
    fold = honest.deal_prompts(prompts, tasks, seed)
    assert all(len(np.unique(fold[prompts == prompt])) == 1 for prompt in np.unique(prompts))
    for task in np.unique(tasks):  # each task in equal shares: 7 prompts in 5 folds
        dealt = [len(np.unique(prompts[(tasks == task) & (fold == number)])) for number in range(honest.FOLDS)]
        assert sorted(dealt) == [1, 1, 1, 2, 2]


def test_prompts_are_resampled_within_their_task():
    tasks = np.array(["code", "math", "code", "code"])
    weights = honest.draw_prompts(tasks, times=500)
    assert (weights[:, tasks == "code"].sum(axis=1) == 3).all() and (weights[:, 1] == 1).all()
    assert weights[:, 0].std() > 0.5
    assert np.array_equal(weights, honest.draw_prompts(tasks, times=500))


def test_fixed_gammas_are_worth_what_their_runs_took(made):
    evidence = Evidence(made)
    for gamma in GAMMAS:
        value = evidence.value(np.full(len(made.steps), gamma))
        for code, compression in enumerate(COMPRESSIONS):
            runs = (made.runs.compression == compression) & (made.runs.gamma == gamma)
            tokens, seconds, steps = (getattr(made.runs, name)[runs].sum() for name in ("tokens", "seconds", "steps"))
            assert value.throughput[0, code] == pytest.approx(tokens / seconds)
            assert value.tokens_per_step[0, code] == pytest.approx(tokens / steps)
        assert value.matched == (made.steps.gamma == gamma).sum()


def test_a_decision_costs_its_time(made):
    evidence = Evidence(made)
    four = np.full(len(made.steps), 4)
    free, slow = evidence.value(four), evidence.value(four, decision=0.06)
    np.testing.assert_allclose(free.throughput / slow.throughput, 2.0)  # a step of gamma 4 takes 60 ms in this data
    np.testing.assert_allclose(free.tokens_per_step, slow.tokens_per_step)


def test_choices_at_random_are_worth_the_mean_of_the_gammas(made):
    """A policy that chooses without looking is worth the mix of what its gammas are worth."""
    evidence = Evidence(made)
    random = np.random.default_rng(1)
    values = [evidence.value(random.choice(GAMMAS, len(made.steps))).tokens_per_step[0] for _ in range(40)]
    fixed = [evidence.value(np.full(len(made.steps), gamma)) for gamma in GAMMAS]
    mean = np.mean([one.tokens_per_step[0] for one in fixed], axis=0)
    np.testing.assert_allclose(np.mean(values, axis=0), mean, rtol=0.02)


def test_complete_steps_tell_every_gamma(made):
    evidence = Evidence(made)
    for gamma in GAMMAS:
        value = evidence.value_of_complete_rows(np.full(len(made.steps), gamma))
        rows = (made.steps.gamma == 8) & (made.steps.compression == "int8")
        expected = np.mean([min(accepted, gamma) + 1 for accepted in made.steps.accepted[rows]])
        assert value.tokens_per_step[0, 1] == pytest.approx(expected)
    at_8 = np.full(len(made.steps), 8)
    np.testing.assert_allclose(evidence.value_of_complete_rows(at_8).throughput, evidence.value(at_8).throughput)


def test_weights_pick_prompts(made):
    evidence = Evidence(made)
    code = made.steps.task == "code"
    value = evidence.value(np.full(len(made.steps), 2), weights=evidence.weigh(code))
    rows = code & (made.steps.gamma == 2) & (made.steps.compression == "fp16")
    assert value.tokens_per_step[0, 0] == pytest.approx(made.steps.tokens[rows].mean())


def test_the_held_out_prompts_are_not_learned(made):
    """What happens to a fold's own acceptance can't move its predictions."""
    fold = honest.deal_prompts(made.steps.prompt, made.steps.task)
    lagged = honest.find_lagged_signals(made.steps)
    ridge = protocol.make_predictors()["Ridge"]
    before = honest.hold_out(ridge, made.steps, lagged, fold)
    accepted = np.where(fold == 0, 0, made.steps.accepted)
    after = honest.hold_out(ridge, dataclasses.replace(made.steps, accepted=accepted), lagged, fold)
    assert np.array_equal(before.by_gamma[fold == 0], after.by_gamma[fold == 0])
    assert not np.array_equal(before.by_gamma[fold != 0], after.by_gamma[fold != 0])


def test_gammas_weighed_against_a_rising_cost(made):
    """Made-up steps take 20 ms and 10 ms a token: weighing them must not play 8 as tokens alone do."""
    evidence = Evidence(made)
    fold, lagged = honest.deal_prompts(made.steps.prompt, made.steps.task), honest.find_lagged_signals(made.steps)
    ridge = protocol.make_predictors()["Ridge"]
    by_tokens = honest.hold_out(ridge, made.steps, lagged, fold).choices
    weighed = honest.weigh_cost(ridge, evidence, lagged, fold)
    assert set(np.unique(weighed)) <= set(GAMMAS) and weighed.mean() < by_tokens.mean()
    assert (evidence.value(weighed).throughput > evidence.value(by_tokens).throughput).all()
    assert set(np.unique(honest.tune_fixed(evidence, fold))) <= set(GAMMAS)


def test_published_timings(paper):
    """Gamma 8 against gamma 4, and the best fixed gammas: sums over the published runs."""
    evidence = Evidence(paper)
    rates = {gamma: evidence.value(np.full(len(paper.steps), gamma)).throughput[0] for gamma in GAMMAS}
    np.testing.assert_allclose(100 * (rates[8] / rates[4] - 1), [-16.3, 7.3, -9.9], atol=0.06)
    assert [max(GAMMAS, key=lambda gamma: rates[gamma][code]) for code in range(3)] == [2, 6, 4]
