"""The commands `record` and `profile` on a real, small pair: a killed recording goes on, nothing is overwritten."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.costs import CostModel
from speckv.live.recorder import _Recording, record
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, TraceDataset


def pair_arguments(paths):
    return ["--target", paths.target, "--draft", paths.draft, "--draft-compression", "fp32"]


def record_arguments(paths, prompts, out, gamma_max=6):
    settings = ["--compression", "fp32", "--gamma-max", str(gamma_max), "--max-new-tokens", "40"]
    return ["record", *pair_arguments(paths), *settings, "--prompts", str(prompts), "--out", str(out)]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def shards(folder: pathlib.Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.parquet")}


def assert_one_line(result, *parts):
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    for part in parts:
        assert part in result.stderr


@pytest.fixture(scope="module")
def recording(small_pair_paths, small_prompts_file, tmp_path_factory):
    """An uninterrupted recording."""
    out = tmp_path_factory.mktemp("recording") / "traces"
    result = run(*record_arguments(small_pair_paths, small_prompts_file, out))
    assert result.exit_code == 0, result.output
    return out


def kill_when_shards_appear(arguments: list[str], out: pathlib.Path, count: int) -> None:
    """Start `speckv` as a process of its own, and kill it as soon as it has finished `count` sequences."""
    process = subprocess.Popen([sys.executable, "-c", "from speckv.cli import main; main()", *arguments],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while len(list(out.glob("*.parquet"))) < count:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the recording has not begun"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()


def test_killed_recording_goes_on(recording, small_pair_paths, small_prompts_file, tmp_path):
    out = tmp_path / "killed"
    arguments = record_arguments(small_pair_paths, small_prompts_file, out)
    kill_when_shards_appear(arguments, out, count=2)
    finished = shards(out)
    assert 2 <= len(finished) < 12, "the process was killed too late to test anything"
    # What a kill in the middle of a write leaves behind.
    (out / ".fp32-0123456789abcdef.parquet.1.partial").write_bytes(b"PAR1")

    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert {name: shard for name, shard in shards(out).items() if name in finished} == finished
    whole, continued = ({rollout.id: rollout for rollout in TraceDataset(path)} for path in (recording, out))
    assert len(continued) == 12 and continued.keys() == whole.keys()
    for identifier, rollout in whole.items():
        other = continued[identifier]
        for name in ("prompt_tokens", "tokens", "draft_tokens", "off_lengths", "off_tokens"):
            np.testing.assert_array_equal(getattr(other, name), getattr(rollout, name))
        for name in DRAFT_SIGNALS | TARGET_SIGNALS:
            np.testing.assert_allclose(other.signals[name], rollout.signals[name], atol=1e-4)


def test_finished_recording_is_left_alone(recording, small_pair_paths, small_prompts_file):
    before = shards(recording)
    assert run(*record_arguments(small_pair_paths, small_prompts_file, recording)).exit_code == 0
    assert shards(recording) == before


def test_a_merged_recording_goes_on(recording, small_pair_paths, small_prompts_file, tmp_path):
    merged = TraceDataset.merge([TraceDataset(recording)], tmp_path / "merged").path
    before = shards(merged)
    assert run(*record_arguments(small_pair_paths, small_prompts_file, merged)).exit_code == 0
    assert shards(merged) == before
    more = tmp_path / "more.jsonl"
    more.write_text(small_prompts_file.read_text() + json.dumps({"id": "new", "task": "x", "prompt": "def f(x):"}))
    assert run(*record_arguments(small_pair_paths, more, merged)).exit_code == 0
    assert len(shards(merged)) == 2 and set(TraceDataset(merged).load().ids) >= {"new"}


def test_manifest_tells_where_it_came_from(recording):
    manifest = json.loads((recording / "manifest.json").read_text())
    assert manifest["settings"]["target"] == "tiny-target"
    assert manifest["settings"]["chat_template"] is False
    assert {"processor", "torch", "transformers"} <= manifest["runs"][0]["machine"].keys()
    assert manifest["units"]["draft_entropy"] == "nats"


def test_other_settings_are_refused(recording, small_pair_paths, small_prompts_file):
    before = shards(recording), (recording / "manifest.json").read_bytes()
    result = run(*record_arguments(small_pair_paths, small_prompts_file, recording, gamma_max=5))
    assert_one_line(result, str(recording), "gamma_max")
    assert (shards(recording), (recording / "manifest.json").read_bytes()) == before


def test_folder_of_something_else_is_refused(small_pair_paths, small_prompts_file, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert_one_line(run(*record_arguments(small_pair_paths, small_prompts_file, tmp_path)), str(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_another_prompt_of_the_same_name_is_refused(recording, small_pair_paths, small_prompts_file, tmp_path):
    other = tmp_path / "other.jsonl"
    first, *rest = small_prompts_file.read_text(encoding="utf-8").splitlines(keepends=True)
    other.write_text(json.dumps(json.loads(first) | {"prompt": "Something else"}) + "\n" + "".join(rest))
    before = shards(recording)
    result = run(*record_arguments(small_pair_paths, other, recording))
    assert_one_line(result, "was recorded from another prompt", json.loads(first)["id"])
    assert shards(recording) == before


def test_other_compressions_of_a_prompt_share_what_the_draft_said(small_pair, small_prompts, tmp_path):
    """A continuation is taken over from a recording of the same path, and is what it would have been."""
    manifest = Manifest(8, 48, {})
    alone, after = (TraceDataset.create(tmp_path / name, manifest) for name in ("alone", "after"))
    list(record(small_pair, small_prompts[:4], after))
    target = dataclasses.replace(small_pair.target, compression="bf16")  # the same model under another name
    renamed = small_pair._replace(target=target)
    list(record(renamed, small_prompts[:4], alone))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Recording, "_follow_some_branches", lambda *_: pytest.fail("drafted again"))
        list(record(renamed, small_prompts[:4], after))
    expected = {rollout.id: rollout for rollout in alone}
    taken_over = [rollout for rollout in after if rollout.compression == "bf16"]
    assert len(taken_over) == 4 and sum(len(rollout.off_tokens) for rollout in taken_over) > 20
    for rollout in taken_over:
        np.testing.assert_array_equal(rollout.off_tokens, expected[rollout.id].off_tokens)
        np.testing.assert_array_equal(rollout.off_lengths, expected[rollout.id].off_lengths)
        np.testing.assert_allclose(
            rollout.off_signals["draft_entropy"], expected[rollout.id].off_signals["draft_entropy"], atol=1e-4
        )


def test_a_form_unfit_for_recording_is_refused(small_pair_paths, small_prompts_file, tmp_path):
    arguments = record_arguments(small_pair_paths, small_prompts_file, tmp_path / "out")
    arguments[arguments.index("--compression") + 1] = "int8"
    assert_one_line(run(*arguments), "--compute float32")
    assert not (tmp_path / "out").exists()


def test_missing_device_is_refused(small_pair_paths, small_prompts_file, tmp_path):
    arguments = record_arguments(small_pair_paths, small_prompts_file, tmp_path / "out")
    assert_one_line(run(*arguments, "--device", "nowhere"), "device 'nowhere'")
    assert not (tmp_path / "out").exists()


def test_missing_model_is_refused(small_pair_paths, small_prompts_file, tmp_path):
    arguments = record_arguments(small_pair_paths, small_prompts_file, tmp_path / "out")
    arguments[arguments.index(small_pair_paths.target)] = str(tmp_path / "nowhere")
    assert_one_line(run(*arguments), "nowhere")
    assert not (tmp_path / "out").exists()


class Four(Policy):
    name = "four"

    def choose_gamma(self, features, state):
        return 4


def profile_arguments(paths, prompts, out):
    grid = ["--contexts", "8,24", "--gamma-max", "4", "--repeats", "3", "--held-out", "2", "--max-new-tokens", "8"]
    compressions = ["--compression", "fp32", "--compression", "bf16"]
    return ["profile", *pair_arguments(paths), *compressions, *grid, "--prompts", str(prompts), "--out", str(out)]


def test_profile(small_pair_paths, small_prompts_file, small_traces, tmp_path):
    out = tmp_path / "tiny.json"
    result = run(*profile_arguments(small_pair_paths, small_prompts_file, out))
    assert result.exit_code == 0, result.output
    costs = CostModel.load(out)
    assert costs.name == "tiny"
    assert costs.draft.tokens.tolist() == [1, 2, 4]
    assert costs.draft.contexts.tolist() == [8, 24]
    assert list(costs.verify) == ["fp32", "bf16"]
    for timings in costs.verify.values():
        assert timings.tokens.tolist() == [1, 2, 3, 4, 5]
        assert timings.spread is not None and (timings.spread >= 0).all()
    assert 0 < costs.overhead < costs.draft.at(1, 8)
    assert costs.provenance["source"] == "measured by speckv profile"
    assert costs.provenance["target"] == "tiny-target"
    for check in costs.provenance["held_out"].values():
        assert check["steps"] >= 2 * 3
        # The machine may be busy; that the two have to do with each other must show all the same.
        assert 0.02 < check["total_ratio"] < 50
    assert replay(Four(), small_traces, costs).throughput > 0


def test_profile_overwrites_nothing(small_pair_paths, small_prompts_file, tmp_path):
    out = tmp_path / "tiny.json"
    out.write_text("mine")
    assert_one_line(run(*profile_arguments(small_pair_paths, small_prompts_file, out)), str(out), "exists already")
    assert out.read_text() == "mine"


@pytest.mark.parametrize("contexts", ["0,8", "24,8", "8,8", "many", ""])
def test_contexts_are_checked(contexts, small_pair_paths, small_prompts_file, tmp_path):
    arguments = profile_arguments(small_pair_paths, small_prompts_file, tmp_path / "tiny.json")
    arguments[arguments.index("8,24")] = contexts
    result = run(*arguments)
    assert result.exit_code == 2 and "contexts" in result.stderr
    assert not (tmp_path / "tiny.json").exists()
