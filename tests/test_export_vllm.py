"""What vLLM is given: a bundle and the options to play it with, or a table of tokens by batch size.

That vLLM does so is tested in plugins/speckv-vllm, which has an environment of its own.
"""

import itertools
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from speckv import runtime
from speckv.cli import main
from speckv.comparison import folds_of
from speckv.costs import Timings
from speckv.errors import SpecKVError, SpecKVWarning
from speckv.exporters.schedule import Schedule, best_by_batch
from speckv.exporters.settings import Setting
from speckv.exporters.vllm import VllmExporter, VllmScheduleExporter, _gammas, _options
from speckv.exporting import export, fidelity
from speckv.plugins import make_exporter, make_policy, registry
from speckv.policy import Clairvoyant
from speckv.recommending import recommend
from speckv.replaying import replay
from speckv.saving import save_policy

from .portable import fitted, recording
from .synthetic import make_batch_costs, make_costs, make_rollouts, make_sequences, write_dataset


@pytest.fixture(scope="module")
def traces():
    return make_rollouts()


@pytest.fixture(scope="module")
def costs():
    return make_batch_costs()


def options_in(path):
    return json.loads(path.read_text(encoding="utf-8"))["speculative-config"]


@pytest.mark.parametrize("spec", ["none", "fixed:gamma=7", "confidence:threshold=0.4,cap=5", "hazard", "dqn-stop"])
def test_the_plugin_gets_the_policy_and_as_many_tokens_as_it_may_draft(spec, tmp_path):
    policy = fitted(spec)
    result = export(VllmExporter("small/model"), policy, tmp_path / "out", *recording())
    assert result.equal_decisions == 1
    bundle = runtime.load(tmp_path / "out")
    assert bundle.fidelity["exporter"] == "vllm" and bundle.policy == policy.label
    most = max(1, *bundle.gammas)
    assert options_in(tmp_path / "out" / "vllm.yaml") == {
        "method": "draft_model",
        "model": "small/model",
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": [[1, 1, max(bundle.gammas)]],
    }
    assert json.loads((tmp_path / "out" / "vllm.yaml").read_text())["async-scheduling"] is False


def lookup(ranges, most, batch_size):
    """As vLLM reads a table: the first range starts at 1, and behind a range its number goes on."""
    return min(most, next(gamma for first, _, gamma in reversed(ranges) if first <= batch_size))


@given(st.dictionaries(st.integers(1, 300), st.integers(0, 16), min_size=1, max_size=8))
def test_vllm_reads_what_the_schedule_says(gammas):
    options = _options("draft", gammas)
    ranges, most = options["num_speculative_tokens_per_batch_size"], options["num_speculative_tokens"]
    assert ranges[0][0] == 1 <= most
    assert all(first <= last for first, last, _ in ranges)
    assert all(one[1] + 1 == two[0] and one[2] != two[2] for one, two in itertools.pairwise(ranges))
    schedule, read = Schedule({"bf16": gammas}), Schedule({"bf16": _gammas(options)})
    for size in {1, *(n for key in gammas for n in (key, key + 1))}:
        assert lookup(ranges, most, size) == schedule.at("bf16", size) == read.at("bf16", size)


