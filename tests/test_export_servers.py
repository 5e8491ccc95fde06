"""What SGLang and TensorRT-LLM read holds what was exported, and they read it as we do.

The rule of SGLang is compared with its own source where there is some:

    SPECKV_SGLANG=/folder/with/the/unpacked/wheel pytest -m slow tests/test_export_servers.py
"""

import bisect
import importlib.util
import json
import os
import pathlib
import sys
import types
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speckv.errors import SpecKVError, SpecKVWarning
from speckv.exporters.schedule import Schedule, best_by_batch
from speckv.exporters.sglang import AdaptiveSteps, Rule, SglangExporter, candidates
from speckv.exporters.tensorrt_llm import TensorRtLlmExporter
from speckv.exporters.vllm import VllmScheduleExporter
from speckv.exporting import export
from speckv.features import Features
from speckv.plugins import make_policy
from speckv.policy import Outcome
from speckv.replaying import replay

from .synthetic import make_batch_costs, make_costs, make_rollouts


@pytest.fixture(scope="module")
def traces():
    return make_rollouts()


@pytest.fixture(scope="module")
def costs():
    return make_batch_costs()


def test_the_best_for_each_batch_size_is_that_of_a_replay(traces, costs):
    best = best_by_batch(traces, costs)
    assert list(best) == [1, 4, 32]
    for size, gamma in best.items():
        runs = [replay(make_policy(f"fixed:gamma={n}"), traces, costs.at_batch(size)) for n in range(9)]
        assert gamma == int(np.argmax([run.throughput for run in runs]))
    assert best[1] > best[4] > best[32] == 0
    assert best_by_batch(traces, costs, [2, 1])[32] == 1 and best_by_batch(traces, make_costs(), [3]) == {1: 3}


def test_a_schedule_plays_what_its_table_says():
    schedule = Schedule({"nf4": {8: 1, 2: 5}, "bf16": {1: 3}})
    sizes = [1, 2, 3, 8, 9, 1, 50, 1]
    codes = [4, 4, 4, 4, 4, 1, 1, 0]  # nf4, bf16, and fp32, of which nothing is known
    values = {"compression": np.array(codes), "batch_size": np.array(sizes)}
    features = Features(values, len(codes), "before")
    assert schedule.choose_gamma(features, {}).tolist() == [5, 5, 1, 1, 1, 3, 3, 0] and schedule.required_gamma == 5


def test_no_batch_drafts_more_than_a_smaller_one(traces, costs):
    odd = replace(costs, batches={4: costs.batches[32], 32: make_costs()})  # no machine is like that
    assert best_by_batch(traces, odd)[32] > 0
    gammas = Schedule.best(traces, odd).gammas
    assert all(of[4] == of[32] == 0 < of[1] for of in gammas.values())


@pytest.mark.parametrize("exporter", [SglangExporter(), TensorRtLlmExporter(), VllmScheduleExporter()])
def test_what_was_not_recorded_gets_what_is_fastest_over_all(exporter, traces, costs, tmp_path):
    alike = replace(costs, verify=dict.fromkeys(costs.verify, costs.verify["bf16"]))
    exporter.export(exporter.approximate(make_policy("svip"), traces, alike), tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    relabelled = replace(traces, compressions=np.full(len(traces), "nf4"))
    exporter.export(exporter.approximate(make_policy("svip"), relabelled, alike), there)
    for name in ("fp32", "int8"):
        (path,) = tmp_path.glob(f"{name}.*")
        assert path.read_text() == (there / path.name.replace(name, "nf4")).read_text()


#: Batch sizes up to which there are so many tokens, which never become more.
SCHEDULES = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]
).map(lambda pairs: dict(zip(sorted(s for s, _ in pairs), sorted((g for _, g in pairs), reverse=True), strict=True)))


@given(SCHEDULES)
def test_both_readings_of_a_tensorrt_llm_schedule_are_ours(gammas):
    options = TensorRtLlmExporter().files_of(Schedule({"int8": gammas}))["int8"]
    longest = options["max_draft_len"]
    schedule = {int(size): gamma for size, gamma in options.get("draft_len_schedule", {1: longest}).items()}
    # What the validators of both versions ask for.
    assert set(options) <= {"max_draft_len", "draft_len_schedule"}
    assert min(schedule) == 1 and schedule[1] == longest == max(schedule.values()) and min(schedule.values()) >= 0
    if len(gammas) == 1 or not longest:
        assert "draft_len_schedule" not in options
        return
    keys, held = sorted(schedule), Schedule({"int8": gammas})
    for size in range(1, max(gammas) + 3):
        from_key = schedule[keys[bisect.bisect_right(keys, size) - 1]]
        at = bisect.bisect_left(keys, size)
        up_to_key = schedule[keys[at]] if at < len(keys) else 0
        assert from_key == up_to_key == (held.at("int8", size) if size <= max(gammas) else 0)


