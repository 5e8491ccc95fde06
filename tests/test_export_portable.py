"""Bundles, ONNX graphs and C headers decide as the policy that they were made of; what has no portable form is refused
with the reason, or imitated, with the loss."""

import copy
import ctypes
import functools
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from speckv import runtime
from speckv.cli import main
from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.exporters import c
from speckv.exporters.bundle import BundleExporter
from speckv.exporters.c import _LIBRARY, HEADER, CExporter, make_header
from speckv.exporters.imitation import imitate
from speckv.exporters.onnx import OnnxExporter, make_graphs
from speckv.exporters.portable import BundlePolicy
from speckv.exporting import _equal_steps, export, fidelity
from speckv.features import FEATURES, TOKEN_SIGNALS, Features
from speckv.plugins import make_exporter, make_policy, registry
from speckv.policy import Clairvoyant
from speckv.replaying import replay
from speckv.runtime import Bundle
from speckv.runtime.models import Inputs, Network
from speckv.runtime.programs import Choice, Gate, Program
from speckv.saving import save_policy
from speckv.testing import check_exporter
from speckv.testing.recordings import dense, make_sequences
from speckv.traces import TraceDataset

from .portable import EXACT, FORMS, decode, fitted, recording
from .synthetic import make_costs, write_dataset

EXPORTERS = {"bundle": BundleExporter, "onnx": OnnxExporter, "c": CExporter}

needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))), reason="needs the extra export"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
MARKS = {"bundle": (), "onnx": needs_onnx, "c": needs_compiler}
each_exporter = pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in EXPORTERS])


def test_the_forms_are_all_there_are():
    forms = {fitted(spec).program().form for spec in EXACT}
    assert forms == {fitted(spec).program().form for spec in FORMS} and len(forms) == 7


@each_exporter
@pytest.mark.parametrize("spec", FORMS)
def test_every_decision_is_the_policys_own(spec, name):
    result = fidelity(EXPORTERS[name](), fitted(spec), *recording())
    assert result.equal_decisions == 1.0 and result.throughput == result.original_throughput
    assert result.steps > 100


BEFORE = [name for name, feature in FEATURES.items() if feature.when == "before"]


@functools.cache
def observations():
    """What is known before each step of three gammas, and each signal of the first tokens of its draft."""
    traces, costs = recording()
    known, signals = [], []
    for gamma in (0, 1, 8):
        run = replay(make_policy(f"fixed:gamma={gamma}"), traces, costs, features=BEFORE)
        at = np.flatnonzero(traces.limit[run.sequence, run.position] >= TOKENS)
        known.append(np.stack([run.features[name][at] for name in BEFORE]))
        place = run.sequence[at][:, None], run.position[at][:, None], np.arange(TOKENS)
        signals.append(np.stack([traces.drafted_signal(recorded, *place) for recorded in TOKEN_SIGNALS.values()]))
    return np.concatenate(known, axis=1), np.concatenate(signals, axis=1)


TOKENS = 4


def answers(policy):
    """What it says of every observation: its gammas, and in each draft whether to draw and whether to go on."""
    known, signals = observations()
    rows = known.shape[1]
    before = dict(zip(BEFORE, known, strict=True))
    state = policy.new_state(rows)
    chosen = policy.choose_gamma(Features(before, rows, "before"), state)
    said = [np.minimum(np.broadcast_to(chosen, rows), 8)]
    for index in range(TOKENS):
        token = dict(zip(TOKEN_SIGNALS, signals[..., index].astype(float), strict=True))
        features = Features(before | token | {"draft_index": np.full(rows, index + 1.0)}, rows, "drawn")
        for decision in ("draw_token", "keep_drafting"):
            if policy.overrides(decision):
                said.append(np.broadcast_to(getattr(policy, decision)(features, state), rows))
    return np.stack(said)


