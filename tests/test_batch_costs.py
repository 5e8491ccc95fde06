"""Costs of steps in which several sequences share every forward."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.cli import main
from speckv.comparison import Comparison
from speckv.costs import CostModel, Timings, fit_costs_to_log
from speckv.errors import SpecKVError
from speckv.evaluation import evaluate, to_steps
from speckv.evaluation.recording import join
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.steplogs import StepLog

from .reports import page_json
from .synthetic import make_costs, make_rollouts, make_sequences, seconds_of, write_dataset


def of_batches(*sizes: int, name: str = "server", compressions: tuple[str, ...] = ("bf16", "nf4")) -> CostModel:
    """A machine on which a sequence more lengthens a verify, and a token more does so in large batches only."""

    def at(size: int) -> CostModel:
        costs = make_costs(
            draft=0.010 + 0.0004 * size, verify=0.05 + 0.002 * size, stair=0.004 * size, compressions=compressions
        )
        return dataclasses.replace(costs, overhead=0.0007 * size, batch_size=size)

    first, *larger = (at(size) for size in sizes)
    controller = {"fixed": (0.0, 0.0), "none": (0.0, 0.0)}
    return dataclasses.replace(first, name=name, controller=controller, batches={m.batch_size: m for m in larger})


def test_a_model_of_a_batch_shares_nothing_that_can_be_changed():
    costs = dataclasses.replace(make_costs(), controller={"mlp": (1e-5, 0.0)}, provenance={"source": "made up"})
    part = costs.at_batch(1)
    for name in ("controller", "provenance", "verify"):
        getattr(part, name).clear()
        assert getattr(costs, name), name


def test_an_ordinary_model_is_of_one_sequence():
    costs = make_costs()
    assert costs.batch_sizes == (1,) and vars(costs.at_batch(1)) == vars(costs)
    with pytest.raises(SpecKVError, match="'toy' was measured for batches of 1, not of 2; profile"):
        costs.at_batch(2)


def test_measured_sizes_are_kept():
    costs = of_batches(1, 2, 8)
    assert costs.batch_sizes == (1, 2, 8)
    for size in costs.batch_sizes:
        at, measured = costs.at_batch(size), costs.batches.get(size, costs)
        name = "server" if size == 1 else f"server, batch {size}"
        assert (at.name, at.batch_size, at.batch_sizes, at.controller) == (name, size, (size,), costs.controller)
        assert (at.draft, at.verify, at.overhead) == (measured.draft, measured.verify, measured.overhead)
        assert vars(at.at_batch(size)) == vars(at)
    for size in (0, 9):
        with pytest.raises(SpecKVError, match=f"for batches of 1 to 8 sequences, not of {size}; profile"):
            costs.at_batch(size)


@given(
    size=st.integers(2, 8),
    tokens=st.integers(1, 30),
    context=st.integers(0, 300),
    grids=st.lists(st.lists(st.integers(2, 12), max_size=4, unique=True).map(sorted), min_size=2, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_between_sizes_is_a_straight_line(size, tokens, context, grids):
    """Whatever grids the two sizes were measured on, at any number of tokens and any context."""
    rng = np.random.default_rng(size)
    small, large = (
        Timings(np.array([1, *grid]), contexts, np.cumsum(rng.uniform(0.1, 1, (1 + len(grid), 2)), axis=0))
        for grid, contexts in zip(grids, (np.array([1, 200]), np.array([16, 120])), strict=True)
    )
    costs = CostModel("two", small, {"bf16": small}, 0.1, batches={8: CostModel("two", large, {"bf16": large}, 0.8)})
    at = costs.at_batch(size)
    share = (size - 1) / 7
    expected = (1 - share) * seconds_of(small, tokens, context) + share * seconds_of(large, tokens, context)
    assert at.draft.at(tokens, context) == at.verify["bf16"].at(tokens, context) == pytest.approx(expected)
    assert at.overhead == pytest.approx(0.1 * size)


def test_files_keep_batches_and_old_ones_are_written_as_before(tmp_path):
    path = tmp_path / "costs.json"
    for costs in (make_costs(), of_batches(1, 2, 8), of_batches(4, 8), of_batches(1, 8).at_batch(8)):
        costs.save(path)
        value = json.loads(path.read_text())
        again = CostModel.load(path)
        again.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
        assert again.batch_sizes == costs.batch_sizes and again.controller == costs.controller
        single = costs.batch_sizes == (1,)
        assert value["schema_version"] == (1 if single else 2) and single == ("batches" not in value)


def logged(costs: CostModel, sizes: tuple[int, ...], gammas: tuple[int, ...] = (0, 1, 3, 6), spread: float = 0.05):
    """Steps of batches of each size, every one with the same gamma in all of its sequences."""
    traces = make_rollouts(prompts=12, budget=40, compressions=tuple(costs.verify))
    logs = {}
    for size, gamma in itertools.product(sizes, gammas):
        log = to_steps(make_policy(f"fixed:gamma={gamma}"), traces, costs.at_batch(size))
        of_batch = log.signals | {"batch_size": np.full(len(log), float(size))}
        logs[f"{size}-{gamma}"] = dataclasses.replace(log, signals=of_batch)
    log = join(logs)
    noise = np.exp(np.random.default_rng(0).normal(0, spread, len(log)))
    return dataclasses.replace(log, seconds=log.seconds * noise)


def test_batches_are_found_again_in_a_log():
    costs = of_batches(1, 2, 8)
    found = fit_costs_to_log(logged(costs, (1, 2, 8)), "found", "a test")
    assert found.batch_sizes == (1, 2, 8)
    traces = make_rollouts(prompts=9, seed=7)
    for size, gamma in itertools.product((1, 2, 5, 8), (0, 3, 6)):
        policy = make_policy(f"fixed:gamma={gamma}")
        truth, again = (replay(policy, traces, c.at_batch(size)).seconds.sum() for c in (costs, found))
        assert again == pytest.approx(truth, rel=0.02), (size, gamma)
    checks = found.provenance["held_out_batches"]
    assert list(checks) == ["1", "2", "8"]
    for check in checks.values():
        assert 0.02 < check["median_relative_error"] < 0.05 and check["total_ratio"] == pytest.approx(1, abs=0.02)


def test_of_many_sizes_some_are_fitted_and_the_rest_lie_between():
    found = fit_costs_to_log(logged(of_batches(1, 8, compressions=("bf16",)), (2, 3, 5, 6, 7)), "found", "a test")
    assert found.batch_sizes == (2, 3, 7)  # nearest to 1, 2 and 4, and the largest


def test_logs_that_batches_cannot_be_fitted_to():
    log = logged(of_batches(1, 4), (1, 4))
    one_gamma = (log.signals["batch_size"] == 1) | (log.gamma == 3)
    with pytest.raises(SpecKVError, match="several gammas at each compression and batch size"):
        fit_costs_to_log(StepLog.from_columns({n: v[one_gamma] for n, v in log.columns.items()}, {}), "x", "y")
    halves = dataclasses.replace(log, signals=log.signals | {"batch_size": log.signals["batch_size"] / 2})
    with pytest.raises(SpecKVError, match="batch_size must be whole numbers from 1"):
        fit_costs_to_log(halves, "x", "y")


def test_compare_in_a_batch(tmp_path):
    """The same steps at other prices: what the table says of a fixed gamma is what its forwards take together."""
    sequences = make_sequences(prompts=6, compressions=("bf16",))
    traces = write_dataset(tmp_path / "traces", sequences).load()
    costs = of_batches(1, 8, compressions=("bf16",))
    costs.save(tmp_path / "server.json")
    command = ["compare", "--traces", tmp_path / "traces", "--costs", tmp_path / "server.json", "--folds", 2]
    command += ["--policy", "heuristic", "--policy", "leviathan"]
    sizes = ["--batch-size", 1, "--batch-size", 4, "--json", tmp_path / "result.json"]
    result = CliRunner().invoke(main, list(map(str, [*command, *sizes])))
    assert result.exit_code == 0, result.output
    assert "server, batch 4" in result.stdout and "upper bound" in result.stdout
    compared = Comparison.load(tmp_path / "result.json")
    assert compared.settings["costs"] == ["server", "server, batch 4"] and compared.settings["batch_sizes"] == [1, 4]
    tok_s = {(c.costs, c.policy): c.throughput for c in compared.cells if c.compression == "bf16"}
    for size, name in ((1, "server"), (4, "server, batch 4")):
        run = replay(make_policy("fixed:gamma=4"), traces, costs.at_batch(size))
        assert tok_s[name, "fixed-4"] == pytest.approx(run.throughput)
    given = ["--traces", tmp_path / "traces", "--costs", tmp_path / "server.json", "--out", tmp_path / "page.html"]
    reported = CliRunner().invoke(main, list(map(str, ["report", tmp_path / "result.json", *given])))
    assert reported.exit_code == 0, reported.output
    shown = page_json((tmp_path / "page.html").read_text(encoding="utf-8"))["costs"]
    assert [(model["name"], model["batch_size"]) for model in shown] == [("server", 1), ("server, batch 4", 4)]
    assert shown[1]["draft"][0] == pytest.approx(1000 * costs.at_batch(4).draft.at(1, 256), abs=1e-3)
    alone = CliRunner().invoke(main, list(map(str, command)))
    assert "batch" not in alone.stdout, alone.stdout
    refused = CliRunner().invoke(main, list(map(str, [*command, "--batch-size", 9])))
    assert refused.exit_code == 2 and "not of 9" in refused.stderr and len(refused.stderr.splitlines()) == 1


class AsManyAsShare(Policy):
    name = "as-many-as-share"
    features = ("batch_size", "cost_ratio")

    def choose_gamma(self, features, state):
        assert (features["cost_ratio"] == self.ratio).all()
        return features["batch_size"].astype(int)


class OfItsBatch(Policy):
    name = "of-its-batch"
    features = ("batch_size", "cost_ratio")

    def choose_gamma(self, features, state):
        return features["batch_size"].astype(int) + (features["cost_ratio"] > 0.21)


def test_a_policy_sees_the_batch_that_its_costs_are_of():
    costs, policy = of_batches(1, 8, compressions=("bf16",)), AsManyAsShare()
    traces = make_rollouts(prompts=6, compressions=("bf16",))
    for size in (1, 3, 8):
        policy.ratio = costs.at_batch(size).cost_ratio("bf16")
        assert (replay(policy, traces, costs.at_batch(size)).chosen == size).all()


def test_costs_of_batches_are_shown(tmp_path):
    of_batches(1, 4, compressions=("bf16",)).save(tmp_path / "server.json")
    command = ["costs", "show", str(tmp_path / "server.json"), "--plot", str(tmp_path / "server.svg")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    titles = [line.strip() for line in result.stdout.splitlines() if "ms by tokens" in line]
    assert titles == ["server: ms by tokens", "server, batch 4: ms by tokens"]
    assert (tmp_path / "server.svg").stat().st_size > 1000


PROFILE = ("--compression", "fp32", "--draft-compression", "fp32", "--contexts", "8,24", "--gamma-max", "4",
           "--repeats", "3", "--held-out", "3", "--max-new-tokens", "8", "--tokens", "1,3,5")  # fmt: skip


def test_batches_are_profiled(small_pair_paths, small_prompts_file, tmp_path):
    pair = ["--target", small_pair_paths.target, "--draft", small_pair_paths.draft, "--prompts", small_prompts_file]
    command = ["profile", *PROFILE, *pair, "--batch-sizes", "1,3", "--out", tmp_path / "tiny.json"]
    result = CliRunner().invoke(main, list(map(str, command)))
    assert result.exit_code == 0, result.output
    costs = CostModel.load(tmp_path / "tiny.json")
    assert costs.batch_sizes == (1, 3)
    for size in costs.batch_sizes:
        at = costs.at_batch(size)
        assert at.draft.tokens.tolist() == [1, 2, 4] and at.verify["fp32"].tokens.tolist() == [1, 3, 5]
        assert 0 < at.overhead < at.verify["fp32"].at(1, 8)
    check = costs.provenance["held_out_batches"]["3"]["fp32"]
    assert check["steps"] >= 2 * 3 and 0.02 < check["total_ratio"] < 50  # the machine may be busy
    printed = [line for line in result.stdout.splitlines() if "held-out steps" in line]
    assert [line.split(":")[0] for line in printed] == ["fp32, batch 1", "fp32, batch 3"]
    for option, value in (("--batch-sizes", "3,1"), ("--tokens", "2,3")):
        refused = CliRunner().invoke(main, list(map(str, [*command[:-1], tmp_path / "other.json", option, value])))
        assert refused.exit_code == 2 and value.replace(",", ", ") in refused.stderr


def of_lots(costs: CostModel, sizes: tuple[int, ...]) -> StepLog:
    """Steps of batches of each size, with gammas that were drawn."""
    traces, lots = (
        make_rollouts(prompts=40, budget=40, compressions=("bf16",)),
        "explore:policy=none,epsilon=1,largest=6",
    )
    logs = {}
    for size in sizes:
        log = to_steps(make_policy(lots).fit(traces, costs), traces, costs.at_batch(size))
        logs[str(size)] = dataclasses.replace(log, signals=log.signals | {"batch_size": np.full(len(log), float(size))})
    return join(logs)


@pytest.mark.parametrize("sizes", [(1,), (8,), (1, 8), (2, 5, 8)])
def test_logged_steps_are_priced_in_their_own_batches(sizes):
    costs, traces = (
        of_batches(1, 8, compressions=("bf16",)),
        make_rollouts(prompts=40, budget=40, compressions=("bf16",)),
    )
    log = of_lots(costs, sizes)
    for gamma in (0, 3):
        policy = make_policy(f"fixed:gamma={gamma}")
        runs = [replay(policy, traces, costs.at_batch(size)) for size in sizes]
        truth = sum(run.tokens.sum() for run in runs) / sum(run.seconds.sum() for run in runs)
        for priced in (costs, None):
            (found,) = evaluate(policy, log, priced, resamples=0, draws=4)
            assert found.logged == pytest.approx((log.accepted + 1).sum() / log.seconds.sum(), rel=0.02)
            for estimate in found.estimates:
                rough = estimate.estimator in {"match", "ips", "snips", "doubly-robust"}
                assert estimate.throughput == pytest.approx(truth, rel=0.12 if rough else 0.05), (priced, estimate)


def test_batches_that_change_along_a_text():
    costs, policy = of_batches(1, 8, compressions=("bf16",)), make_policy("fixed:gamma=3")
    small, large = (
        to_steps(policy, make_rollouts(prompts=20, budget=60, compressions=("bf16",)), costs.at_batch(size))
        for size in (1, 7)
    )
    odd = small.step % 2 == 1
    log = dataclasses.replace(
        small,
        seconds=np.where(odd, large.seconds, small.seconds),
        signals=small.signals | {"batch_size": np.where(odd, 7.0, 1.0)},
    )
    (found,) = evaluate(policy, log, costs, resamples=0)
    for name in ("match", "hazard", "path"):
        assert found.of(name).throughput == pytest.approx((log.accepted + 1).sum() / log.seconds.sum(), rel=0.03), name


def test_what_a_policy_is_shown_is_of_the_step_s_own_batch():
    """Its draft of as many tokens as sequences share is what the log's steps were priced and chosen for."""
    costs, traces, policy = of_batches(1, 4), make_rollouts(prompts=12, budget=40), OfItsBatch()
    costs = dataclasses.replace(costs, draft=costs.batches[4].draft)
    assert costs.cost_ratio("bf16") > 0.21 > costs.at_batch(4).cost_ratio("bf16")
    logs = {}
    for size in (1, 4):
        log = to_steps(policy, traces, costs.at_batch(size))
        logs[str(size)] = dataclasses.replace(log, signals=log.signals | {"batch_size": np.full(len(log), float(size))})
    for found in evaluate(policy, join(logs), costs, resamples=0):
        assert found.agreement == 1 and found.of("path").throughput == pytest.approx(found.logged, rel=0.02)


