"""Estimates from step logs: by hand on small ones, and against the exact replay on many."""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from speckv.cli import main
from speckv.comparison import folds_of
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.evaluation import evaluate, to_steps
from speckv.evaluation.coverage import study
from speckv.evaluation.estimates import _over_draws, _tail
from speckv.evaluation.estimators import ESTIMATORS, DoublyRobust, Hazard, Ips, KaplanMeier, Match, Snips
from speckv.evaluation.paths import Paths, _past, can_replay
from speckv.evaluation.recording import BEFORE, CHOSEN, join, to_held_out_steps
from speckv.evaluation.situations import Situations, make_situations, ordered
from speckv.evaluation.survival import HazardModel, kaplan_meier
from speckv.plugins import load_costs, make_policy
from speckv.replaying import replay
from speckv.shipped import shipped_traces
from speckv.steplogs import StepLog

from .synthetic import make_costs, make_rollouts, make_sequences, write_dataset

LOTS = 'explore:policy="fixed:gamma=4",epsilon=1,largest=8'


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=24, compressions=("nf4",), gamma_max=10, budget=40, seed=5)


@pytest.fixture(scope="module")
def costs():
    return make_costs(controller={"heuristic": (1e-4, 0.0)})


@pytest.fixture(scope="module")
def log(traces, costs) -> StepLog:
    return to_steps(make_policy(LOTS).fit(traces, costs), traces, costs)


def by_hand(**changed) -> Situations:
    """Five steps of two sequences. The policy wants 2, 2, 1, 0 and 3 tokens."""
    columns = {
        "sequence": np.array([0, 0, 0, 1, 1]),
        "chosen": np.array([2, 1, 1, 0, 3]),
        "drafted": np.array([2, 1, 1, 0, 3]),
        "accepted": np.array([1, 1, 0, 0, 3]),
        "wanted": np.array([2, 2, 1, 0, 3]),
        "propensity": np.array([0.5, 0.5, 0.25, 0.2, 0.4]),
        "seconds": np.tile([1.0, 2.0, 3.0, 4.0], (5, 1)),
        "catching_up": np.zeros(5),
        "played_seconds": np.array([3.0, 2.0, 2.0, 1.0, 4.0]),
        "covariates": np.zeros((5, 0)),
        "weight": np.ones(5),
        "replayed": np.zeros((0, 3)),
    }
    return Situations(**columns | changed)


WHOLE = np.ones((1, 2))


def test_weighted_estimates_by_hand():
    steps = by_hand()
    # The policy agrees in steps 0, 2, 3 and 4; they committed 2, 1, 1, 4 tokens and count 2, 4, 5, 2.5 times.
    tokens, seconds = 2 * 2 + 4 * 1 + 5 * 1 + 2.5 * 4, 2 * 3 + 4 * 2 + 5 * 1 + 2.5 * 4
    np.testing.assert_allclose(Match().estimate(steps, WHOLE), [[8 / 4, 10 / 4]])
    np.testing.assert_allclose(Ips().estimate(steps, WHOLE), [[tokens / 5, seconds / 5]])
    np.testing.assert_allclose(Snips().estimate(steps, WHOLE), [[tokens / 13.5, seconds / 13.5]])
    twice = by_hand(weight=np.array([1.0, 1.0, 2.0, 1.0, 1.0]))  # step 2 stands for two of the policy's
    np.testing.assert_allclose(Match().estimate(twice, WHOLE), [[9 / 5, 12 / 5]])
    # Resampled: the second sequence twice, the first one not at all.
    np.testing.assert_allclose(Match().estimate(steps, np.array([[0.0, 2.0]])), [[5 / 2, 5 / 2]])


def test_kaplan_meier_by_hand():
    steps = by_hand()
    # Depth 1: four steps tried, 1 of them failed. Depth 2: steps 0 and 4 tried, 1 failed. Depth 3: step 4 alone.
    hazards = kaplan_meier(steps.accepted, steps.chosen, steps, WHOLE, 4)
    np.testing.assert_allclose(hazards, [[3 / 4, 1 / 2, 1, 1]])
    twice = by_hand(weight=np.array([1.0, 1.0, 2.0, 1.0, 1.0]))  # the one that failed at once stands for two
    np.testing.assert_allclose(kaplan_meier(twice.accepted, twice.chosen, twice, WHOLE, 2), [[3 / 5, 1 / 2]])
    # Where the policy wants the same, those hazards count as one step more. Where it wants 2, two tried depth 1, none
    # failed, and one depth 2, and failed; where it wants 1, one failed at depth 1; where it wants 3, one got through.
    two, one, three = 1 + 11 / 12 * (1 + 1 / 4), 1 + 3 / 8, 1 + 7 / 8 * (1 + 3 / 4 * (1 + 1))
    tokens = (2 * two + one + 1 + three) / 5
    np.testing.assert_allclose(KaplanMeier().estimate(steps, WHOLE), [[tokens, (3 + 3 + 2 + 1 + 4) / 5]])


