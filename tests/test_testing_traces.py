"""The kit finds nothing wrong with recordings and step logs, and what is wrong with each of these bad ones."""

import dataclasses

import numpy as np
import pytest

from speckv.shipped import shipped_traces
from speckv.steplogs import StepLog
from speckv.testing import CheckFailed, check_trace, parametrize, report, trace_checks
from speckv.testing.futures import copy_of
from speckv.testing.recordings import make_rollouts, make_sequences

from .synthetic import write_dataset


@pytest.mark.slow
@parametrize(trace_checks(shipped_traces(), subject="shipped"))
def test_the_shipped_recording(check):
    check()


def test_a_recording_of_a_real_pair(small_dataset):
    check_trace(small_dataset)
    check_trace(small_dataset.load())


@pytest.fixture
def sequences():
    return make_sequences(prompts=3, budget=24)


def dataset_of(path, sequences):
    return write_dataset(path / "traces", sequences, budget=24)


def test_a_folder(tmp_path, sequences):
    dataset = dataset_of(tmp_path, sequences)
    made = check_trace(dataset.path)
    assert len(made.results) == 9 and not made.failures
    assert str(made.results[0].check) == "traces-can_be_read"


def changed(sequence, **values):
    return dataclasses.replace(sequence, **values)


def without_an_end(sequences):
    short = next(sequence for sequence in sequences if sequence.ended)
    return [changed(sequence, ended=sequence.ended and sequence is not short) for sequence in sequences]


def with_a_long_branch(sequences):
    """One token of the draft's continuation moves to the end, where the budget has no room for it."""
    whole = next(sequence for sequence in sequences if not sequence.ended)
    proposals, lengths = whole.draft_tokens.copy(), whole.off_lengths.copy()
    proposals[-1] = whole.tokens[-1] + 1
    lengths[np.flatnonzero(lengths > 1)[0]] -= 1
    lengths[-1] = 1
    long = changed(whole, draft_tokens=proposals, off_lengths=lengths)
    return [long if sequence is whole else sequence for sequence in sequences]


def with_a_strange_column(sequences):
    return [changed(sequences[0], compression="int2"), *sequences[1:]]