def test_a_schedule_for_tensorrt_llm(traces, costs, tmp_path):
    result = export(TensorRtLlmExporter(), make_policy("heuristic"), tmp_path / "out", traces, costs, approximate=True)
    stored = json.loads((tmp_path / "out" / "nf4.json").read_text())
    assert stored["max_draft_len"] == stored["draft_len_schedule"]["1"]
    read = TensorRtLlmExporter().load(tmp_path / "out")
    assert read.at("nf4", 1) == stored["max_draft_len"] > read.at("nf4", 32) == 0
    assert result.throughput > 0 and result.sequences < len(traces)

    with pytest.warns(SpecKVWarning, match="costs of toy are of batches of 1 alone"):
        export(TensorRtLlmExporter(), make_policy("heuristic"), tmp_path / "one", traces, make_costs(), True)
    assert "draft_len_schedule" not in (tmp_path / "one" / "nf4.json").read_text()  # nothing is known of batches
    with pytest.raises(SpecKVError, match="for no batch more tokens than for a single request"):
        TensorRtLlmExporter().check(Schedule({"nf4": {1: 2, 4: 3}}))


@pytest.mark.parametrize(
    ("exporter", "spec", "reason"),
    [
        (TensorRtLlmExporter, "heuristic", "learns from what came of each step"),
        (TensorRtLlmExporter, "hazard", "it decides at both times"),
        (SglangExporter, "hazard", "it decides at both times"),
        (SglangExporter, "mlp", "last_mean_entropy"),
        (SglangExporter, "gammatune", "its rule is not SGLang's"),
        (SglangExporter, "tiers:tiers=[0,1,3],start=1", "in a way of its own"),
        (SglangExporter, "tiers:down=0.5", "in a way of its own"),
        (SglangExporter, "oracle", "knows the future"),
    ],
)
def test_what_a_server_has_no_rule_for_is_refused(exporter, spec, reason):
    fit, why = exporter().verdict(make_policy(spec))
    assert fit != "exactly" and reason in why


def test_a_file_for_sglang(tmp_path):
    exporter, policy = SglangExporter(), make_policy("tiers:tiers=[2,4],start=4,weight=0.5,every=3,warm_up=1,up=0.5")
    exporter.export(policy, tmp_path)
    stored = json.loads((tmp_path / "bf16.json").read_text())
    assert stored == {
        "1": {"candidate_steps": [2, 4], "down_hysteresis": -0.25, "up_hysteresis": 0.5},
        "speculative_num_steps": 4, "ema_alpha": 0.5, "update_interval": 3, "warmup_batches": 1,
    }  # fmt: skip
    assert exporter.load(tmp_path).rules["bf16"] == Rule((2, 4), 4, 0.5, 3, 1, -0.25, 0.5)


@pytest.mark.parametrize(
    ("server", "change"),
    [
        (SglangExporter, {"1": {"candidate_steps": [3, 1]}}),
        (SglangExporter, {"1": {"candidate_steps": [-1]}}),
        (SglangExporter, {"1": None}),
        (SglangExporter, {"speculative_num_steps": 9}),
        (SglangExporter, {"ema_alpha": "much"}),
        (SglangExporter, {"update_interval": 0}),
        (SglangExporter, {"mood": 1}),
        (TensorRtLlmExporter, {"max_draft_len": None}),
        (TensorRtLlmExporter, {"max_draft_len": -1}),
        (TensorRtLlmExporter, {"max_draft_len": 2, "draft_len_schedule": {"1": 3}}),
        (TensorRtLlmExporter, {"max_draft_len": 2, "draft_len_schedule": {"4": 2}}),
        (TensorRtLlmExporter, {"max_draft_len": 2, "draft_len_schedule": {"1": 2, "many": 1}}),
    ],
)
def test_a_damaged_file_is_one_line(server, change, tmp_path):
    exporter = server()
    exporter.export(make_policy("fixed:gamma=3"), tmp_path)
    path = tmp_path / "int8.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecKVError, match="not whole files for") as caught:
        exporter.load(tmp_path)
    assert "\n" not in str(caught.value)