def test_where_the_text_leaves_no_room():
    """Two of three tokens were drafted, and both accepted: the third did not get in, whoever asks for it."""
    steps = by_hand(
        sequence=np.zeros(5, dtype=int),
        chosen=np.full(5, 3),
        drafted=np.array([2, 3, 3, 3, 3]),
        accepted=np.array([2, 3, 3, 3, 3]),
        wanted=np.full(5, 3),
        propensity=np.ones(5),
        catching_up=np.full(5, 0.5),
        played_seconds=np.array([3.5, 4.5, 4.5, 4.5, 4.5]),
    )
    assert Ips().estimate(steps, np.ones((1, 1))).tolist() == [[19 / 5, 21.5 / 5]]
    tokens, seconds = KaplanMeier().estimate(steps, np.ones((1, 1)))[0]
    assert tokens == pytest.approx(19 / 5) and seconds == pytest.approx((3 + 4 * 4 + 0.5 * 4) / 5)


def test_the_log_is_the_replay(traces, costs):
    policy = make_policy("heuristic")
    log, run = to_steps(policy, traces, costs), replay(policy, traces, costs)
    assert np.array_equal(log.gamma, run.gamma) and np.array_equal(log.accepted, run.accepted)
    assert np.array_equal(log.seconds, run.seconds) and (log.propensity == 1).all()
    starts = np.flatnonzero(np.diff(run.sequence, prepend=-1))
    assert (log.step[starts] == 0).all() and (np.diff(log.step) == 1).sum() == len(log) - len(starts)
    assert (log.signals[CHOSEN] >= log.gamma).all() and set(log.signals) == {*BEFORE, CHOSEN}


def test_propensities_are_the_chances(traces, costs):
    """Of what `explore` chose: how often each gamma was played is what its propensities say, and 1 / p adds up."""
    policy = make_policy('explore:policy="fixed:gamma=4",epsilon=0.5,largest=8').fit(traces, costs)
    log = to_steps(policy, traces, costs)
    chosen = log.signals[CHOSEN].astype(int)
    assert set(np.round(log.propensity[chosen == 4], 12)) == {round(0.5 + 0.5 / 9, 12)}
    assert set(np.round(log.propensity[chosen != 4], 12)) == {round(0.5 / 9, 12)}
    share = (chosen == 4).mean()
    assert abs(share - (0.5 + 0.5 / 9)) < 4 * np.sqrt(0.25 / len(log))
    for gamma in range(9):
        weight = np.where(chosen == gamma, 1 / log.propensity, 0).mean()
        assert abs(weight - 1) < 5 * np.sqrt(9 / 0.5 / len(log))


SELF = (
    "none", "fixed:gamma=3", "best-fixed", "heuristic", "gammatune", "draft-window", "hill-climb", "leviathan", "dsde",
    "mlp", "hysteresis", "off-switch",
)  # fmt: skip


@pytest.mark.parametrize("spec", SELF)
def test_a_policy_chooses_in_its_own_log_what_it_chose(spec, traces, costs):
    """Features and states that are rebuilt from a log are those of the replay."""
    policy = make_policy(spec).fit(traces, costs)
    log = to_steps(policy, traces, costs)
    log = ordered(log, np.ones(len(log), dtype=bool))
    situations = make_situations(log, policy, costs, traces.gamma_max, measured=True)
    assert np.array_equal(situations.wanted, log.signals[CHOSEN])
    assert situations.agrees.all()
    (found,) = evaluate(policy, log, costs, resamples=50)
    run = replay(policy, traces, costs)
    assert found.of("match").tokens_per_step == pytest.approx((run.accepted + 1).mean(), rel=0.02)
    assert found.of("ips").throughput == pytest.approx(found.of("match").throughput)
    throughput = (run.accepted + 1).sum() / run.seconds.sum()
    assert found.of("path").throughput == pytest.approx(throughput, rel=1e-9)
    # What a step leaves to the next one is counted where it is caused: up to the last steps it is the same.
    assert found.of("match").throughput == pytest.approx(throughput, rel=0.02)