@pytest.mark.parametrize("name", ["bundle", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize("spec", FORMS)
def test_of_every_recorded_observation_it_says_the_same(spec, name, tmp_path):
    """Of headers nothing can be asked but in the order of a text: they keep what they observe."""
    policy = fitted(spec)
    EXPORTERS[name]().export(policy, tmp_path)
    if policy.overrides("observe"):  # it decides by what it remembers, not by what it is shown
        policy = BundlePolicy(Bundle(spec, policy.program()))
    expected, found = answers(policy), answers(EXPORTERS[name]().load(tmp_path))
    assert expected.shape == found.shape and expected.shape[1] > 400
    assert np.array_equal(expected, found)


@pytest.mark.parametrize("spec", [spec for spec in FORMS if not spec.startswith("fixed")])
def test_these_policies_are_varied(spec):
    """If they always did the same, the tests above would show little."""
    assert len(np.unique(replay(fitted(spec), *recording()).gamma)) > 2


@needs_compiler
@pytest.mark.parametrize("spec", FORMS)
def test_a_c_host_that_tells_what_it_sees_decodes_as_the_replay(spec, tmp_path):
    policy, (_, costs) = fitted(spec), recording()
    library = library_of(Bundle(policy.label, policy.program()), tmp_path)
    for rollout in make_sequences(prompts=2, gamma_max=8, budget=40, seed=6):
        run = replay(policy, dense(rollout, gamma_max=8, budget=40), costs)
        at = ctypes.create_string_buffer(library.size())
        code = {"bf16": 1, "nf4": 4}[rollout.compression]
        ratio = ctypes.c_double(costs.cost_ratio(rollout.compression))
        library.host_start(at, len(rollout.prompt_tokens), code, ratio)

        def draw(at=at, **signals):
            values = [signals[f"draft_{name}"] for name in ("entropy", "top1", "top2", "top10")]
            return library.host_draw_token(at, *map(ctypes.c_double, values))

        steps = decode(
            rollout, 8, 40,
            lambda at=at: library.host_choose_gamma(at, 1),
            draw,
            lambda p, at=at: library.host_keep_drafting(at, ctypes.c_double(p)),
            lambda d, a, e, m, at=at: library.host_observe(at, d, a, ctypes.c_double(e), ctypes.c_double(m)),
        )  # fmt: skip
        assert steps == list(zip(run.position, run.gamma, run.accepted, run.forwards, strict=True))


def library_of(bundle: Bundle, folder: pathlib.Path) -> ctypes.CDLL:
    """What a host calls, as a library, from a compiler that forgives nothing."""
    (folder / HEADER).write_text(make_header(bundle))
    calls = """
void host_start(speckv_sequence *s, int n, int c, double r) { speckv_start(s, n, c, r); }
int host_choose_gamma(speckv_sequence *s, int n) { return speckv_choose_gamma(s, n); }
int host_draw_token(speckv_sequence *s, double a, double b, double c, double d)
{ return speckv_draw_token(s, a, b, c, d); }
int host_keep_drafting(speckv_sequence *s, double p) { return speckv_keep_drafting(s, p); }
int host_observe(speckv_sequence *s, int d, int a, double e, double m) { return speckv_observe(s, d, a, e, m); }
"""
    (folder / "host.c").write_text(_LIBRARY + calls)
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    command = ["cc", *strict, "-O1", "-shared", "-fPIC", "-o", "host.so", "host.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return ctypes.CDLL(str(folder / "host.so"))


@needs_compiler
def test_a_c_host_tells_the_cost_ratio_and_the_batch_size(tmp_path):
    """A gate on their sum, in C and in Python."""
    total = Network(Inputs(("cost_ratio", "batch_size"), ("none", "none")), (np.ones((2, 1)),), (np.zeros(1),))
    program = Program(Gate(total, np.full(len(COMPRESSIONS), 3.0), cap=4))
    library = library_of(Bundle("by-hand", program), tmp_path)
    at = ctypes.create_string_buffer(library.size())
    for ratio, batch_size, gamma in ((0.5, 2, 0), (0.5, 3, 4), (1.5, 2, 4)):
        library.host_start(at, 20, 1, ctypes.c_double(ratio))
        assert library.host_choose_gamma(at, batch_size) == gamma
        assert Bundle("by-hand", program).start(20, "bf16", ratio).choose_gamma(batch_size) == gamma


@needs_compiler
@pytest.mark.parametrize("spec", FORMS)
def test_hosts_in_c_and_cpp_include_it_without_a_warning(spec, tmp_path):
    (tmp_path / HEADER).write_text(make_header(Bundle(spec, fitted(spec).program())))
    host = f'#include "{HEADER}"\nint host(speckv_sequence *s) {{ speckv_start(s, 9, 1, 0.1); return 0; }}\n'
    (tmp_path / "host.c").write_text(host)
    (tmp_path / "host.cpp").write_text(host)
    strict = ["-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fsyntax-only"]
    for standard in ("c99", "c11", "c++11", "c++17", "c++20"):
        compiler, source = ("c++", "host.cpp") if "++" in standard else ("cc", "host.c")
        if shutil.which(compiler):
            subprocess.run([compiler, f"-std={standard}", *strict, source], cwd=tmp_path, check=True, timeout=60)


@needs_compiler
def test_a_c_host_is_told_of_an_outcome_that_cannot_be(tmp_path):
    library = library_of(bundle := Bundle("heuristic", fitted("heuristic").program()), tmp_path)
    at = ctypes.create_string_buffer(library.size())
    library.host_start(at, 20, 1, ctypes.c_double(0.1))
    zero = ctypes.c_double(0)
    before = at.raw
    assert [library.host_observe(at, *outcome, zero, zero) for outcome in ((3, 5), (2, -1), (-1, -1))] == [0, 0, 0]
    assert at.raw == before, "what was refused left no trace"
    assert library.host_observe(at, 3, 2, zero, zero) == 1 and at.raw != before
    assert bundle.asks is None


@needs_compiler
def test_an_entropy_that_was_rounded_below_0_is_0(tmp_path):
    bundle = Bundle("hazard", fitted("hazard").program())
    library = library_of(bundle, tmp_path)
    assert "sqrt" in bundle.program.stop.here.inputs.transforms
    answers = []
    for entropy in (0.0, -1e-8):
        at, sequence = ctypes.create_string_buffer(library.size()), bundle.start(10, "nf4", 0.1)
        library.host_start(at, 10, list(COMPRESSIONS).index("nf4"), ctypes.c_double(0.1))
        library.host_choose_gamma(at, 1), sequence.choose_gamma()
        in_c = library.host_draw_token(at, *map(ctypes.c_double, (entropy, 1.0, 0.0, 1.0)))
        told = dict(draft_entropy=entropy, draft_top1=1.0, draft_top2=0.0, draft_top10=1.0)
        answers += [in_c, sequence.draw_token(**told)]
    assert len(set(answers)) == 1


#: Faults in what a header keeps of a sequence, and a policy, or a feature, that shows it.
FAULTS = {
    "s->is_first = 0;": ("s->is_first = 1;", "heuristic"),
    "s->last_gamma = drafted;": ("s->last_gamma = drafted + 1;", "heuristic"),
    "s->last_accepted = accepted;": ("s->last_accepted = drafted;", "heuristic"),
    "s->draft_index = index + 1;": ("s->draft_index = 1;", "p-min:n_max=6,n_min=2,p_min=0.7"),
    "s->draft_top1 = top1;": ("s->draft_top1 = top2;", "kangaroo"),
    "s->context_length += accepted + 1;": ("s->context_length += 9;", "context_length"),
    "s->position += accepted + 1;": ("s->position += accepted;", "position"),
    "s->tried += accepted + (accepted < drafted);": ("s->tried += drafted;", "running_acceptance"),
    "s->entropies[index] = entropy;": ("s->entropies[0] = entropy;", "last_mean_entropy"),
    "highest = speckv_max(highest, s->entropies[i]);": ("highest = s->entropies[i];", "last_max_entropy"),
    "s->last_mean_top1 = top1 / drafted;": ("s->last_mean_top1 = top1;", "last_mean_top1"),
    "lowest = speckv_min(lowest, s->top1s[i]);": ("lowest = s->top1s[i];", "last_min_top1"),
    "s->target_entropy = target_entropy;": ("s->target_entropy = 0;", "target_entropy"),
    "s->target_margin = target_margin;": ("s->target_margin = 1;", "target_margin"),
    "s->survival = 1;\n    s->goes_on = 1;\n    s->draft_index": ("s->draft_index", "specdec-pp"),
}


def looking_at(feature):
    """Drafts four tokens where a feature is below its median, else one."""
    traces, costs = recording()
    run = replay(make_policy("fixed:gamma=3"), traces, costs, features=[feature])
    middle = float(np.median(run.features[feature]))
    line = Network(Inputs((feature,), ("none",)), (np.array([[1.0, 0.0]]),), (np.array([0.0, middle]),))
    none = np.zeros((len(COMPRESSIONS), 2))
    return BundlePolicy(Bundle(feature, Program(Choice(np.array([1, 4]), line, np.ones(2), none))))


@needs_compiler
@pytest.mark.parametrize("right", FAULTS)
def test_a_header_that_keeps_its_features_wrong_is_found_out(right, tmp_path, monkeypatch):
    """In the replay of an export the header's own functions keep them."""
    wrong, spec = FAULTS[right]
    policy = looking_at(spec) if spec in FEATURES else fitted(spec)
    assert fidelity(CExporter(), policy, *recording()).equal_decisions == 1.0
    text = c._TEMPLATE.read_text()
    assert text.count(right) == 1
    monkeypatch.setattr(c, "_TEMPLATE", tmp_path / "policy.h")
    c._TEMPLATE.write_text(text.replace(right, wrong))
    assert fidelity(CExporter(), policy, *recording()).equal_decisions < 1.0


@needs_onnx
@pytest.mark.parametrize("spec", FORMS)
def test_graphs_are_valid_and_take_features_as_they_are(spec):
    import onnx

    program = fitted(spec).program()
    graphs = make_graphs(program)
    for graph in graphs.values():
        onnx.checker.check_model(graph, full_check=True)
    taken = {entry.name for graph in graphs.values() for entry in graph.graph.input}
    assert taken - {"survival", "goes_on"} <= set(program.features)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=MARKS[name]) for name in EXPORTERS), "transformers"])
