"""What a live decoder logs is what a replay logs, and can be evaluated."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.evaluation import evaluate, to_steps
from speckv.evaluation.recording import BEFORE, CHOSEN
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import ModelDrafter, PromptLookup
from speckv.live.logging import StepRows, known_features, name_sequence
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.replaying import replay
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog, columns_of
from speckv.traces import TARGET_SIGNALS


def log_of(folder, pair, policy, prompts, drafter=None):
    """Of these texts, one behind the other."""
    with StepLogWriter(folder) as log:
        decoder = SpeculativeDecoder(pair.target, drafter or pair.draft, policy, gamma_max=8, logs=[log])
        for prompt in prompts:
            decoder.generate(prompt.text, 48)
    return StepLog.load(folder)


def test_the_live_log_is_the_replayed_one(small_pair, small_prompts, small_traces, small_costs, tmp_path):
    """Features before each step included: to float32, in which signals are recorded."""
    policy = make_policy("heuristic:start=3")
    live = log_of(tmp_path, small_pair, policy, small_prompts)
    replayed = to_steps(policy, small_traces, small_costs)
    names = dict.fromkeys(live.sequence.tolist())
    rows = {
        f"{p.id} at fp32": np.flatnonzero(live.sequence == name) for p, name in zip(small_prompts, names, strict=True)
    }
    assert set(live.signals) == {*BEFORE, "batch_size", CHOSEN}
    for name in np.unique(replayed.sequence):
        theirs, ours = np.flatnonzero(replayed.sequence == name), rows[str(name)]
        for column in ("step", "gamma", "accepted", "propensity"):
            assert np.array_equal(getattr(live, column)[ours], getattr(replayed, column)[theirs]), column
        for signal in (*BEFORE, CHOSEN):
            np.testing.assert_allclose(
                live.signals[signal][ours], replayed.signals[signal][theirs], rtol=1e-3, atol=1e-4, err_msg=signal
            )
    assert (live.seconds > 0).all() and set(live.compression) == {"fp32"}


def test_what_was_explored_can_be_evaluated(small_pair, small_prompts, small_traces, small_costs, tmp_path):
    policy = make_policy('explore:policy="fixed:gamma=2",epsilon=0.5,largest=4').fit(small_traces, small_costs)
    log = log_of(tmp_path / "log", small_pair, policy, small_prompts)
    chosen = log.signals[CHOSEN]
    np.testing.assert_allclose(log.propensity, np.where(chosen == 2, 0.6, 0.1))
    assert (log.gamma <= chosen).all() and len(set(chosen)) == 5
    assert (log.seconds > 0).all()
    # On a busy machine the seconds that were measured may fit to no forward at all.
    dataclasses.replace(log, seconds=0.05 + 0.01 * log.gamma).save(tmp_path / "log.parquet")
    for costs in (small_costs, None):
        (found,) = evaluate(make_policy("fixed:gamma=2"), StepLog.load(tmp_path / "log.parquet"), costs, resamples=20)
        assert {"match", "ips", "doubly-robust", "path"} <= {estimate.estimator for estimate in found.estimates}


class Stops(Policy):
    """Ends every draft behind its first, second or third token, in turns."""

    name = "stops"

    def new_state(self, rows):
        return {"asked": np.zeros(rows, dtype=int)}

    def keep_drafting(self, features, state):
        state["asked"] = state["asked"] + 1
        return np.isin(state["asked"] % 6, (2, 4, 5))


def test_a_draft_that_the_policy_stopped_is_no_text_that_ended(
    small_pair, small_prompts, small_traces, small_costs, tmp_path
):
    """Estimates take fewer drafted than chosen tokens for the end of the text."""
    live = log_of(tmp_path, small_pair, Stops(), small_prompts)
    replayed = to_steps(Stops(), small_traces, small_costs)
    for log in (live, replayed):
        assert CHOSEN not in log.signals and log.propensity is None and set(log.gamma) >= {1, 2, 3}
        for gamma in (1, 2, 3):
            policy = make_policy(f"fixed:gamma={gamma}")
            (found,) = evaluate(policy, log, small_costs, gamma_max=3, resamples=20)
            truth = (replay(policy, small_traces, small_costs).accepted + 1).mean()
            assert found.of("kaplan-meier").tokens_per_step == pytest.approx(truth, rel=0.05)


def by_text(log):
    """Columns of each text by the hash of its prompt, the name and the seconds left out."""
    columns = {name: values for name, values in log.columns.items() if name not in {"sequence", "seconds"}}
    prompts = np.array([name.split("/")[1].split(" ")[0] for name in log.sequence.tolist()])
    return {prompt: {name: values[prompts == prompt] for name, values in columns.items()} for prompt in set(prompts)}


@pytest.mark.parametrize("policy", [make_policy("heuristic:start=3"), Stops()], ids=lambda policy: policy.name)
def test_what_is_written_as_it_happens_is_what_the_steps_say(policy, small_pair, small_prompts, tmp_path):
    """One by one, with the prompt merged into the first step, and in a batch."""
    features = known_features(ModelDrafter.signals | TARGET_SIGNALS.keys())
    texts = [prompt.text for prompt in small_prompts[:4]]
    for way in ("alone", "merged", "batch"):
        with StepLogWriter(tmp_path / way) as log:
            decoder = SpeculativeDecoder(*small_pair, policy, merge_prefill=way == "merged", logs=[log])
            done = decoder.generate_batch(texts, 16) if way == "batch" else [decoder.generate(t, 16) for t in texts]
        ids = [decoder.tokens_of(text) for text in texts]
        rows = []
        for of, text in zip(ids, done, strict=True):
            made = StepRows(f"x/{name_sequence(of)}", len(of), "fp32", features, policy.kind)
            rows += [made.row(step) for step in text.steps]
        afterwards = StepLog.from_columns(columns_of(rows), {})
        written = StepLog.load(tmp_path / way)
        first = written.step == 0
        assert np.isnan(written.seconds[first]).all() == (way == "merged") and (written.seconds[~first] > 0).all()
        found, expected = by_text(written), by_text(afterwards)
        assert found.keys() == expected.keys() and len(found) == 4
        for prompt, columns in expected.items():
            assert found[prompt].keys() == columns.keys()
            for name, values in columns.items():
                np.testing.assert_array_equal(found[prompt][name], values, err_msg=name)


def test_a_drafter_without_signals(small_pair, small_prompts, tmp_path):
    log = log_of(tmp_path, small_pair, make_policy("fixed:gamma=3"), small_prompts[:3], PromptLookup())
    assert "target_entropy" in log.signals and "last_mean_top1" not in log.signals
    assert log.gamma.max() > 0


@pytest.fixture
def command(small_pair_paths, tmp_path):
    pair = ["--target", small_pair_paths.target, "--draft", small_pair_paths.draft, "--compression", "fp32"]
    more = ["--draft-compression", "fp32", "--max-new-tokens", "24", "--prompt", "Hello there", "--seed", "3"]
    return ["decode", *pair, *more, "--log", str(tmp_path / "log")]


def test_decode_adds_its_steps(command, tmp_path):
    for gamma, prompts in ((3, 1), (2, 2)):
        done = CliRunner().invoke(main, [*command, "--policy", f"fixed:gamma={gamma}"])
        assert done.exit_code == 0, done.output
        log = StepLog.load(tmp_path / "log")
        last = log.sequence == log.sequence[-1]
        assert (log.accepted + 1)[last].sum() >= 24 and set(log.signals[CHOSEN][last]) == {float(gamma)}
        assert len(set(log.sequence.tolist())) == prompts
    assert {about["policy"] for about in log.provenance["files"].values()} == {"fixed-3", "fixed-2"}
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, [*command[:-1], str(tmp_path / "file" / "log")])
    assert done.exit_code == 2 and "file/log: cannot be written (Not a directory)" in done.output
