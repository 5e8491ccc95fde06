"""Comparisons: statistics with known answers, folds, and what the table must hold."""

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from speckv.comparison import REQUIRED, compare, holm, with_decision_times
from speckv.errors import SpecKVError
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import known_controller, replay
from speckv.report import plots
from speckv.tables import leaderboard

from .synthetic import make_costs, make_rollouts

TIMES = {name: (1e-5, 1e-6) for name in ("none", "fixed", "best-fixed", "spy", "twin", "better", "parity")}


def required() -> list[Policy]:
    return [make_policy("fixed:gamma=4" if name == "fixed-4" else name) for name in REQUIRED]


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=15, budget=24)


@pytest.fixture(scope="module")
def costs():
    return make_costs(controller=TIMES)


def test_holm_known_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_no_correction_and_bonferroni(p):
    corrected = holm(p)
    for raw, value in zip(p, corrected, strict=True):
        assert raw <= value <= min(1.0, raw * len(p))
    order = np.argsort(p, kind="stable")
    assert (np.diff(np.array(corrected)[order]) >= 0).all()


class Spy(Policy):
    """Drafts nothing and notes what it was trained and tested on."""

    name = label = "spy"

    def __init__(self, log):
        super().__init__()
        self.log = log

    def get_params(self):
        return {}  # so that the costs know its times

    def __deepcopy__(self, memo):
        return Spy(self.log)

    def fit(self, traces, costs, seed=0):
        self.log.append((seed, traces))
        self.fitted = {"calls": np.array(len(self.log))}
        return self

    def choose_gamma(self, features, state):
        return 0


@pytest.fixture(scope="module")
def spied(traces, costs):
    log: list = []
    result = compare([*required(), Spy(log)], traces, [costs], folds=3, seed=11)
    return result, log


def test_every_prompt_is_held_out_once_at_all_its_compressions(spied, traces):
    _, log = spied
    everything = set(traces.ids)
    held_out = []
    for seed, train in log:
        assert seed == 11
        rest = everything - set(train.ids)
        held_out.extend(rest)
        assert len(train) == 2 * len(set(train.ids)), "a prompt is in training at one compression alone"
    assert sorted(held_out) == sorted(everything) and len(log) == 3


def test_folds_hold_each_task_in_equal_shares(spied):
    for _, train in spied[1]:
        tasks, counts = np.unique(train.tasks, return_counts=True)
        assert len(tasks) == 3 and np.ptp(counts) <= 2  # 15 prompts: 5 of a task in 3 folds


def test_a_whole_task_can_be_held_out(traces, costs):
    log: list = []
    result = compare([*required(), Spy(log)], traces, [costs], hold_out="task")
    left_out = [set(traces.tasks) - set(train.tasks) for _, train in log]
    assert sorted(task for tasks in left_out for task in tasks) == sorted(set(traces.tasks))
    assert all(len(tasks) == 1 for tasks in left_out)
    assert result.settings["hold_out"] == "task" and result.settings["folds"] == 3
    with pytest.raises(SpecKVError, match="one task only"):
        compare(required(), traces.take(traces.tasks == traces.tasks[0]), [costs], hold_out="task")


def test_gains_can_be_measured_from_another_policy(traces, costs):
    usual = compare(required(), traces, [costs], folds=3)
    other = compare(required(), traces, [costs], folds=3, against="none")
    for before, after in zip(usual.cells, other.cells, strict=True):
        none = next(c for c in usual.cells if c.policy == "none" and c.compression == before.compression)
        assert after.policy == before.policy and after.throughput == before.throughput
        assert after.gain == pytest.approx(before.throughput / none.throughput - 1)
        assert after.judge_gap_closed == before.judge_gap_closed  # these are shares of the way from the best fixed one
        assert (after.p is None) == (after.policy in {"none", "perfect-judge", "oracle"})
    with pytest.raises(SpecKVError, match="there is no 'nobody'"):
        compare(required(), traces, [costs], against="nobody")


def test_few_prompts_of_a_task_are_compared_all_the_same():
    few = make_rollouts(prompts=4, budget=12)
    result = compare(required(), few, [make_costs(controller=TIMES)], folds=4)
    assert {cell.policy for cell in result.cells} == set(REQUIRED)
    with pytest.raises(SpecKVError, match="4 prompts, too few for 5 folds"):
        compare(required(), few, [make_costs()], folds=5)