def test_the_kit_finds_nothing(name):
    policies = [fitted(spec) for spec in ("fixed:gamma=3", "confidence:threshold=0.4,cap=5", "hazard", "heuristic")]
    made = check_exporter(make_exporter(name), policies=policies)
    assert {result.status for result in made.results} == {"passed"}, str(made)


WHY_NOT = {
    "ucb1": "it learns while it runs",
    "hill-climb": "it remembers more of a sequence than the portable forms do",
    "leviathan": "its rule is none of the portable forms",
    "token-hazard": "it reads draft_token, which a host that calls speckv.runtime can't show",
    "hysteresis": "it remembers more of a sequence",
    "oracle": "it knows the future",
}


@pytest.mark.parametrize("spec", WHY_NOT)
def test_what_has_no_portable_form_is_refused_with_the_reason(spec):
    policy = make_policy(spec)
    if not isinstance(policy, Clairvoyant):
        policy.fit(*recording())
    with pytest.raises(SpecKVError) as caught:
        BundleExporter().check(policy)
    assert WHY_NOT[spec] in str(caught.value) and "\n" not in str(caught.value)
    if spec != "oracle":
        with pytest.raises(SpecKVError, match="runs in speckv only"):
            policy.program()


def test_what_a_decoder_does_not_tell_is_refused_in_the_portable_form_too():
    """`heuristic` reads no feature, but its portable form reads the last step."""

    class Deaf(BundleExporter):
        observes = BundleExporter.observes - {"last_gamma"}

    with pytest.raises(SpecKVError, match="reads last_gamma, which a host that calls"):
        Deaf().check(fitted("heuristic"))