def moves(rule: Rule, accepted: list[int]) -> list[int]:
    """The steps that a server plays, each batch of which has so many accepted, or as many as were drafted."""
    policy = AdaptiveSteps({"nf4": rule})
    state, features, played = policy.new_state(1), Features({"compression": np.array([4])}, 1, "before"), []
    for most in accepted:
        gamma = int(policy.choose_gamma(features, state)[0])
        played.append(gamma)
        policy.observe(Outcome(np.array([gamma]), np.array([min(most, gamma)]), np.array([0.1])), state)
    return [*played, int(policy.choose_gamma(features, state)[0])]


def test_the_rule_by_hand():
    quick = {"ema_alpha": 1.0, "update_interval": 1, "warmup_batches": 0}
    # Up while the mean is above the step - 0.5, down while it is at most that of the tier below - 0.75.
    assert moves(Rule((1, 3, 5), 3, **quick), [3, 5, 2, 2, 0]) == [3, 5, 5, 3, 3, 1]
    # 0.25 is low enough for no speculation at all; then the next is tried, and its mean counts.
    assert moves(Rule((0, 1, 3), 1, **quick), [0, 9, 9, 9]) == [1, 0, 1, 3, 3]
    assert moves(Rule((0,), 0, **quick), [0, 0]) == [0, 0, 0]
    slow = Rule((1, 3), 1, ema_alpha=0.5, update_interval=2, warmup_batches=3)
    assert moves(slow, [1, 1, 1, 1, 1, 1]) == [1, 1, 1, 1, 1, 3, 3]  # the fifth batch is the first that moves
    assert moves(slow, [0, 0, 0, 0, 1, 1, 1]) == [1, 1, 1, 1, 1, 1, 1, 3]  # means .5 and .875


def test_the_fastest_rule_takes_the_place_of_a_policy(traces, costs, tmp_path):
    out = tmp_path / "out"
    result = export(SglangExporter(), make_policy("svip"), out, traces, costs, approximate=True)
    chosen = SglangExporter().load(out).rules
    assert chosen["nf4"] in candidates(8) and chosen["bf16"] in candidates(8)
    assert result.equal_decisions < 1 and json.loads((out / "fidelity.json").read_text())["approximated"]


def source():
    """SGLang's own module, of which only what it imports for its server is left out."""
    folder = os.environ.get("SPECKV_SGLANG")
    if not folder:
        pytest.skip("SPECKV_SGLANG names no folder with SGLang's source")
    path = pathlib.Path(folder) / "sglang" / "srt" / "speculative" / "adaptive_spec_params.py"
    names = {
        "sglang.srt.arg_groups.overrides": ("resolved_view", "resolving_view"),
        "sglang.srt.runtime_context": ("attn_dp_enabled_of",),
        "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm",),
        "sglang.srt.utils": ("log_info_on_rank0",),
    }
    stubs = {}
    for name, members in names.items():
        stubs[name] = types.ModuleType(name)
        for member in members:
            setattr(stubs[name], member, lambda *_: None)
    spec = importlib.util.spec_from_file_location("adaptive_spec_params", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stubs):
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_sglang_itself_moves_as_we_do(tmp_path):
    params, random, changes = source().AdaptiveSpeculativeParams, np.random.default_rng(0), 0
    for number in range(200):
        steps = tuple(sorted(random.choice(9, size=random.integers(1, 5), replace=False).tolist()))
        rule = Rule(
            steps, int(random.choice(steps)), float(random.uniform(0, 1)), int(random.integers(1, 5)),
            int(random.integers(0, 6)), float(random.normal(0, 0.5)), float(random.normal(0, 0.5)),
        )  # fmt: skip
        out = tmp_path / str(number)
        out.mkdir()
        SglangExporter().export(AdaptiveSteps({"nf4": rule}), out)
        theirs, most = params(rule.start, str(out / "nf4.json")), random.integers(0, 9, size=80).tolist()
        played = []
        for accepted in most:
            step = theirs.get_steps_for_batch(3)
            played.append(step)
            theirs.on_verify_complete([min(accepted, step)], 3)
        ours = moves(rule, most)
        assert ours == [*played, theirs.get_steps_for_batch(3)], rule
        changes += len(set(played)) > 1
    assert changes > 100
