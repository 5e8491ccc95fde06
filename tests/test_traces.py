"""Traces on disk and in memory."""

import dataclasses
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.errors import SpecKVError
from speckv.traces import DRAFT_SIGNALS, Manifest, Rollout, Rollouts, TraceDataset

from .synthetic import drafted, make_rollout, make_rollouts, make_sequences, write_dataset


def assert_same(one: Rollout, other: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, dict):
            assert left.keys() == right.keys()
            pairs = [(left[name], right[name]) for name in left]
        else:
            pairs = [(left, right)]
        for a, b in pairs:
            assert np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype, field.name


def by_key(sequences) -> dict[tuple[str, str], Rollout]:
    return {(sequence.id, sequence.compression): sequence for sequence in sequences}


def test_write_and_read_is_exact(tmp_path):
    sequences = make_sequences(prompts=4)
    read = list(write_dataset(tmp_path / "traces", sequences))
    assert len(read) == len(sequences)
    for key, sequence in by_key(read).items():
        assert_same(sequence, by_key(sequences)[key])


def test_merge_is_exact_and_has_one_shard_a_compression(tmp_path):
    sequences = make_sequences(prompts=4)
    halves = [write_dataset(tmp_path / str(n), sequences[n::2]) for n in (0, 1)]
    merged = TraceDataset.merge(halves, tmp_path / "merged")
    assert sorted(file.name for file in merged.path.iterdir()) == ["bf16.parquet", "manifest.json", "nf4.parquet"]
    read = list(merged)
    assert len(read) == len(sequences)
    for key, sequence in by_key(read).items():
        assert_same(sequence, by_key(sequences)[key])
    for name in ("run", "limit", "tokens", "lengths"):  # and nothing depends on how the shards are cut
        order = [list(by_key(merged)).index(key) for key in by_key(halves[0])]
        np.testing.assert_array_equal(getattr(merged.load().take(order), name), getattr(halves[0].load(), name))


def test_a_merged_folder_can_be_added_to(tmp_path):
    sequences = make_sequences(prompts=2)
    merged = TraceDataset.merge([write_dataset(tmp_path / "a", sequences[:3])], tmp_path / "merged")
    assert merged.keys() == by_key(sequences[:3]).keys()
    merged.add(sequences[3])
    assert merged.keys() == by_key(sequences).keys() and len(merged.load()) == 4


