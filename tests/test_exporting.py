"""What a decoder can't hold is refused with the reason; what it holds is replayed beside the original."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.errors import SpecKVError
from speckv.exporting import Exporter, SpecKVExporter, export, fidelity, throughput_interval
from speckv.plugins import make_policy, registry
from speckv.policy import Clairvoyant, Policy
from speckv.replaying import replay
from speckv.saving import load_policy, save_policy

from .synthetic import make_costs, make_rollouts, make_sequences, write_dataset


class OneNumber(Exporter):
    """Keeps the gamma of a fixed policy as a number in a file."""

    name = "one-number"
    decoder = "a decoder with one setting"
    observes = frozenset({"context_length"})
    kinds = frozenset({"before"})

    def export(self, policy, out):
        (out / "gamma").write_text(str(policy.gamma))

    def load(self, out):
        return make_policy(f"fixed:gamma={(out / 'gamma').read_text()}")


@pytest.fixture(scope="module")
def traces():
    return make_rollouts()


@pytest.fixture(scope="module")
def costs():
    return make_costs()


@pytest.mark.parametrize(
    "spec", ["fixed:gamma=3", "heuristic", "confidence:threshold=0.4,cap=8", "kangaroo", "ucb1", "hazard", "none"]
)
def test_a_saved_policy_is_the_policy(spec, traces, costs):
    policy = make_policy(spec).fit(traces, costs)
    result = fidelity(SpecKVExporter(), policy, traces, costs)
    assert result.equal_decisions == 1.0 and result.throughput == result.original_throughput > 0
    assert result.sequences == len(traces) and result.costs == "toy" and result.steps > len(traces)


def test_the_interval_is_of_the_throughput_on_other_prompts(costs):
    """Prompts, drawn again and again by hand."""
    traces = make_rollouts(prompts=12)
    run = replay(make_policy("fixed:gamma=3"), traces, costs)
    low, high = throughput_interval(run, traces)
    prompts, rng = np.unique(traces.ids), np.random.default_rng(1)
    drawn = []
    for _ in range(2000):
        rows = np.concatenate([np.flatnonzero(traces.ids == one) for one in rng.choice(prompts, len(prompts))])
        drawn.append(run.tokens[rows].sum() / run.sequence_seconds[rows].sum())
    assert low < run.throughput < high
    assert np.allclose((low, high), np.quantile(drawn, (0.025, 0.975)), rtol=0.01)
    alone = traces.take(traces.ids == prompts[0])
    assert throughput_interval(replay(make_policy("none"), alone, costs), alone) is None


def test_an_online_policy_is_left_as_it_was(traces, costs):
    policy = make_policy("ucb1").fit(traces, costs)
    before = {name: values.copy() for name, values in policy.memory.items()}
    fidelity(SpecKVExporter(), policy, traces, costs)
    assert all(np.array_equal(values, policy.memory[name]) for name, values in before.items())


class DrawsOne(Policy):
    """Looks at the second distribution, and draws nothing from it."""

    name = "draws-one"
    features = ("draft_index",)

    def draw_token(self, features, state):
        return features["draft_index"] <= 1


class Becomes(SpecKVExporter):
    """Whatever is exported becomes this policy."""

    def __init__(self, policy):
        self.policy = policy

    def load(self, out):
        return self.policy


ONE, TWO = make_policy("fixed:gamma=1"), make_policy("fixed:gamma=2")


@pytest.mark.parametrize(
    ("policy", "artefact"),
    [(ONE, make_policy("none")), (DrawsOne(), TWO), (DrawsOne(), ONE), (TWO, ONE)],
    ids=["all-differ", "as-many-forwards", "as-many-tokens", "both-differ"],
)
def test_a_coarser_artefact_is_told_apart(policy, artefact, traces, costs):
    """The share of equal steps, counted one by one."""
    result = fidelity(Becomes(artefact), policy, traces, costs)
    original, other = (replay(each, traces, costs) for each in (policy, artefact))
    steps, others = (list(zip(r.sequence, r.position, r.gamma, r.forwards, strict=True)) for r in (original, other))
    equal = len(set(steps) & set(others))
    assert 0 < equal < len(steps)  # in front of the last token nothing can be drafted
    assert result.equal_decisions == equal / len(steps) and result.steps == len(steps)
    assert (result.throughput, result.original_throughput) == (other.throughput, original.throughput)


REFUSED = {
    "kangaroo": "it decides at both times; one-number can hold policies that decide before the step",
    "leviathan": "cost_ratio, which a decoder with one setting can't show; it shows context_length",
    "heuristic": "it learns from what came of each step, which a decoder with one setting does not tell it",
    "oracle": "it knows the future; no decoder can run it",
    "hazard": "is not fitted",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_the_decoder_cannot_run_is_refused(spec, traces, costs, tmp_path):
    with pytest.raises(SpecKVError) as caught:
        export(OneNumber(), make_policy(spec), tmp_path / "out", traces, costs)
    assert REFUSED[spec] in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_decides_inside_the_draft_alone():
    class Inside(Policy):
        name = "inside"

        def keep_drafting(self, features, state):
            return True

    with pytest.raises(SpecKVError, match="decides inside the draft; one-number can hold policies that decide before"):
        OneNumber().check(Inside())
    SpecKVExporter().check(Inside())


def test_a_policy_that_must_be_told_what_came_of_a_step(traces, costs):
    class Deaf(SpecKVExporter):
        decoder = "a decoder that tells nothing"
        outcomes = False

    playable = [entry.value() for entry in registry().policies.values() if not issubclass(entry.value, Clairvoyant)]
    listening = [p.fit(traces, costs) for p in playable if p.overrides("observe") and p.kind == "before"]
    assert listening
    for policy in listening:
        with pytest.raises(SpecKVError, match="learns from what came of each step, which a decoder that tells nothing"):
            Deaf().check(policy)
        SpecKVExporter().check(policy)


class Failing(OneNumber):
    """Its artefact is half there when it fails."""

    def export(self, policy, out):
        super().export(policy, out)
        raise OSError(28, "No space left on device")


def test_an_export_appears_whole_or_not_at_all(traces, costs, tmp_path):
    policy = make_policy("fixed:gamma=2")
    with pytest.raises(SpecKVError, match=r"out: cannot be written \(No space left on device\)"):
        export(Failing(), policy, tmp_path / "out", traces, costs)
    assert list(tmp_path.iterdir()) == []
    result = export(OneNumber(), policy, tmp_path / "out", traces, costs)
    stored = json.loads((tmp_path / "out" / "fidelity.json").read_text())
    assert stored["exporter"] == "one-number" and stored["equal_decisions"] == result.equal_decisions == 1.0
    with pytest.raises(SpecKVError, match="exists already"):
        export(OneNumber(), policy, tmp_path / "out", traces, costs)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["fidelity.json", "gamma", "out"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "traces", make_sequences(prompts=4, budget=12), budget=12)
    make_costs().save(tmp_path / "costs.json")
    save_policy(make_policy("confidence:threshold=0.3,cap=6"), tmp_path / "saved")
    save_policy(make_policy("fixed:gamma=9"), tmp_path / "large")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["export", *arguments])


def test_on_the_command_line(place):
    data = ["--traces", "traces", "--costs", "costs.json"]
    done = run("saved", "--to", "speckv", "--out", "artefact", *data)
    assert done.exit_code == 0, done.output
    assert "artefact: written for speckv.live.SpeculativeDecoder; 100.00% of" in done.stdout
    assert "tokens/s (95 %: " in done.stdout
    assert load_policy("artefact").get_params() == load_policy("saved").get_params()
    shown = json.loads(run("saved", "--to", "speckv", "--out", "again", "--json", *data).stdout)
    assert shown == json.loads((place / "again" / "fidelity.json").read_text()) and shown["exporter"] == "speckv"


def test_a_policy_that_needs_no_training_goes_by_its_name(place):
    data = ["--traces", "traces", "--costs", "costs.json"]
    assert run("fixed:gamma=3", "--to", "speckv", "--out", "out", *data).exit_code == 0
    assert load_policy("out").get_params() == {"gamma": 3}
    (place / "saved").rename(place / "fixed")  # a folder comes first
    assert run("fixed", "--to", "speckv", "--out", "again", *data).exit_code == 0
    assert load_policy("again").name == "confidence"


def test_a_warning_is_one_line(place):
    data = ["--traces", "traces", "--costs", "costs.json"]
    done = run("saved", "--to", "tensorrt-llm", "--approximate", "--out", "out", *data)
    (line,) = done.stderr.splitlines()
    assert line.startswith("speckv: the costs of toy are of batches of 1 alone") and done.exit_code == 0
    assert "sequences, in batches of 1, costs of toy" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a saved policy's folder, --to and --out; or --list"),
        (["saved", "--to", "spekv", "--out", "out"], "exporter 'spekv' is unknown; did you mean 'speckv'?"),
        (["nothing", "--to", "speckv", "--out", "out"], "no such file; expected a saved policy"),
        (
            ["hazard", "--to", "speckv", "--out", "out"],
            "'hazard' has to be trained: `speckv train hazard --out FOLDER`",
        ),
        (["saved", "--to", "speckv", "--out", "traces"], "traces: exists already"),
        (["large", "--to", "speckv", "--out", "out", "--traces", "traces", "--costs", "costs.json"], "plays gamma 9"),
    ],
)
def test_what_cannot_be_exported_is_one_line(arguments, message, place):
    before = sorted(place.rglob("*"))
    done = run(*arguments)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and line.startswith("speckv: error: ") and message in line
    assert sorted(place.rglob("*")) == before
