"""Step logs that grow: nothing is lost but what a killed process had not written, and nothing overwritten."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv import SpecKVError
from speckv.cli import main
from speckv.errors import SpecKVWarning
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog


def add(log, count, sequence="a", first=0):
    for step in range(first, first + count):
        log.write(sequence=sequence, step=step, gamma=4, accepted=step % 5, seconds=0.01, compression="bf16")


maybe = st.none() | st.floats(0.01, 1.0)
rows = st.lists(
    st.tuples(
        st.integers(0, 9).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma))),
        maybe,
        maybe,
        st.sampled_from(["", "nf4", "fp16"]),
        st.dictionaries(st.sampled_from(["position", "mine"]), st.floats(allow_infinity=True)),
    ),
    min_size=1,
    max_size=30,
)


@given(rows, st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_what_was_written_is_read(tmp_path_factory, rows, rows_per_file):
    """Whatever is not known of a step; the thread of the writer may or may not have written some before the end."""
    folder = tmp_path_factory.mktemp("log")
    with StepLogWriter(folder, rows_per_file, provenance={"by": "a test"}) as writer:
        for step, ((gamma, accepted), seconds, propensity, stored, signals) in enumerate(rows):
            writer.write(sequence="a b", step=step, gamma=gamma, accepted=accepted, seconds=seconds,
                         propensity=propensity, compression=stored, **signals)  # fmt: skip
    log = StepLog.load(folder)
    assert log.provenance == {"by": "a test"} and set(log.sequence) == {f"{writer.run}/a b"}
    assert log.step.tolist() == list(range(len(rows)))
    assert list(zip(log.gamma.tolist(), log.accepted.tolist(), strict=True)) == [outcome for outcome, *_ in rows]
    for column, at in ((log.seconds, 1), (log.propensity, 2)):
        expected = np.array([np.nan if row[at] is None else row[at] for row in rows], dtype=float)
        np.testing.assert_array_equal(np.full(len(rows), np.nan) if column is None else column, expected)
    assert (log.compression is None) == (not any(row[3] for row in rows))
    for name in ("position", "mine"):
        given = np.array([row[4].get(name, np.nan) for row in rows])
        logged = log.signals.get(name, np.full(len(rows), np.nan))
        np.testing.assert_array_equal(logged, np.where(np.isfinite(given), given, np.nan))


@pytest.mark.parametrize(
    "wrong", [{"sequence": ""}, {"step": -1}, {"gamma": 1}, {"accepted": -1}, {"seconds": 0.0}, {"seconds": np.inf},
              {"propensity": 0.0}, {"propensity": 1.1}, {"compression": "nf3"}, {"gamma": 2.7}, {"step": 1.0},
              {"seconds": "long"}, {"position": "high"}, {"step": 2**63}, {"gamma": 2**70}, {"sequence": "x\ud800"},
              {"task": "\ud800"}, {"\ud800": 1.0}, {"sequence": ["a"]}, {"task": 7}, {"seconds": np.ones(2)}],
)  # fmt: skip
def test_a_step_that_cannot_be(tmp_path, wrong):
    """It is refused at once: in a file it would take the steps beside it along."""
    with StepLogWriter(tmp_path) as log:
        with pytest.raises(SpecKVError, match=r"step -?\d+(\.0)? of sequence .* can't be"):
            log.write(**{"sequence": "a", "step": 1, "gamma": 2, "accepted": 2} | wrong)
        add(log, 3)
    assert len(StepLog.load(tmp_path)) == 3


def test_files_are_full_ones_and_a_rest(tmp_path):
    from pyarrow import parquet

    with StepLogWriter(tmp_path, rows_per_file=10) as log:
        for start in range(0, 25, 5):
            add(log, 5, first=start)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"{log.run}-{number:06}.parquet" for number in range(1, len(files) + 1)]
    sizes = [parquet.read_metadata(file).num_rows for file in files]
    assert sum(sizes) == 25 and max(sizes) <= 10


def test_threads_and_writers_share_a_folder(tmp_path):
    """Each writer numbers its requests from 0, as a restarted server does."""
    writers = [StepLogWriter(tmp_path, rows_per_file=50) for _ in range(2)]
    threads = [
        threading.Thread(target=add, args=(writer, 120, str(number))) for writer in writers for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    log = StepLog.load(tmp_path)  # no step twice, or this fails
    assert {name: int((log.sequence == name).sum()) for name in set(log.sequence.tolist())} == {
        f"{writer.run}/{number}": 120 for writer in writers for number in range(4)
    }


SCRIPT = """
import os, signal, sys, time
from speckv.steplog_writer import StepLogWriter
log = StepLogWriter(sys.argv[1], rows_per_file=100, seconds_per_file=0.2)
for step in range(1050):
    log.write(sequence="a", step=step, gamma=4, accepted=1)