def test_merge_refuses_other_settings(tmp_path):
    one, other = make_sequences(prompts=2, compressions=["bf16"])
    parts = [write_dataset(tmp_path / "a", [one]), write_dataset(tmp_path / "b", [other], draft="another")]
    with pytest.raises(SpecKVError, match="other settings"):
        TraceDataset.merge(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_merge_refuses_a_sequence_that_stands_in_both(tmp_path):
    sequences = make_sequences(prompts=2, compressions=["bf16"])
    parts = [write_dataset(tmp_path / "a", sequences), write_dataset(tmp_path / "b", sequences[1:])]
    with pytest.raises(SpecKVError, match="p001 at bf16 stands in two"):
        TraceDataset.merge(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_merge_refuses_to_overwrite(tmp_path):
    source = write_dataset(tmp_path / "a", make_sequences(prompts=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(SpecKVError, match="exists already"):
        TraceDataset.merge([source], tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes"]


def test_create_refuses_other_settings_and_foreign_folders(tmp_path):
    write_dataset(tmp_path / "a", make_sequences(prompts=1))
    assert len(list(TraceDataset.create(tmp_path / "a", Manifest(8, 40, {"target": "synthetic"})))) == 2
    for manifest in (Manifest(4, 40, {"target": "synthetic"}), Manifest(8, 40, {"target": "another"})):
        with pytest.raises(SpecKVError, match=r"other (gamma_max|settings)"):
            TraceDataset.create(tmp_path / "a", manifest)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes").write_text("keep")
    with pytest.raises(SpecKVError, match="not a trace dataset"):
        TraceDataset.create(tmp_path / "b", Manifest(8, 40, {}))


def test_leftovers_of_a_killed_writer_are_ignored(tmp_path):
    sequences = make_sequences(prompts=2)
    dataset = write_dataset(tmp_path / "traces", sequences[:3])
    whole = next(dataset.path.glob("*.parquet"))
    shutil.copy(whole, dataset.path / f".{whole.name}.4711.partial")
    (dataset.path / ".bf16-0123.parquet.4711.partial").write_bytes(b"PAR1 half a file")
    assert len(list(TraceDataset(dataset.path))) == 3
    last = sequences[3]
    assert dataset.keys() == by_key(sequences[:3]).keys()
    dataset.add(last)
    assert len(dataset.load()) == 4


def test_a_recorder_killed_before_its_manifest_can_start_again(tmp_path):
    (tmp_path / ".manifest.json.4711.partial").write_text("{")
    assert TraceDataset.create(tmp_path, Manifest(8, 40, {})).manifest.gamma_max == 8


def test_a_sequence_in_two_shards_is_refused(tmp_path):
    dataset = write_dataset(tmp_path / "traces", make_sequences(prompts=1, compressions=["bf16"]))
    shutil.copy(next(dataset.path.glob("*.parquet")), dataset.path / "copy.parquet")
    with pytest.raises(SpecKVError, match="p000"):
        dataset.load()


SHAPES = {"seed": st.integers(0, 2**32 - 1), "budget": st.integers(1, 12), "gamma_max": st.integers(1, 6)}


@given(length=st.integers(1, 12), **SHAPES)
@settings(max_examples=60, deadline=None)
def test_run_limit_and_signals_are_what_the_sequence_says(seed, budget, gamma_max, length):
    sequence = make_rollout(
        np.random.default_rng(seed), task="chat", gamma_max=gamma_max, budget=budget, length=min(length, budget)
    )
    manifest = Manifest(gamma_max, budget, {})
    longer = make_rollout(np.random.default_rng(seed + 1), gamma_max=gamma_max, budget=budget)
    traces = Rollouts.from_sequences([longer, sequence], manifest)  # the second is padded to the first
    for position in range(len(sequence.tokens)):
        draft = drafted(sequence, manifest, position)
        assert traces.limit[1, position] == len(draft)
        for gamma in range(len(draft) + 1):
            expected = sum(right for right, _ in draft[:gamma])
            assert min(gamma, traces.run[1, position]) == expected
        if draft:
            index = np.arange(len(draft))
            for name in DRAFT_SIGNALS:
                got = traces.drafted_signal(name, np.full(len(draft), 1), np.full(len(draft), position), index)
                np.testing.assert_array_equal(got, np.float32([signals[name] for _, signals in draft]))


def test_signals_of_several_steps_at_once():
    traces = make_rollouts(prompts=3)
    rows, positions = np.arange(6), np.zeros(6, dtype=np.int64)
    index = np.minimum(np.arange(8), np.maximum(traces.limit[rows, positions] - 1, 0)[:, None])
    together = traces.drafted_signal("draft_top1", rows[:, None], positions[:, None], index)
    for row in rows:
        alone = [traces.drafted_signal("draft_top1", rows[row : row + 1], positions[:1], n)[0] for n in index[row]]
        np.testing.assert_array_equal(together[row], alone)


@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_take_picks_whole_sequences(rows):
    sequences = make_sequences(prompts=3)
    manifest = Manifest(8, 40, {})
    taken = Rollouts.from_sequences(sequences, manifest).take(rows)
    built = Rollouts.from_sequences([sequences[row] for row in rows], manifest)
    assert len(taken) == len(rows) and taken.manifest == manifest
    width = built.tokens.shape[1]  # taken keeps the width of the whole
    for field in dataclasses.fields(Rollouts)[1:]:
        left, right = getattr(taken, field.name), getattr(built, field.name)
        for a, b in [(left, right)] if not isinstance(left, dict) else [(left[n], right[n]) for n in left]:
            np.testing.assert_array_equal(a[:, : b.shape[1]] if a.ndim > 1 else a, b)
            if a.ndim > 1 and b.shape[1] <= width + 1:
                assert not a[:, b.shape[1] :].any()


def test_take_by_mask():
    traces = make_rollouts(prompts=3)
    taken = traces.take(traces.compressions == "nf4")
    assert len(taken) == 3 and set(taken.compressions) == {"nf4"}


def test_a_sequence_longer_than_its_manifest_is_refused():
    for manifest in (Manifest(8, 39, {}), Manifest(3, 40, {})):
        with pytest.raises(SpecKVError, match="p000 at bf16 is longer than its manifest"):
            Rollouts.from_sequences([make_rollout(np.random.default_rng(0), "p000", "chat")], manifest)


def test_no_sequence_is_refused(tmp_path):
    with pytest.raises(SpecKVError, match="holds no sequence"):
        write_dataset(tmp_path / "empty", []).load()