@pytest.mark.parametrize("spec", ["hill-climb", "gammatune", "leviathan", "token-hazard", "draft-verify", "adaedl"])
def test_an_imitation_comes_near(spec):
    """Nearer than the best fixed gamma does, on prompts that it has not seen."""
    traces, costs = recording()
    policy = make_policy(spec).fit(traces, costs)
    half = np.isin(traces.ids, np.unique(traces.ids)[::2])
    learned, judged = traces.take(half), traces.take(~half)
    near = BundlePolicy(Bundle(spec, imitate(policy, learned, costs, BundleExporter.observes)))
    equal = fidelity(BundleExporter(), near, judged, costs)
    assert equal.equal_decisions == 1.0, "the imitation itself is portable"
    of_policy = share(policy, near, judged, costs)
    assert of_policy > share(policy, fitted("best-fixed"), judged, costs) and of_policy > 0.4


def share(policy, other, traces, costs):
    one, two = (replay(copy.deepcopy(p), traces, costs, (0.0, 0.0)) for p in (policy, other))
    return _equal_steps(one, two) / len(one.gamma)


def test_an_imitation_of_a_policy_that_never_drafts():
    program = imitate(make_policy("none"), *recording(), BundleExporter.observes)
    assert program.gammas == (0,)


def test_the_loss_is_shown_and_stored(tmp_path):
    traces, costs = recording()
    policy = make_policy("gammatune")
    with pytest.raises(SpecKVError, match="remembers more of a sequence"):
        export(BundleExporter(), policy, tmp_path / "out", traces, costs)
    result = export(BundleExporter(), policy, tmp_path / "out", traces, costs, approximate=True)
    assert 0.3 < result.equal_decisions < 1 and result.sequences < len(traces)
    bundle = runtime.load(tmp_path / "out")
    assert bundle.fidelity["approximated"] and bundle.fidelity["equal_decisions"] == result.equal_decisions
    assert bundle.policy == "gammatune, approximated" and bundle.fidelity["policy"] == "gammatune"
    # What fits exactly is exported exactly.
    result = export(BundleExporter(), fitted("mlp"), tmp_path / "exact", traces, costs, approximate=True)
    assert result.equal_decisions == 1.0 and result.sequences == len(traces)
    assert not runtime.load(tmp_path / "exact").fidelity["approximated"]