if sys.argv[2] == "killed":
    time.sleep(1.5)  # by then the rest is old enough
    log.write(sequence="b", step=0, gamma=4, accepted=1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_a_process_that_ends(tmp_path, end):
    """Killed, it loses what was younger than a file may be; without a call of close, nothing."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), end], check=False)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0)
    log = StepLog.load(tmp_path)
    assert len(log) == 1050 and log.step.tolist() == list(range(1050))


def test_what_a_killed_writer_left_half_written_is_no_part(tmp_path):
    with StepLogWriter(tmp_path) as log:
        add(log, 3)
    (tmp_path / f".{log.run}-000002.parquet.77.partial").write_bytes(b"PAR1 and then")
    assert len(StepLog.load(tmp_path)) == 3


def test_a_step_waits_for_no_file(tmp_path):
    """Whatever a file takes to be saved, steps are taken in meanwhile."""
    with StepLogWriter(tmp_path, rows_per_file=10) as log:
        steps = threading.Thread(target=add, args=(log, 25), daemon=True)
        with log._saving:
            steps.start()
            steps.join(30)
            assert not steps.is_alive() and not list(tmp_path.iterdir())
    assert len(StepLog.load(tmp_path)) == 25


FORKS = """
import os, sys
from speckv.steplog_writer import StepLogWriter
log = StepLogWriter(sys.argv[1], rows_per_file=10)
def add(sequence, steps):
    for step in steps:
        log.write(sequence=sequence, step=step, gamma=4, accepted=1)
add("parent", range(15))
child = os.fork()
if child:
    add("parent", range(15, 40))
    sys.exit(os.waitpid(child, 0)[1])
add("child", range(40))
"""


def test_a_process_forks(tmp_path):
    """Each half goes on for itself: no file is overwritten, and no step of the one is in the other's."""
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True, timeout=60)
    log = StepLog.load(tmp_path)
    runs, names = np.array([name.split("/") for name in log.sequence.tolist()]).T
    for name in ("parent", "child"):
        assert sorted(log.step[names == name].tolist()) == list(range(40)) and len(set(runs[names == name])) == 1
    assert len(set(runs)) == 2


WORKERS = """
import concurrent.futures, multiprocessing, sys
from speckv.steplog_writer import StepLogWriter
folder, method, owner = sys.argv[1:]
shared = StepLogWriter(folder) if owner == "parent's" else None
def add(name, log=None):
    log = log or shared or StepLogWriter(folder)
    for step in range(40):
        log.write(sequence=name, step=step, gamma=4, accepted=1)
if __name__ == "__main__":
    context = multiprocessing.get_context(method)
    add("parent", shared)
    process = context.Process(target=add, args=("process",))
    process.start()
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        list(executor.map(add, ["executor 1", "executor 2"]))
    pool = context.Pool(2)
    pool.map(add, ["pool 1", "pool 2"])
    pool.close()
    pool.join()
    process.join()
"""


@pytest.mark.parametrize(("method", "owner"), [("fork", "parent's"), ("fork", "own"), ("spawn", "own")])
def test_workers_that_end_by_themselves(tmp_path, method, owner):
    """Processes of multiprocessing run no exit handlers. All rows are kept, and none twice."""
    (tmp_path / "script.py").write_text(WORKERS)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "log"), method, owner]
    subprocess.run(command, check=True, timeout=120)
    log = StepLog.load(tmp_path / "log")
    names = np.array([name.split("/")[1] for name in log.sequence.tolist()])
    assert set(names) == {"parent", "process", "executor 1", "executor 2", "pool 1", "pool 2"}
    assert all(sorted(log.step[names == name].tolist()) == list(range(40)) for name in set(names))