FOLDERS = {
    "can_be_read": (with_a_strange_column, "everything"),
    "stays_within_a_draft": (with_a_long_branch, set()),
    "ends_where_it_says": (without_an_end, set()),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_bad_folder_is_caught(name, tmp_path, sequences):
    change, also = FOLDERS[name]
    made = report(trace_checks(dataset_of(tmp_path, change(sequences))))
    failed = {result.check.name for result in made.failures}
    # A folder that can't be read has no other virtue.
    assert failed == ({result.check.name for result in made.results} if also == "everything" else {name} | also), made
    assert all("\n" not in result.message for result in made.failures)


def twice(traces):
    return dataclasses.replace(traces, ids=np.array([traces.ids[0]] * len(traces)))


def overlong(traces):
    manifest = dataclasses.replace(traces.manifest, max_new_tokens=traces.tokens.shape[1] - 2)
    limit = np.minimum(traces.limit, np.maximum(manifest.max_new_tokens - np.arange(traces.limit.shape[1]) - 1, 0))
    return dataclasses.replace(traces, manifest=manifest, limit=limit)


def unpromptly(traces):
    lengths = traces.prompt_lengths.copy()
    lengths[0] = 0
    return dataclasses.replace(traces, prompt_lengths=lengths)


def improbable(traces):
    traces.signals["draft_top1"][0, 0] = 1.2
    return traces


def infinite(traces):
    traces.signals["target_margin"][0, 0] = np.inf
    return traces


def negative(traces):
    traces.signals["draft_entropy"][0, 0] = -1
    return traces


def out_of_order(traces):
    traces.signals["draft_top2"][0, 0] = traces.signals["draft_top1"][0, 0] + 0.05
    traces.signals["draft_top10"][0, 0] = 1.0
    return traces


def without_mass(traces):
    traces.off_signals["draft_top10"][:] = 0
    return traces


def lucky(traces):
    """One proposal is said to be right and is not."""
    row, position = np.argwhere((traces.run[:, :-1] == 0) & (np.arange(traces.tokens.shape[1]) < 5))[0]
    traces.draft_tokens[row, position] = traces.tokens[row, position]
    return traces


def unlimited(traces):
    traces.limit[0, 0] += 1
    return traces


def ragged(traces):
    return dataclasses.replace(traces, run=traces.run[:, :-1])


def shorter(traces):
    """A recording that was cut down to a gamma of 2, with a run that was miscounted."""
    traces.limit[:, :-1] = np.minimum(traces.limit[:, :-1], 2)
    manifest = dataclasses.replace(traces.manifest, gamma_max=2)
    off = {name: array[:, :, :1] for name, array in traces.off_signals.items()}
    traces = dataclasses.replace(traces, manifest=manifest, off_signals=off)
    row, position = np.argwhere(traces.run[:, :-1] > 3)[0]
    traces.run[row, position] = 1
    return traces


#: Check -> what makes a recording bad, and the other checks that find fault with it as well.
SPECIMENS = {
    "can_be_read": [(ragged, {"holds_possible_signals"})],
    "names_each_sequence_once": [(twice, set())],
    "fits_its_manifest": [(overlong, {"limits_follow_from_the_tree"}), (unpromptly, set())],
    "holds_possible_signals": [(improbable, set()), (infinite, set()), (negative, set()), (out_of_order, set()),
                               (without_mass, set())],
    "runs_follow_from_tokens": [(lucky, {"replays_as_it_is_counted"})],
    "limits_follow_from_the_tree": [(unlimited, set())],
    "replays_as_it_is_counted": [(shorter, {"runs_follow_from_tokens"})],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "also"),
    [(name, change, also) for name, of_check in SPECIMENS.items() for change, also in of_check],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_recording_is_caught(name, change, also):
    made = report(trace_checks(change(copy_of(make_rollouts(prompts=3, budget=24)))))
    assert {result.check.name for result in made.failures} == {name} | also, str(made)
    assert all(result.message and "\n" not in result.message for result in made.failures)


def log_of(**changed):
    columns = {
        "sequence": np.array(["a", "a", "b"]),
        "step": np.array([0, 1, 0]),
        "gamma": np.array([4, 4, 2]),
        "accepted": np.array([4, 1, 0]),
        "seconds": np.array([0.1, np.nan, 0.2]),
        "signals": {"draft_top1": np.array([0.3, 0.4, np.nan])},
    }
    return StepLog(**columns | changed, provenance={"from": "a test"})


def test_a_step_log(tmp_path):
    log = log_of()
    check_trace(log)
    log.save(tmp_path / "log.parquet")
    made = check_trace(tmp_path / "log.parquet")
    assert [str(result.check) for result in made.results] == [
        "log.parquet-holds_possible_steps", "log.parquet-comes_back_from_disk"
    ]  # fmt: skip


def impossible(log):
    log.accepted[1] = 5
    return log


def unrepeatable(log):
    log.provenance["when"] = (1, 2)  # JSON makes a list of it
    return log


LOGS = {
    "holds_possible_steps": (impossible, {"comes_back_from_disk"}),
    "comes_back_from_disk": (unrepeatable, set()),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_bad_step_log_is_caught(name):
    change, also = LOGS[name]
    made = report(trace_checks(change(log_of())))
    assert {result.check.name for result in made.failures} == {name} | also, str(made)


def test_every_check_has_a_bad_recording(tmp_path, sequences):
    dense = {check.name for check in trace_checks(make_rollouts(prompts=1))}
    assert dense == set(SPECIMENS)
    assert {check.name for check in trace_checks(dataset_of(tmp_path, sequences))} == dense | set(FOLDERS)
    assert {check.name for check in trace_checks(log_of())} == set(LOGS)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(CheckFailed, match=r"nowhere: can_be_read: SpecKVError: .*no such trace folder"):
        check_trace(tmp_path / "nowhere")