def test_a_decoder_that_cannot_stop_a_draft_gets_a_gamma(tmp_path):
    class Before(BundleExporter):
        kinds = frozenset({"before"})
        observes = frozenset({"last_gamma", "last_accepted", "running_acceptance", "is_first", "compression"})

    traces, costs = recording()
    result = export(Before(), fitted("confidence"), tmp_path / "out", traces, costs, approximate=True)
    program = runtime.load(tmp_path / "out").program
    assert program.form == "choice" and set(program.features) <= Before.observes and len(program.gammas) > 2
    assert 0.1 < result.equal_decisions < 0.9


@pytest.mark.parametrize("spec", ["oracle", "hazard"])
def test_what_cannot_be_imitated(spec, tmp_path):
    with pytest.raises(SpecKVError, match=r"knows the future|is not fitted"):
        export(BundleExporter(), make_policy(spec), tmp_path / "out", *recording(), approximate=True)
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SpecKVError, match=r"onnx is not installed; run: pip install 'speckv\[export\]'"):
        OnnxExporter().check(fitted("mlp"))


def test_without_a_compiler_the_message_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SpecKVError, match="there is no C compiler to check an exported header with; install gcc"):
        CExporter().check(fitted("mlp"))


def test_a_header_says_what_it_is():
    text = make_header(Bundle('odd "name" \\ ??/', fitted("mlp").program()))
    assert '#define SPECKV_POLICY "odd \\"name\\" \\\\ \\?\\?/"' in text
    assert '#define SPECKV_READS "compression,last_mean_entropy,' in text and "#define SPECKV_NF4 4" in text
    assert not re.search(r"\b(malloc|calloc|free|printf)\b", text)
    assert re.findall(r"#include <(.*)>", text) == ["math.h", "string.h"]
    assert not re.search(r"@[A-Z]+@", text)