def test_batches_that_the_costs_were_not_measured_for():
    log = of_lots(of_batches(1, 8), (1, 8))
    for costs in (of_batches(1, 4), make_costs()):
        with pytest.raises(SpecKVError, match=r"was measured for batches of 1.*, not of 8; profile") as caught:
            evaluate(make_policy("fixed:gamma=3"), log, costs)
        assert "\n" not in str(caught.value)


def test_a_replay_in_a_batch_logs_its_size():
    costs, traces = of_batches(1, 4), make_rollouts(prompts=2, budget=10)
    assert set(to_steps(make_policy("none"), traces, costs.at_batch(4)).signals["batch_size"]) == {4}
    assert "batch_size" not in to_steps(make_policy("none"), traces, costs).signals


def test_a_size_that_was_seen_in_one_context_alone():
    """What a longer context costs is learned from all sizes together."""
    costs = of_batches(1, 4, compressions=("bf16",))
    log = logged(costs, (1, 4))
    context, size = log.signals["context_length"], log.signals["batch_size"]
    kept = (size == 1) | (context == np.median(context[size == 4]))
    found = fit_costs_to_log(StepLog.from_columns({n: v[kept] for n, v in log.columns.items()}, {}), "found", "a test")
    assert found.batch_sizes == (1, 4) and len(found.draft.contexts) == 2
    traces = make_rollouts(prompts=9, seed=7, compressions=("bf16",))
    for gamma in (0, 3, 6):
        policy = make_policy(f"fixed:gamma={gamma}")
        truth, again = (replay(policy, traces, c.at_batch(4)).seconds.sum() for c in (costs, found))
        assert again == pytest.approx(truth, rel=0.05), gamma