def test_the_hazard_is_kaplan_meier_without_covariates(log, traces, costs):
    situations = make_situations(ordered(log, np.ones(len(log), bool)), make_policy("fixed:gamma=5"), costs, 8)
    weights = np.ones((1, situations.sequences))
    bare = replace(situations, covariates=np.zeros((len(log), 0)))
    curve = kaplan_meier(bare.accepted, bare.chosen, bare, weights, 5)
    # The model does not know that the text's end leaves no room, and draws its intercepts a little to 0.
    np.testing.assert_allclose(HazardModel.fit(bare, weights, 1e-6).hazards(bare.covariates[:1], 5), curve, atol=1e-4)
    one, other = (kind().estimate(bare, weights)[0] for kind in (Hazard, KaplanMeier))
    np.testing.assert_allclose(one, other, rtol=0.01)


def test_one_newton_step_is_nearly_a_fit(log, costs):
    situations = make_situations(ordered(log, np.ones(len(log), bool)), make_policy("fixed:gamma=5"), costs, 8)
    drawn = np.random.default_rng(0).multinomial(
        situations.sequences, [1 / situations.sequences] * situations.sequences
    )
    both = np.vstack([np.ones(situations.sequences), drawn])
    step = HazardModel.fit(situations, both).hazards(situations.covariates, 8, 1)
    fitted = HazardModel.fit(situations, both[::-1]).hazards(situations.covariates, 8, 0)
    before = HazardModel.fit(situations, both).hazards(situations.covariates, 8, 0)
    assert np.abs(step - fitted).mean() < 0.25 * np.abs(before - fitted).mean()


def simulated(rows: int = 60_000) -> tuple[Situations, float]:
    """Steps in easy and in hard places, where log and policy draft more in easy ones; and the policy's throughput."""
    rng = np.random.default_rng(0)
    easy = rng.random(rows) < 0.5
    chance = np.where(easy, 0.9, 0.5)
    odds = np.where(easy[:, None], [0.05, 0.15, 0.3, 0.5], [0.5, 0.3, 0.15, 0.05])
    chosen = (rng.random((rows, 1)) > np.cumsum(odds, axis=1)).sum(axis=1)
    accepted = np.minimum(rng.geometric(1 - chance) - 1, chosen)
    wanted = np.where(easy, 3, 1)
    steps = by_hand(
        sequence=np.sort(rng.integers(300, size=rows)),
        chosen=chosen,
        drafted=chosen,
        accepted=accepted,
        wanted=wanted,
        propensity=odds[np.arange(rows), chosen],
        seconds=np.tile([1.0, 1.5, 2.0, 2.5], (rows, 1)),
        catching_up=np.full(rows, 0.1),
        played_seconds=1 + 0.5 * chosen + 0.1 * (accepted == chosen) * (chosen > 0),
        covariates=easy[:, None] * 2.0 - 1,
        weight=np.ones(rows),
    )
    tokens = 0.5 * (1 + 0.9 + 0.9**2 + 0.9**3) + 0.5 * (1 + 0.5)
    return steps, tokens / (0.5 * (2.5 + 0.1 * 0.9**3) + 0.5 * (1.5 + 0.1 * 0.5))


#: Throughput where each of these steps drafts three tokens.
ALWAYS_THREE = sum((1 + p + p**2 + p**3) / 2 for p in (0.9, 0.5)) / (2.5 + 0.1 * (0.9**3 + 0.5**3) / 2)


def rate_of(kind, steps: Situations) -> float:
    tokens, seconds = kind().estimate(steps, np.ones((1, steps.sequences)))[0]
    return float(tokens / seconds)


def test_each_is_right_where_it_promises_to_be():
    steps, truth = simulated()
    for kind in (KaplanMeier, Ips, Snips, Hazard, DoublyRobust):
        assert rate_of(kind, steps) == pytest.approx(truth, rel=0.01), kind
    assert abs(rate_of(Match, steps) / truth - 1) > 0.02  # what is chosen depends on where
    # So it does for a policy that makes no difference between the places, and cannot tell them apart.
    always = replace(steps, wanted=np.full_like(steps.wanted, 3))
    for kind in (Ips, Snips, Hazard, DoublyRobust):
        assert rate_of(kind, always) == pytest.approx(ALWAYS_THREE, rel=0.01), kind
    assert abs(rate_of(KaplanMeier, always) / ALWAYS_THREE - 1) > 0.02


def test_doubly_robust_forgives_one_of_the_two():
    steps, truth = simulated()
    blind = replace(steps, covariates=np.zeros((len(steps.wanted), 0)))
    skewed = np.where(steps.covariates[:, 0] > 0, 0.9, 0.2)
    assert (
        abs(rate_of(Hazard, blind) / truth - 1)
        > 0.02
        < abs(rate_of(Snips, replace(steps, propensity=skewed)) / truth - 1)
    )
    assert rate_of(DoublyRobust, blind) == pytest.approx(truth, rel=0.01)
    assert rate_of(DoublyRobust, replace(steps, propensity=skewed)) == pytest.approx(truth, rel=0.01)