def run(*arguments):
    return CliRunner().invoke(main, ["export", *arguments])


def test_the_list_says_what_fits():
    rows = {row["name"]: row for row in json.loads(run("--list", "--json").stdout)}
    assert set(rows) >= {"speckv", "bundle", "onnx", "c", "transformers"}
    known = set(registry().policies)
    for row in rows.values():
        parts = [set(row["policies"][fit]) for fit in ("exactly", "approximately", "not")]
        assert set().union(*parts) == known and sum(map(len, parts)) == len(known)
        assert {"oracle", "perfect-judge", "task-oracle"} <= set(row["policies"]["not"])
    portable = {spec.partition(":")[0] for spec in EXACT}
    assert set(rows["c"]["policies"]["exactly"]) == portable
    assert rows["c"]["policies"]["approximately"]["ucb1"] == "it learns while it runs"
    assert not rows["speckv"]["policies"]["approximately"]
    assert rows["c"]["observes"] == [name for name in FEATURES if name != "draft_token"]
    shown = " ".join(run("--list").stdout.split())
    assert "all but draft_token" in shown and "holds exactly best-fixed, " in shown


def test_on_the_command_line_a_training_prompt_is_not_judged_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "traces", make_sequences(prompts=6, budget=12), budget=12)
    make_costs().save(tmp_path / "costs.json")
    data = ["--traces", "traces", "--costs", "costs.json"]
    trained = CliRunner().invoke(main, ["train", "mlp", "--out", "mlp", "--folds", "3", *data])
    assert trained.exit_code == 0, trained.output
    about = json.loads((tmp_path / "mlp" / "training.json").read_text())
    done = run("mlp", "--to", "bundle", "--out", "out", *data)
    assert done.exit_code == 0, done.output
    assert "of prompts that it was not trained on" in done.stdout and "100.00% of" in done.stdout
    stored = runtime.load("out").fidelity
    assert stored["training"] == about
    ids = TraceDataset(tmp_path / "traces").load().ids
    assert stored["sequences"] == int((~np.isin(ids, about["prompts"])).sum()) < len(ids)
    write_dataset(tmp_path / "others", make_sequences(prompts=6, budget=12, seed=1), budget=12)
    other = run("mlp", "--to", "bundle", "--out", "second", "--traces", "others", "--costs", "costs.json")
    assert other.exit_code == 0 and f"; {len(ids)} sequences, costs" in other.stdout


def test_an_approximation_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "traces", make_sequences(prompts=6, budget=12), budget=12)
    make_costs().save(tmp_path / "costs.json")
    save_policy(make_policy("gammatune"), tmp_path / "saved")
    arguments = ["saved", "--to", "bundle", "--out", "out", "--traces", "traces", "--costs", "costs.json"]
    refused = run(*arguments)
    assert (
        refused.exit_code == 2 and "remembers more of a sequence" in refused.stderr and not (tmp_path / "out").exists()
    )
    done = run(*arguments, "--approximate")
    assert done.exit_code == 0 and "fitted to half of the prompts, and written for a host" in done.stdout


@pytest.mark.slow
@each_exporter
@pytest.mark.parametrize("spec", ["mlp", "mlp-throughput", "hazard", "confidence", "svip", "disco"])
def test_on_the_shipped_recording(spec, name):
    """Trained on half of the prompts, every decision on the other half is equal."""
    from speckv.comparison import folds_of
    from speckv.shipped import shipped_costs, shipped_traces

    traces, costs = shipped_traces().load(), shipped_costs()[0]
    half = folds_of(traces, 2, seed=0) == 0
    policy = make_policy(spec).fit(traces.take(half), costs)
    result = fidelity(EXPORTERS[name](), policy, traces.take(~half), costs)
    print(f"{spec} as {name}: {result.equal_decisions:.4%} of {result.steps} steps")
    assert result.equal_decisions == 1.0