def test_contexts_that_noise_drowns_are_left_out():
    """A straight line would go below nothing: the fit is that of the log without its contexts."""
    log = logged(of_batches(1, 4, compressions=("bf16",)), (1, 4))
    context = log.signals["context_length"]
    fading = dataclasses.replace(log, seconds=log.seconds * np.exp(-6 * (context - context.min()) / np.ptp(context)))
    flat = StepLog.from_columns({n: v for n, v in fading.columns.items() if n != "signal_context_length"}, {})
    found, expected = (fit_costs_to_log(log, "found", "a test") for log in (fading, flat))
    assert found.provenance == expected.provenance and "flat in context" in found.provenance["fit"]
    for size in (1, 4):
        one, other = found.at_batch(size), expected.at_batch(size)
        assert one.draft.at(1, 100) == other.draft.at(1, 100) > 0
        assert one.verify["bf16"].at(4, 100) == other.verify["bf16"].at(4, 100) > 0


def test_a_time_below_nothing_has_a_message_of_its_own():
    log = logged(of_batches(1, 4, compressions=("bf16",)), (1, 4))
    faster = dataclasses.replace(log, seconds=1 / (1 + log.gamma))
    with pytest.raises(SpecKVError, match=r"verify no time.*more steps at each compression and batch size"):
        fit_costs_to_log(faster, "x", "y")