def played(spec, log, traces, costs, seed=0) -> tuple[Situations, Situations]:
    """All steps of a log, and those that begin where the policy begins one."""
    log = ordered(log, np.ones(len(log), dtype=bool))
    policy = make_policy(spec).fit(traces, costs)
    every = make_situations(log, policy, costs, traces.gamma_max)
    paths = Paths(log, every, traces.gamma_max)
    return every, paths.play(policy, costs, np.ones(every.sequences), np.random.default_rng(seed))


@pytest.mark.parametrize("spec", ["fixed:gamma=2", "fixed:gamma=8", "heuristic", "mlp"])
def test_steps_that_begin_where_the_policy_begins_one_stand_for_all_of_them(spec, log, traces, costs):
    every, own = played(spec, log, traces, costs)
    steps = own.replayed[:, 2].sum()
    assert len(own.wanted) < steps and own.weight.min() == 1 and own.weight.max() > 1.2
    assert own.weight.sum() == pytest.approx(steps, rel=0.03)
    # The same texts; at the end of one whose budget is not known, the last token may be one too many.
    assert np.isin(own.replayed[:, 0] - every.by_sequence(every.accepted + 1)[:, 0], [0, 1]).all()


def test_runs_behind_what_is_unknown():
    """One text in which the draft was right, wrong, unknown, right, right, wrong, unknown, right, and the end."""
    steps = by_hand(
        sequence=np.array([0, 0, 0, 0]),
        chosen=np.array([2, 0, 3, 0]),
        drafted=np.array([2, 0, 3, 0]),
        accepted=np.array([1, 0, 2, 0]),
        wanted=np.zeros(4, dtype=int),
        propensity=np.ones(4),
        seconds=np.ones((4, 4)),
        catching_up=np.zeros(4),
        played_seconds=np.ones(4),
        covariates=np.zeros((4, 0)),
        weight=np.ones(4),
    )
    log = StepLog(np.array(["a"] * 4), np.arange(4), steps.drafted, steps.accepted, compression=np.array(["nf4"] * 4))
    paths = Paths(log, steps, 3)
    np.testing.assert_array_equal(paths.right, [[1, 0, np.nan, 1, 1, 0, np.nan]])
    # Behind each: wrong; hidden; two right ones and a wrong one; one; none; hidden; the end.
    assert paths.behind.tolist() == [[0, -1, 1, 1, 0, -1, -1]]
    # Of the three right tokens two have a wrong one behind, one has a run of one; of the wrong ones nothing is known.
    np.testing.assert_allclose(
        paths._likelihood_ratios(np.ones(1)), [(2 + 1) / 7 * 4, (1 + 1) / 7 * 4, 4 / 7, 4 / 7, 1]
    )
    twice = paths._likelihood_ratios(np.array([2.0]))
    np.testing.assert_allclose(twice[:2], [(4 + 1) / 10 * 4, (2 + 1) / 10 * 4])


def test_what_the_text_was_like_before():
    right = np.array([[True, True, False, True]])
    since, share, _, length = _past(right)[0].T
    np.testing.assert_allclose(np.expm1(since), [0, 1, 2, 0, 1])
    np.testing.assert_allclose(np.expm1(length), [0, 1, 2, 3, 4])
    # Nothing says 1/2 once; each token fades by 0.8.
    sums, sizes = [0.5], [1.0]
    for token in right[0]:
        sums.append(0.8 * sums[-1] + token)
        sizes.append(0.8 * sizes[-1] + 1)
    np.testing.assert_allclose(share, np.divide(sums, sizes))


def test_rebuilt_paths_are_the_recorded_ones(log, traces, costs):
    policy = make_policy("fixed:gamma=5")
    log = ordered(log, np.ones(len(log), dtype=bool))
    situations = make_situations(log, policy, costs, traces.gamma_max)
    paths = Paths(log, situations, traces.gamma_max)
    order = np.argsort([f"{name} at nf4" for name in traces.ids])
    right = (traces.tokens == traces.draft_tokens)[order]
    inside = np.arange(right.shape[1]) < traces.lengths[order][:, None]
    known = ~np.isnan(paths.right[:, : right.shape[1]]) & inside
    assert np.array_equal(paths.right[:, : right.shape[1]][known] == 1, right[known])
    assert known.sum() / inside.sum() > 0.6
    # A log of steps that were all rejected leaves nothing to draw: replayed, it is the recording.
    whole = np.where(np.isnan(paths.right[:, : right.shape[1]]), right, paths.right[:, : right.shape[1]])
    paths.right = np.hstack([whole, np.full((len(whole), paths.right.shape[1] - right.shape[1]), np.nan)])
    paths.situations = replace(situations, drafted=situations.drafted + 1)
    rebuilt = replay(policy, paths.draw(np.ones(len(order)), np.random.default_rng(0)), costs)
    recorded = replay(policy, traces.take(order), costs)
    assert (rebuilt.accepted + 1).sum() / rebuilt.seconds.sum() == pytest.approx(
        (recorded.accepted + 1).sum() / recorded.seconds.sum(), rel=0.01
    )