def test_the_same_seed_gives_the_same_json(costs):
    few = make_rollouts(prompts=9, budget=16)
    texts = [json.dumps(compare(required(), few, [costs], folds=3, seed=seed).to_json()) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", REQUIRED)
def test_no_baseline_may_be_missing(name, traces, costs):
    some = [policy for policy in required() if policy.label != name]
    with pytest.raises(SpecKVError, match=f"lacks {name}"):
        compare(some, traces, [costs])


def test_two_policies_of_one_name_are_refused(traces, costs):
    with pytest.raises(SpecKVError, match=r"two policies .* fixed-4"):
        compare([*required(), make_policy("fixed")], traces, [costs])


class Twin(type(make_policy("best-fixed"))):
    """The baseline under another name."""

    name = "twin"


class Better(Policy):
    """Stops behind a token that the draft was unsure of."""

    name = "better"
    features = ("draft_probability",)

    def keep_drafting(self, features, state):
        return features["draft_probability"] > 0.5


class Parity(Policy):
    """A constant gamma that differs between steps for no reason."""

    name = "parity"
    features = ("context_length",)

    def choose_gamma(self, features, state):
        return np.where(features["context_length"] % 2 == 0, 3, 5)


def test_a_policy_that_is_the_baseline_gains_nothing(traces, costs):
    cells = {
        (cell.compression, cell.policy): cell for cell in compare([*required(), Twin()], traces, [costs], seed=1).cells
    }
    for compression in ("bf16", "nf4", "all"):
        twin, base = cells[compression, "twin"], cells[compression, "best-fixed"]
        assert twin.gain == base.gain == 0 and twin.gain_ci == (0.0, 0.0) and twin.p == 1.0
        assert base.gain_ci is None and base.p is None
        assert twin.throughput == base.throughput
        assert twin.gap_closed == 0 and cells[compression, "oracle"].gap_closed == 1
        assert cells[compression, "perfect-judge"].judge_gap_closed == 1


def test_a_planted_gain_is_found_and_noise_is_not(traces):
    right = traces.tokens == traces.draft_tokens
    told = dataclasses.replace(
        traces, signals=traces.signals | {"draft_top1": np.where(right, 0.9, 0.1).astype(np.float32)}
    )
    costs = make_costs(draft=0.01, stair=0.0, verify=0.08, controller=TIMES)
    result = compare([*required(), Better(), Parity()], told, [costs])
    cells = {cell.policy: cell for cell in result.cells if cell.compression == "all"}
    better, parity = cells["better"], cells["parity"]
    assert better.gain > 0.03 and better.p < 0.05 and better.gain_ci[0] > 0
    assert parity.p > 0.05 and parity.gain_ci[0] < 0 < parity.gain_ci[1]
    for cell in (better, parity):
        assert cell.gain_ci[0] < cell.gain < cell.gain_ci[1]


def test_cells_are_what_a_replay_says(traces, costs):
    """Of a policy that learns nothing, the held-out steps together are all the steps."""
    result = compare(required(), traces, [costs], seed=2)
    run = replay(make_policy("fixed:gamma=4"), traces, costs)
    cell = next(c for c in result.cells if (c.policy, c.compression) == ("fixed-4", "all"))
    assert cell.throughput == pytest.approx(run.throughput)
    assert cell.tokens_per_step == pytest.approx(traces.lengths.sum() / len(run.gamma))
    np.testing.assert_allclose(cell.gamma_share, np.bincount(run.gamma, minlength=9) / len(run.gamma))
    assert cell.decision_us == pytest.approx(1e6 * TIMES["fixed"][0])
    switches = sum(int((np.diff(run.gamma[run.sequence == row]) != 0).sum()) for row in range(len(traces)))
    assert cell.switches == pytest.approx(1000 * switches / len(run.gamma))
    plain = next(c for c in result.cells if (c.policy, c.compression) == ("none", "nf4"))
    assert plain.tokens_per_step == 1 and plain.gamma_share[0] == 1 and plain.switches == 0
    assert plain.gain == pytest.approx(
        plain.throughput
        / next(c for c in result.cells if (c.policy, c.compression) == ("best-fixed", "nf4")).throughput
        - 1
    )


def test_json_holds_what_is_documented(spied, traces):
    value = json.loads(json.dumps(spied[0].to_json(), allow_nan=False))
    assert value["format"] == "speckv-comparison" and value["schema_version"] == 1
    keys = {"costs", "compression", "policy", "throughput", "gain", "gain_ci", "p", "gap_closed", "judge_gap_closed",
            "tokens_per_step", "decision_us"}  # fmt: skip
    for cell in value["cells"]:
        assert keys <= cell.keys()
        assert sum(cell["gamma_share"]) == pytest.approx(1) and len(cell["gamma_share"]) == traces.gamma_max + 1
    for compression in ("bf16", "nf4", "all"):
        found = [cell["policy"] for cell in value["cells"] if cell["compression"] == compression]
        assert sorted(found) == sorted([*REQUIRED, "spy"])
        rates = [cell["throughput"] for cell in value["cells"] if cell["compression"] == compression]
        assert rates == sorted(rates, reverse=True) and rates[0] == max(rates)
    for cell in value["cells"]:
        assert (cell["p"] is None) == (cell["policy"] in {"best-fixed", "perfect-judge", "oracle"})
    assert value["settings"]["seed"] == 11 and value["settings"]["folds"] == 3
    assert value["settings"]["prompts"] == 15 and value["settings"]["tokens"] == int(traces.lengths.sum())


def test_several_cost_models_are_told_apart(traces):
    models = [make_costs(name="one", controller=TIMES), make_costs(name="dear", draft=1.0, controller=TIMES)]
    cells = compare(required(), traces, models, folds=3).cells
    assert {cell.costs for cell in cells} == {"one", "dear"}
    share = {cell.costs: cell.gamma_share[0] for cell in cells if (cell.policy, cell.compression) == ("oracle", "all")}
    assert share["dear"] == 1 > share["one"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folds": 1}, "folds is 1; it must be a whole number from 2"),
        ({"folds": 0}, "folds is 0"),
        ({"folds": 2.5}, "folds is 2.5"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": None}, "seed is None"),
        ({"hold_out": "foo"}, "hold_out is 'foo'; it must be 'prompt' or 'task'"),
    ],
)
def test_arguments_that_are_refused(arguments, message, traces, costs):
    with pytest.raises(SpecKVError, match=message):
        compare(required(), traces, [costs], **arguments)


def test_two_machines_of_one_name_are_refused(traces, costs):
    with pytest.raises(SpecKVError, match="two of the cost models are called 'toy'; rename one"):
        compare(required(), traces, [costs, make_costs(draft=1.0)], folds=3)


def test_of_a_single_prompt_there_is_no_interval(traces, costs):
    """As in a recording that was killed early in its second compression."""
    few = traces.take((traces.compressions == "bf16") | (traces.ids == traces.ids[0]))
    result = compare([*required(), Parity()], few, [costs], folds=3)
    assert result.bounds == {"perfect-judge", "oracle"}
    for cell in result.cells:
        assert (cell.gain_ci is None) == (cell.compression == "nf4" or cell.policy == "best-fixed")
        assert (cell.p is None) == (cell.compression == "nf4" or cell.policy in {"best-fixed", *result.bounds})
    json.dumps(result.to_json(), allow_nan=False)
    console = Console(width=200, record=True, file=io.StringIO())
    for compression in ("bf16", "nf4", "all"):
        console.print(leaderboard(result, "toy", compression))
    assert "nan" not in console.export_text().lower()
    for draw in plots.OF_RESULT.values():
        draw(result)


def test_decision_times_that_costs_do_not_know_are_measured(traces, costs):
    known = dataclasses.replace(costs, controller={name: times for name, times in TIMES.items() if name != "fixed"})
    cells = compare(required(), traces, [known], folds=3).cells
    fixed = next(cell for cell in cells if (cell.policy, cell.compression) == ("fixed-4", "all"))
    assert 0 < fixed.decision_us < 1000 and fixed.decision_us != pytest.approx(1e6 * TIMES["fixed"][0])
    bounds = [cell.decision_us for cell in cells if cell.policy in {"oracle", "perfect-judge"}]
    assert bounds == [0.0] * len(bounds)


def test_known_decision_times_are_of_default_parameters(costs):
    assert known_controller(make_policy("fixed"), costs) == TIMES["fixed"]
    assert known_controller(make_policy("fixed:gamma=2"), costs) is None
    assert known_controller(make_policy("heuristic"), costs) is None
    policy, few = make_policy("fixed:gamma=2"), make_rollouts(prompts=2, budget=12)
    (timed,) = with_decision_times(policy, few, [costs])
    assert 0 < timed.controller["fixed"][0] < 1e-3 and timed.controller["fixed"] != TIMES["fixed"]
    assert with_decision_times(make_policy("fixed"), few, [costs]) == [costs]
    cells = compare([*required(), policy], make_rollouts(prompts=4, budget=8), [costs], folds=2).cells
    microseconds = {cell.policy: cell.decision_us for cell in cells}
    assert microseconds["fixed-4"] == pytest.approx(1e6 * TIMES["fixed"][0]) != microseconds["fixed-2"] > 0


class Raises(Policy):
    """A policy with a fault of its own."""

    name = "raises"

    def choose_gamma(self, features, state):
        raise ZeroDivisionError("oops")


class Forgets(Policy):
    name = "forgets"

    def fit(self, traces, costs, seed=0):
        pass

    def choose_gamma(self, features, state):
        return 1


@pytest.mark.parametrize(("policy", "message"), [(Raises(), "oops"), (Forgets(), "fails")])
def test_a_policy_that_fails_is_named(policy, message, traces, costs):
    with pytest.raises(SpecKVError, match=f"policy '{policy.name}'.*{message}"):
        compare([*required(), policy], traces, [costs], folds=3)


def test_decision_times_that_the_costs_lack_are_measured_and_told(traces):
    result = compare([*required(), make_policy("heuristic")], traces, [make_costs()], folds=3)
    assert "heuristic" in result.settings["decision_times_measured_here"]
    assert all(cell.decision_us > 0 for cell in result.cells if cell.policy == "heuristic")