def test_a_file_that_fails_takes_no_other_with_it(tmp_path):
    """Its place is taken by a folder. The steps of the other files are saved, and the thread goes on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with StepLogWriter(tmp_path, rows_per_file=10) as log:
            with log._saving:
                add(log, 30)
                taken = tmp_path / f"{log.run}-000001.parquet"
                taken.mkdir()
            for _ in range(200):
                if caught:
                    break
                time.sleep(0.05)
            taken.rmdir()
            assert len(list(tmp_path.glob("*.parquet"))) == 2, "what is behind the file that failed"
            add(log, 5, first=30)
    assert StepLog.load(tmp_path).step.tolist() == list(range(10, 35))
    assert [w.category for w in caught] == [SpecKVWarning] and "steps were lost" in str(caught[0].message)


def test_a_folder_that_vanished_costs_steps_and_no_decode(tmp_path):
    log = StepLogWriter(tmp_path / "log", rows_per_file=5, seconds_per_file=0.05)
    (tmp_path / "log").rmdir()
    (tmp_path / "log").write_text("a file now")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        add(log, 7)
        for _ in range(100):
            if caught:
                break
            time.sleep(0.05)
    assert any("steps were lost" in str(w.message) and w.category is SpecKVWarning for w in caught)
    add(log, 1)
    with pytest.raises(SpecKVError, match="cannot be written"):
        log.close()


def test_what_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecKVError, match="file: cannot be written"):
        StepLogWriter(tmp_path / "file")
    with pytest.raises(SpecKVError, match="a file of 0 rows"):
        StepLogWriter(tmp_path, rows_per_file=0)
    for wrong in (object(), float("nan")):
        with pytest.raises(SpecKVError, match="provenance can't be kept as JSON"):
            StepLogWriter(tmp_path, provenance={"by": wrong})
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording" / "manifest.json").write_text("{}")
    with pytest.raises(SpecKVError, match="recording: holds a recording"):
        StepLogWriter(tmp_path / "recording")
    log = StepLogWriter(tmp_path / "closed")
    log.close()
    with pytest.raises(SpecKVError, match="this log was closed"):
        add(log, 1)
    with pytest.raises(SpecKVError, match=r"closed: holds no step log"):
        StepLog.load(tmp_path / "closed")


def test_commands_take_a_folder(tmp_path):
    """One file of which is of another kind, or damaged, is named."""
    with StepLogWriter(tmp_path / "log", rows_per_file=20, provenance={"by": "one"}) as log:
        for sequence in "abc":
            add(log, 30, sequence)
    with StepLogWriter(tmp_path / "log", provenance={"by": "another"}) as other:
        other.write(sequence="d", step=0, gamma=2, accepted=2, seconds=0.02, compression="bf16", position=0.0)
    command = ["traces", "import", str(tmp_path / "log"), "--importer", "speckv", "--out"]
    done = CliRunner().invoke(main, [*command, str(tmp_path / "log.parquet")])
    assert done.exit_code == 0 and "91 of 91 steps, of 4 sequences" in done.output, done.output
    imported = StepLog.load(tmp_path / "log.parquet")
    assert np.isnan(imported.signals["position"]).sum() == 90
    assert {str(made) for made in imported.provenance["files"].values()} == {"{'by': 'one'}", "{'by': 'another'}"}
    done = CliRunner().invoke(
        main, ["evaluate", str(tmp_path / "log"), "--policy", "fixed:gamma=4", "--costs", "rtx3090"]
    )
    assert done.exit_code == 0 and "91 steps of 4 sequences" in done.output, done.output
    damaged = sorted(path for path in (tmp_path / "log").iterdir() if log.run in path.name)[0]
    os.truncate(damaged, 100)
    done = CliRunner().invoke(main, [*command, str(tmp_path / "again.parquet")])
    assert done.exit_code == 2 and f"{damaged}: not a readable Parquet file" in done.output