def test_a_text_as_long_as_those_that_were_cut_had_their_budget(log, traces, costs):
    """Though no draft of its own was cut: a step near its end has room for as many tokens as are left, less one."""
    log = ordered(log, np.ones(len(log), dtype=bool))
    paths = Paths(log, make_situations(log, make_policy("none"), costs, 8), 8)
    length = traces.manifest.max_new_tokens
    was_cut = np.unique(paths.situations.sequence[log.gamma < log.signals[CHOSEN]])
    never_cut = np.setdiff1d(np.flatnonzero(paths.lengths == length), was_cut)
    assert len(never_cut)
    for sequence in never_cut:
        assert paths.limit[sequence, length - 9 : length].tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_the_logs_own_seconds(log, costs):
    """They are those of the cost model here, so that both say the same."""
    for spec in ("none", "fixed:gamma=4", "heuristic"):
        (own,), (modelled,) = (evaluate(make_policy(spec), log, c, resamples=20, draws=5) for c in (None, costs))
        assert own.costs == "the log's own seconds"
        for estimate in own.estimates:
            assert estimate.throughput == pytest.approx(modelled.of(estimate.estimator).throughput, rel=0.03)


def test_intervals_hold_the_estimate_and_shrink(traces, costs):
    policy = make_policy("fixed:gamma=4")
    widths = []
    for rows in (slice(0, 8), slice(0, 24)):
        part = traces.take(np.arange(24)[rows])
        log = to_steps(make_policy(LOTS).fit(part, costs), part, costs)
        (found,) = evaluate(policy, log, costs, resamples=200)
        for estimate in found.estimates:
            assert estimate.interval[0] < estimate.throughput < estimate.interval[1]
            assert estimate.tokens_interval[0] < estimate.tokens_per_step < estimate.tokens_interval[1]
        widths.append(np.mean([e.interval[1] - e.interval[0] for e in found.estimates]))
    assert widths[1] < 0.9 * widths[0]


def test_intervals_of_few_sequences_are_wider():
    """2.5 % of a normal distribution are left out at either end of ever so many, less of few: Student's quantile."""
    tails = [_tail(sequences) for sequences in (2, 5, 20, 80, 10**6)]
    assert tails == sorted(tails) and tails[-1] == pytest.approx(0.025, rel=1e-4)
    assert stats.norm.ppf(tails[3]) == pytest.approx(stats.t.ppf(0.025, 79) * np.sqrt(80 / 79))


class Counter(Match):
    """An estimator that says which draw it was shown, and how often the first sequence counts."""

    def estimate(self, situations, weights):
        return np.column_stack([np.full(len(weights), situations.accepted[0]), weights[:, 0]])


@pytest.mark.parametrize("goes_with", [1, 2])
@pytest.mark.parametrize("draws", [1, 2, 5])
def test_a_resample_goes_with_as_many_draws_as_the_estimator_says(goes_with, draws):
    played = [by_hand(accepted=np.full(5, 2.0**number)) for number in range(draws)]
    counts = np.arange(12.0)[:, None] * [[1, 0]]
    estimator = Counter()
    estimator.draws = goes_with
    values = _over_draws(estimator, played, counts)
    np.testing.assert_allclose(values[:, 1], counts[:, 0])
    assert values[0, 0] == pytest.approx(sum(2.0**number for number in range(draws)) / draws)
    for number, value in enumerate(values[1:, 0], start=1):
        of_it = {(number - back) % draws for back in range(goes_with)}
        assert value == pytest.approx(np.mean([2.0**draw for draw in of_it]))


def test_the_same_seed_is_the_same_result(log, costs):
    one, other, third = (evaluate(make_policy("heuristic"), log, costs, seed=s, resamples=50) for s in (1, 1, 2))
    assert one == other != third


def doubts(policy, log, costs) -> str:
    with pytest.warns(SpecKVWarning):
        (found,) = evaluate(policy, log, costs, resamples=20)
    return " | ".join(found.warnings)


def without(log: StepLog, rows, **changed) -> StepLog:
    columns = {name: values[rows] for name, values in (log.columns | changed).items()}
    return StepLog.from_columns(columns, {})