def test_the_fastest_number_for_each_batch_size(traces, costs, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = export(VllmScheduleExporter(), fitted("hazard"), tmp_path / "out", traces, costs, approximate=True)
    assert 0 < result.equal_decisions < 1 and result.throughput > 0
    half = traces.take(folds_of(traces, 2, seed=0) == 0)
    for name in ("bf16", "nf4"):
        best = best_by_batch(half.take(half.compressions == name), costs)
        ranges = options_in(tmp_path / "out" / f"{name}.yaml")["num_speculative_tokens_per_batch_size"]
        assert [lookup(ranges, 99, size) for size in (1, 4, 32, 500)] == [best[1], best[4], best[32], best[32]]
        assert best[1] > best[4] > best[32] == 0


def test_beside_numbers_for_other_batches_0_takes_a_draft_forward(traces):
    """So 1 is faster in the middle, and 0 only where even that does not help, or no batch speculates at all."""

    def growing(seconds):
        timings = Timings(np.arange(1, 18), np.array([1]), (0.05 + seconds * np.arange(17))[:, None])
        return replace(make_costs(), verify={"bf16": timings, "nf4": timings})

    middle = growing(0.03)
    none, one = (replay(make_policy(f"fixed:gamma={gamma}"), traces, middle) for gamma in (0, 1))
    forwards = middle.draft.at(1, 1) * len(none.gamma)
    assert none.seconds.sum() < one.seconds.sum() < none.seconds.sum() + forwards
    costs = replace(make_costs(), batches={4: middle, 32: growing(0.3)})
    schedule = VllmScheduleExporter().approximate(make_policy("heuristic"), traces, costs)
    assert [schedule.at("int8", size) for size in (4, 32)] == [1, 0] and schedule.at("int8", 1) > 1
    assert best_by_batch(traces, costs) == schedule.gammas["int8"] | {4: 0}
    alone = replace(middle, batches={4: middle})
    assert not any(VllmScheduleExporter().approximate(make_policy("heuristic"), traces, alone).gammas["int8"].values())


def test_costs_of_single_sequences_say_nothing_of_batches(traces, tmp_path):
    with pytest.warns(SpecKVWarning, match="costs of toy are of batches of 1 alone.*profile them with --batch-sizes"):
        export(VllmScheduleExporter(), make_policy("heuristic"), tmp_path / "out", traces, make_costs(), True)
    ((first, last, gamma),) = options_in(tmp_path / "out" / "bf16.yaml")["num_speculative_tokens_per_batch_size"]
    assert (first, last) == (1, 1) and gamma > 0


def test_a_constant_number_is_held_as_it_is(traces, costs):
    for spec in ("fixed:gamma=3", "best-fixed"):
        result = fidelity(VllmScheduleExporter(), make_policy(spec).fit(traces, costs), traces, costs)
        assert result.equal_decisions == 1 and result.throughput == result.original_throughput


def test_without_speculation_there_is_no_draft_model(traces, costs, tmp_path):
    """In the files as in what users paste; a table of zeros would run the draft at every step."""
    exporter = VllmScheduleExporter()
    result = export(exporter, make_policy("none"), tmp_path / "out", traces, costs)
    assert result.equal_decisions == 1 and result.batch_size == 1
    assert json.loads((tmp_path / "out" / "bf16.yaml").read_text()) == {}
    assert exporter.paste(exporter.to_native(Setting(0))) == "vllm serve TARGET"


@pytest.mark.parametrize("exporter", ["vllm", "vllm-schedule"])
def test_a_draft_is_named_by_a_text(exporter):
    with pytest.raises(SpecKVError, match="draft is 3; it must be the draft model's name or folder"):
        make_exporter(f"{exporter}:draft=3")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("heuristic", "learns from what came of each step"),
        ("svip", "decides at both times; vllm-schedule can hold policies that decide before the step"),
        ("oracle", "knows the future"),
        ("hazard", "is not fitted"),
    ],
)
def test_what_a_table_cannot_hold(spec, reason):
    with pytest.raises(SpecKVError, match=reason):
        VllmScheduleExporter().check(make_policy(spec))


@pytest.mark.parametrize(
    "ranges", [[], [[2, 3, 1]], [[1, 2, 3], [4, 5, 1]], [[1, 1, -1]], [[1, 0, 2]], [[1, 1, 2.5]], [[1, 1]], None]
)
def test_a_table_that_is_none(ranges, tmp_path):
    VllmScheduleExporter().export(make_policy("fixed"), tmp_path)
    path = tmp_path / "bf16.yaml"
    value = json.loads(path.read_text())
    value["speculative-config"]["num_speculative_tokens_per_batch_size"] = ranges
    path.write_text(json.dumps(value))
    with pytest.raises(SpecKVError, match=r"bf16.yaml: not whole options of vLLM 0.32 .*export again"):
        VllmScheduleExporter().load(tmp_path)


def test_recommended_settings(traces, costs):
    exporter = VllmScheduleExporter("small/model")
    rows = recommend(exporter, traces, costs, folds=2).rows
    row = next(row for row in rows if row.compression == "bf16")
    gamma = row.setting["num_speculative_tokens"]
    assert exporter.from_native(row.setting) == Setting(gamma) and gamma > 0
    head, tail = row.paste.split(" --speculative-config ")
    assert head == "vllm serve TARGET" and json.loads(tail.strip("'")) == row.setting
    assert exporter.from_native(exporter.to_native(Setting(0))) == Setting(0)


def test_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "traces", make_sequences(prompts=4, budget=12), budget=12)
    make_costs().save(tmp_path / "costs.json")
    save_policy(make_policy("confidence:threshold=0.3,cap=6"), tmp_path / "saved")
    data = ["--traces", "traces", "--costs", "costs.json"]
    done = CliRunner().invoke(main, ["export", "saved", "--to", "vllm:draft=org/small", "--out", "out", *data])
    assert done.exit_code == 0 and "written for vLLM 0.32 with the plugin speckv-vllm; 100.00%" in done.output
    assert options_in(tmp_path / "out" / "vllm.yaml")["model"] == "org/small"
    done = CliRunner().invoke(main, ["export", "saved", "--to", "vllm-schedule", "--out", "table", *data])
    assert done.exit_code == 2 and "vllm-schedule can hold policies that decide before the step" in done.stderr


def test_what_the_list_says():
    """With the plugin, vLLM shows a policy all that a portable one may read."""
    policies = [entry.value() for entry in registry().policies.values()]
    portable = {policy.name for policy in policies if policy.unportable is None and not isinstance(policy, Clairvoyant)}
    held = {policy.name for policy in policies if VllmExporter().verdict(policy)[0] == "exactly"}
    assert held == portable >= {"hazard", "mlp", "ppo-stop"}
    held = {policy.name for policy in policies if VllmScheduleExporter().verdict(policy)[0] == "exactly"}
    assert {"none", "fixed", "best-fixed"} <= held <= portable