def test_doubts_are_told(log, costs):
    four, every = make_policy("fixed:gamma=4"), np.ones(len(log), dtype=bool)
    others = without(log, log.signals[CHOSEN] != 4)
    told = doubts(four, others, costs)
    assert "never asked for 4 tokens, which the policy wants in 100% of the steps" in told and "only 0 steps" in told
    (found,) = evaluate(four, others, costs, resamples=20)
    assert {e.estimator for e in found.estimates} == {"kaplan-meier", "hazard", "doubly-robust", "path"}
    told = doubts(four, without(log, every, propensity=log.propensity / 4), costs)
    assert 2 < float(re.search(r"average ([\d.]+) and not 1", told)[1]) < 8
    unweighted = StepLog.from_columns({n: v for n, v in log.columns.items() if n != "propensity"}, {})
    assert "no propensities" in doubts(four, unweighted, costs)
    (found,) = evaluate(four, unweighted, costs, resamples=20)
    assert found.effective_steps is None and "ips" not in {e.estimator for e in found.estimates}
    gap = without(log, log.step != 1)
    with pytest.warns(SpecKVWarning, match="lack steps of theirs"):
        evaluate(four, gap, costs, resamples=20)
    deep = without(log, log.signals[CHOSEN] <= 3)
    with pytest.warns(SpecKVWarning, match="5 is beyond what the log knows"):
        evaluate(make_policy("fixed:gamma=5"), deep, costs, gamma_max=8, resamples=20)


def test_a_good_log_raises_no_doubt(traces, costs):
    log = to_steps(make_policy('explore:policy="fixed:gamma=4",epsilon=1,largest=4').fit(traces, costs), traces, costs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecKVWarning)
        (found,) = evaluate(make_policy("fixed:gamma=4"), log, costs, resamples=20)
    agreeing = (log.signals[CHOSEN] == 4).sum()
    assert 50 < found.effective_steps < agreeing and abs(found.agreement - 1 / 5) < 0.1


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        ("confidence:threshold=0.4,cap=8", {}, "does not decide before the step alone"),
        ("oracle", {}, "does not decide before the step alone"),
        ("ucb1", {}, "learns from its own steps"),
        ("fixed:gamma=9", {}, "plays gamma 9, above the gamma_max of 8"),
        ("fixed", {"compression": None}, "does not say the target's compression"),
        ("fixed", {"seconds": None}, "has no seconds"),
        ("mlp", {"signal_last_mean_entropy": None}, "reads last_mean_entropy, which the log has not"),
        ("mlp", {"signal_last_mean_entropy": np.nan}, "which is unknown in"),
    ],
)
def test_what_no_log_can_tell_is_one_line(spec, change, message, log, traces, costs):
    columns = log.columns
    for name, value in change.items():
        columns[name] = np.full(len(log), value)
        if value is None:
            del columns[name]
    policy = make_policy(spec)
    if spec == "mlp":
        policy.fit(traces, costs)
    with pytest.raises(SpecKVError, match=message) as caught:
        evaluate(policy, StepLog.from_columns(columns, {}), None if "seconds" in change else costs)
    assert "\n" not in str(caught.value)


def test_an_empty_log(costs):
    empty = StepLog(np.array([], dtype=str), *np.zeros((3, 0), dtype=np.int64))
    with pytest.raises(SpecKVError, match="holds no step"):
        evaluate(make_policy("none"), empty, costs)


def test_who_looks_at_outcomes_alone():
    assert can_replay(make_policy("heuristic")) and not can_replay(make_policy("mlp"))


def test_who_learns_plays_prompts_that_it_was_not_fitted_to(costs):
    traces = make_rollouts(prompts=6, gamma_max=8, budget=24)
    policy = make_policy("mlp")
    log = to_held_out_steps(policy, traces, costs, folds=3)
    assert not policy.fitted and log.provenance["fitted to"] == "the other prompts, in 3 folds"
    fold_of = folds_of(traces, 3, seed=0)
    for fold in range(3):
        other = make_policy("mlp").fit(traces.take(fold_of != fold), costs)
        expected = to_steps(other, traces.take(fold_of == fold), costs)
        rows = np.isin(log.sequence, expected.sequence)
        for name, column in expected.columns.items():
            np.testing.assert_array_equal(log.columns[name][rows], column)
    assert len(set(log.sequence)) == len(traces)
    for spec in ("heuristic", LOTS):  # nothing is learned, lots are drawn as ever
        alone = to_steps(make_policy(spec).fit(traces, costs), traces, costs)
        assert np.array_equal(to_held_out_steps(make_policy(spec), traces, costs).gamma, alone.gamma)
    with pytest.raises(SpecKVError, match="one prompt only"):
        to_held_out_steps(policy, traces.take(traces.ids == traces.ids[0]), costs)


def test_several_policies_in_one_log(traces, costs):
    logs = {name: to_steps(make_policy(f"fixed:gamma={name}"), traces, costs) for name in ("2", "4")}
    both = join(logs)
    assert len(both) == sum(map(len, logs.values())) and set(both.gamma[both.signals[CHOSEN] == 2]) <= {0, 1, 2}
    assert len(set(both.sequence)) == 2 * len(traces) and both.provenance["logs"]["2"]["policy"] == "Fixed(gamma=2)"


def test_a_joined_log_keeps_propensities_of_lots_alone(traces, costs):
    """Of policies that draw none, weights would say of a gamma that it is worth what its share of the log is."""
    lots = {
        name: to_steps(make_policy(f"{LOTS},random_state={name}").fit(traces, costs), traces, costs)
        for name in ("1", "2")
    }
    (found,) = evaluate(make_policy("fixed:gamma=4"), join(lots), costs, resamples=20)
    assert {"ips", "snips", "doubly-robust"} <= {estimate.estimator for estimate in found.estimates}
    fixed = {"3": to_steps(make_policy("fixed:gamma=3"), traces, costs)}
    assert join(lots | fixed).propensity is None and join(lots).propensity is not None
    assert fixed["3"].propensity is not None and join(fixed).propensity is not None


def test_what_one_of_several_logs_lacks_is_unknown_there(traces, costs):
    whole = to_steps(make_policy("fixed:gamma=3"), traces, costs)
    lacking = {"seconds", "task", f"signal_{CHOSEN}"}
    bare = StepLog.from_columns({n: v for n, v in whole.columns.items() if n not in lacking}, {})
    both = join({"whole": whole, "bare": bare})
    assert np.array_equal(both.seconds[: len(whole)], whole.seconds) and np.isnan(both.seconds[len(whole) :]).all()
    assert set(both.task[len(whole) :]) == {""} and np.isnan(both.signals[CHOSEN][len(whole) :]).all()
    assert np.array_equal(both.gamma, np.tile(whole.gamma, 2))


def test_one_sequence_has_no_interval(log, costs):
    one = without(log, log.sequence == log.sequence[0])
    four = make_policy("fixed:gamma=4")
    told = doubts(four, one, costs)
    assert "holds one sequence" in told and "average" not in told
    (found,) = evaluate(four, one, costs, resamples=20)
    assert found.estimates and all(e.interval is None and e.tokens_interval is None for e in found.estimates)
    few = without(log, np.isin(log.sequence, np.unique(log.sequence)[:5]))
    told = doubts(four, few, costs)
    assert "holds only 5 sequences" in told and "average" not in told
    (found,) = evaluate(four, few, costs, resamples=20)
    assert all(e.interval is not None for e in found.estimates)


def test_ips_is_left_out_where_weights_do_not_average_1(traces, costs):
    (found,) = evaluate(make_policy("fixed:gamma=2"), to_steps(make_policy("heuristic"), traces, costs), costs)
    assert any("average" in doubt and "ips is left out" in doubt for doubt in found.warnings)
    assert {"ips", "snips"} & {estimate.estimator for estimate in found.estimates} == {"snips"}


def test_several_logs_on_the_command_line(log, costs, tmp_path):
    """As `decode --log` leaves them: one text a file, which none of them could be evaluated on by itself."""
    paths = []
    for number, name in enumerate(np.unique(log.sequence)[:4]):
        paths.append(str(tmp_path / f"{number}.parquet"))
        without(log, log.sequence == name).save(paths[-1])
    run = CliRunner().invoke
    options = ["--policy", "fixed:gamma=4", "--json", str(tmp_path / "out.json")]
    done = run(main, ["evaluate", *paths, *options])
    assert done.exit_code == 0 and "only 4 sequences" in done.stderr, done.output
    (found,) = json.loads((tmp_path / "out.json").read_text())["evaluations"]
    assert found["sequences"] == 4 and "ips" in {estimate["estimator"] for estimate in found["estimates"]}
    alone = run(main, ["evaluate", paths[0], "--policy", "fixed:gamma=4"])
    assert alone.exit_code == 0 and "not known" in alone.stdout and "one sequence" in alone.stderr
    nothing = run(main, ["evaluate", "--policy", "none"])
    assert nothing.exit_code == 2 and len(nothing.stderr.splitlines()) == 1


def test_a_policy_fitted_to_the_prompts_of_the_log_is_told(log, traces, costs, tmp_path):
    log.save(tmp_path / "log.parquet")
    for name, prompts in (("same", range(6)), ("others", range(24, 30))):
        sequences = make_sequences(prompts=30, compressions=("nf4",), gamma_max=10, budget=40, seed=5)
        write_dataset(tmp_path / name, [sequences[prompt] for prompt in prompts], gamma_max=10)
    command = ["evaluate", str(tmp_path / "log.parquet"), "--policy", "best-fixed", "--traces"]
    told = {name: CliRunner().invoke(main, [*command, str(tmp_path / name)]) for name in ("same", "others")}
    assert all(done.exit_code == 0 for done in told.values()), told
    assert "was fitted to prompts of the log" in told["same"].stderr
    assert "was fitted to prompts of the log" not in told["others"].stderr


def test_evaluate_on_the_command_line(log, costs, tmp_path):
    log.save(tmp_path / "log.parquet")
    costs.save(tmp_path / "costs.json")
    run = CliRunner().invoke
    command = ["evaluate", str(tmp_path / "log.parquet"), "--policy", "fixed:gamma=2", "--policy", "heuristic"]
    done = run(main, [*command, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "doubly-robust" in done.stdout and "the log's own seconds" in done.stdout
    value = json.loads((tmp_path / "out.json").read_text())
    assert [evaluation["policy"] for evaluation in value["evaluations"]] == ["fixed-2", "heuristic"]
    assert run(main, [*command, "--costs", str(tmp_path / "costs.json")]).exit_code == 0
    for more, message in [
        (["--json", str(tmp_path / "out.json")], "exists already"),
        (["--policy", "hazard"], "does not decide before the step alone"),
        (["--costs", "nowhere"], "expected a cost model"),
        (["--gamma-max", "1000"], "is not in the range"),  # tables of all lengths of drafts grow with its square
    ]:
        failed = run(main, [*command, *more])
        assert failed.exit_code == 2 and message in failed.stderr and failed.stdout == ""
    bare = StepLog.from_columns({n: v for n, v in log.columns.items() if n != "seconds"}, {})
    bare.save(tmp_path / "bare.parquet")
    failed = run(main, ["evaluate", str(tmp_path / "bare.parquet"), "--policy", "none"])
    assert failed.exit_code == 2 and "holds no seconds; say with --costs" in failed.stderr


def test_a_study_knows_the_truth(traces, costs):
    """A policy that is evaluated on logs of its own reaches what they say, up to the draw of sequences."""
    own = 'explore:policy="fixed:gamma=3",epsilon=0.001'
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)
        rows = study(traces, costs, own, [make_policy("fixed:gamma=3")], seeds=6, resamples=60, draws=3)
    assert {row.estimator for row in rows} == {kind.name for kind in ESTIMATORS}
    for row in rows:
        assert abs(row.bias) < 0.05 and row.half_width > row.spread / 3 > 0 and 0 <= row.covers <= 1, row


SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "step_logs.py"
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "step-logs.md"


def test_the_page_holds_the_tables():
    """One row for each estimator that the page explains, policy and log."""
    page = PAGE.read_text(encoding="utf-8")
    tables = page.split("<!-- tables -->")[1].split("<!-- end -->")[0]
    for kind in ESTIMATORS:
        assert f"| `{kind.name}` |" in page and tables.count(f" | {kind.name} | ") == 2 * 6


@pytest.mark.slow
def test_the_first_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = PAGE.read_text(encoding="utf-8").split("\n\n    speckv ")[1].split("\n\n")[0]
    commands = [line.strip().removeprefix("speckv ") for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        done = CliRunner().invoke(main, shlex.split(command))
        assert done.exit_code == 0, f"{command}\n{done.output}"


@pytest.mark.slow
def test_the_script_fills_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end -->\nbehind\n")
    subprocess.run([sys.executable, SCRIPT, "--seeds", "1", "--docs", page], check=True, capture_output=True)
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and text.endswith("behind\n")
    assert text.count("| doubly-robust |") == 12


@pytest.mark.slow
def test_intervals_hold_the_replay_at_their_rate():
    """Of 200 logs of the shipped recording that a random policy left, for every estimator and policy: 95 % of 200 have
    a standard error of 1.5 %, and none is further than three of them below."""
    traces, costs = shipped_traces().load(), load_costs("epyc-float32")
    traces = traces.take(traces.compressions == "nf4")
    policies = [make_policy(spec) for spec in ("fixed:gamma=2", "fixed:gamma=8", "heuristic", "hysteresis")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecKVWarning)
        rows = study(traces, costs, LOTS, policies, seeds=200, jobs=-1)
    assert {(row.policy, row.estimator) for row in rows} == {
        (policy.label, kind.name) for policy in policies for kind in ESTIMATORS
    }
    for row in rows:
        assert row.covers > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 200) and abs(row.bias) < 0.02, row
