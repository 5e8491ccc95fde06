"""Flags of llama.cpp that decide as the replay of them says; the server itself drafts and accepts what was predicted.

    SPECKV_GGUF=TARGET.gguf,DRAFT.gguf SPECKV_MODELS=/folder/of/models pytest -m real_model tests/test_llamacpp.py -s

The folder holds the same models for transformers, named like the files; they are recorded, and what llama.cpp counts
stands beside what a replay of its flags predicts. `SPECKV_TRACES` names a recording of the pair that is there already.
"""

import dataclasses
import json
import os
import pathlib
import urllib.request

import numpy as np
import pytest

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.exporters.llamacpp import LlamaCppExporter, LlamaCppPythonExporter
from speckv.exporters.settings import Setting, SettingsPolicy
from speckv.exporting import export, fidelity
from speckv.plugins import make_policy
from speckv.prompts import load_prompts
from speckv.replaying import replay
from speckv.runtime import Bundle
from speckv.runtime.programs import Program, Table, Threshold
from speckv.shipped import PROMPTS
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog
from speckv.traces import Manifest, TraceDataset

from .synthetic import make_costs, make_rollouts


def test_one_command_line_for_each_compression(tmp_path):
    policy = make_policy("best-fixed")
    policy.fitted = {"gamma": np.array([0, 1, 2, 4, 8])}
    export(LlamaCppExporter(), policy, tmp_path / "out", make_rollouts(), make_costs())
    lines = (tmp_path / "out" / "commands.txt").read_text().splitlines()
    assert lines[0] == "fp32: llama-server --model TARGET.gguf"
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())["settings"]
    assert settings["fp32"] == {"draft_model": None}, "an n_max of 0 ends the server"
    assert settings["int8"] == {"n_max": 4, "n_min": 0, "p_min": 0.0}
    assert lines[3] == (
        "int8: llama-server --model TARGET.gguf --spec-draft-model DRAFT.gguf --spec-type draft-simple "
        "--spec-draft-n-max 4 --spec-draft-n-min 0 --spec-draft-p-min 0.0"
    )
    assert len(lines) == 5


def test_a_token_is_drawn_if_it_is_likely_among_the_ten_likeliest(tmp_path):
    """Step by step, from the recorded signals."""
    traces, costs = make_rollouts(), make_costs()
    exporter = LlamaCppExporter()
    held = exporter.played(Setting(6, 0.5))
    assert fidelity(exporter, held, traces, costs).equal_decisions == 1.0
    run = replay(held, traces, costs)
    undecided = 0
    for row, position, gamma, forwards in zip(run.sequence, run.position, run.gamma, run.forwards, strict=True):
        most, drafted = min(6, traces.limit[row, position]), 0
        while drafted < most:
            top1, top10 = (
                float(traces.drafted_signal(name, np.array([row]), np.array([position]), drafted)[0])
                for name in ("draft_top1", "draft_top10")
            )
            undecided += top1 < 0.5 <= top1 / top10
            if top1 / top10 < 0.5:
                break
            drafted += 1
        assert (gamma, forwards) == (drafted, drafted + (drafted < most))
    assert undecided, "top-1 by itself would have decided the same"


def test_drafts_that_would_be_thrown_away_are_refused(tmp_path):
    exporter = LlamaCppExporter()
    export(exporter, make_policy("fixed:gamma=4"), tmp_path / "out", make_rollouts(), make_costs())
    path = tmp_path / "out" / "settings.json"
    changed = json.loads(path.read_text())
    for least, refused in ((1, False), (2, True)):
        changed["settings"]["bf16"]["n_min"] = least
        path.write_text(json.dumps(changed))
        if refused:
            with pytest.raises(SpecKVError, match="n_min 2 throws drafts away; only 0 and 1 can be replayed"):
                exporter.load(tmp_path / "out")
        else:
            assert exporter.read(tmp_path / "out")["bf16"] == Setting(4)


def test_an_n_max_of_0_is_refused(tmp_path):
    exporter = LlamaCppExporter()
    exporter.export(make_policy("fixed:gamma=4"), tmp_path)
    value = json.loads((tmp_path / "settings.json").read_text())
    value["settings"]["bf16"]["n_max"] = 0
    (tmp_path / "settings.json").write_text(json.dumps(value))
    with pytest.raises(SpecKVError, match=r'an n_max of 0 ends the server; no speculation is \{"draft_model": null\}'):
        exporter.load(tmp_path)


def test_llama_cpp_python_is_given_what_it_can_show():
    exporter = LlamaCppPythonExporter()
    assert exporter.verdict(make_policy("mlp"))[0] == "exactly"
    assert (
        "target_entropy, target_margin, which llama-cpp-python 0.3.36 can't" in exporter.verdict(make_policy("ppo"))[1]
    )


THREADS = 1
#: Flags that are tried for real.
TRIED = {"plain": Setting(0), "n_max 4": Setting(4), "n_max 8, p_min 0.6": Setting(8, 0.6)}
#: Logits by which two tokens may differ and still change places when another number of tokens shares a forward: of
#: 4-bit weights that are multiplied with 8-bit activations.
NEAR_TIE = 0.5


class Server:
    """llama.cpp's server in this process, greedy, with the flags of a setting."""

    def __init__(self, gguf: tuple[str, str], setting: Setting) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = gguf[0], 1024, 1
        params.warmup, params.verbosity = False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        if setting.cap:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            drafting = params.speculative.draft
            drafting.mparams.path = gguf[1]
            drafting.cpuparams.n_threads = drafting.cpuparams_batch.n_threads = THREADS
            for name, value in LlamaCppExporter().to_native(setting).items():
                setattr(drafting, name, value)
        self.server = xllamacpp.Server(params)
        self.shown = 0 if setting.cap else 2  # of verified drafts it shows no probabilities

    def complete(self, prompt: list[int], budget: int) -> "Completion":
        body = {"prompt": prompt, "n_predict": budget, "temperature": 0.0, "return_tokens": True,
                "n_probs": self.shown, "cache_prompt": False}  # fmt: skip
        place, kind = f"{self.server.listening_address}/completion", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(place, json.dumps(body).encode(), kind)) as answer:
            value = json.load(answer)
        tops, times = [token["top_logprobs"] for token in value.get("completion_probabilities", [])], value["timings"]
        return Completion(
            tokens=value["tokens"],
            margins=[likeliest["logprob"] - second["logprob"] for likeliest, second in tops],
            drafted=times.get("draft_n", 0),
            accepted=times.get("draft_n_accepted", 0),
            seconds=times["predicted_ms"] / 1000,
        )


@dataclasses.dataclass
class Completion:
    """A text: its tokens, by how many logits each was the likeliest if known, tokens drafted, accepted, and seconds."""

    tokens: list[int]
    margins: list[float]
    drafted: int
    accepted: int
    seconds: float


def check_same(tokens: list[int], plain: Completion) -> bool:
    """Whether a text is that of the target alone. Where it is not, it must part from it at a near tie."""
    at = next((n for n, (one, other) in enumerate(zip(tokens, plain.tokens, strict=False)) if one != other), None)
    assert at is not None or len(tokens) == len(plain.tokens)
    assert at is None or plain.margins[at] < NEAR_TIE
    return at is None


@pytest.fixture(scope="module")
def gguf() -> tuple[str, str]:
    if not (paths := os.environ.get("SPECKV_GGUF")):
        pytest.skip("SPECKV_GGUF is not set: name TARGET.gguf,DRAFT.gguf")
    target, draft = paths.split(",")
    return target, draft


@pytest.fixture(scope="module")
def recorded(gguf, tmp_path_factory) -> TraceDataset:
    """A recording of the pair: the one that is named, or one of a prompt of each task."""
    if given := os.environ.get("SPECKV_TRACES"):
        return TraceDataset(given)
    if not (folder := os.environ.get("SPECKV_MODELS")):
        pytest.skip(
            "neither SPECKV_TRACES nor SPECKV_MODELS is set: name a recording of the pair, or its models' folder"
        )
    from speckv.live.models import ModelPair
    from speckv.live.recorder import record

    target, draft = (f"{folder}/{pathlib.Path(path).stem}" for path in gguf)
    pair = ModelPair.load(target, draft, "bf16", compute="float32", draft_compute="float32")
    prompts = {prompt.task: prompt for prompt in load_prompts(PROMPTS)}.values()
    dataset = TraceDataset.create(tmp_path_factory.mktemp("real") / "traces", Manifest(8, 32, {}))
    list(record(pair, list(prompts), dataset, batch_size=len(prompts)))
    return dataset


class BehindThePrompt(SettingsPolicy):
    """The server takes a text's first token from its forward over the prompt, and drafts for none before that."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(LlamaCppExporter(), dict.fromkeys(COMPRESSIONS, setting))
        self.features = (*self.features, "is_first")

    def choose_gamma(self, features, state):
        return np.where(features["is_first"] > 0, 0, super().choose_gamma(features, state))


@pytest.mark.real_model
def test_the_server_drafts_and_accepts_what_was_predicted(gguf, recorded, capsys):
    pytest.importorskip("xllamacpp")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    traces, budget = recorded.load(), recorded.manifest.max_new_tokens
    costs = make_costs()  # any: what is drafted hangs on no time
    plain: dict[str, Completion] = {}
    for name, setting in TRIED.items():
        server = Server(gguf, setting)
        done = {text.id: server.complete(text.prompt_tokens.tolist(), budget) for text in recorded}
        plain = plain or done
        same = [check_same(done[text].tokens, plain[text]) for text in done]
        # Where the 4-bit files lead to another text than the recorded weights, there is nothing to compare with.
        rows = [row for row, text in enumerate(traces.ids)
                if done[text].tokens == traces.tokens[row, : traces.lengths[row]].tolist()]  # fmt: skip
        run = replay(BehindThePrompt(setting), traces.take(rows), costs)
        predicted = np.array([run.gamma.sum(), run.accepted.sum()])
        counted = np.array([[done[text].drafted, done[text].accepted] for text in traces.ids[rows]]).sum(axis=0)
        with capsys.disabled():
            seconds, before = (sum(text.seconds for text in texts.values()) for texts in (done, plain))
            print(
                f"\n{name}: {before / seconds:.2f} times plain tokens/s, {sum(same)} of {len(same)} texts as plain, "
                f"{len(rows)} as recorded; of those drafted {counted[0]} (predicted {predicted[0]}), "
                f"accepted {counted[1]} ({predicted[1]})"
            )
        assert rows and (setting.cap > 0) == (counted[0] > 0)
        assert (np.abs(counted - predicted) <= 0.1 * predicted + 2).all()


THRESHOLD = 0.6
#: How far a probability moves when another number of tokens shares a forward.
ROUNDING = 0.1
PROGRAMS = {
    "none": make_policy("none").program(),
    "heuristic": make_policy("heuristic").program(),
    "threshold": Program(Table(np.full(5, 6)), Threshold("draft_top1", np.full(5, THRESHOLD), drawn=False)),
}


@pytest.mark.real_model
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bundle_drafts_for_llama_cpp_python(name, gguf, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    from speckv.runtime.llamacpp import BundleDraftModel

    options = {"n_ctx": 128, "n_threads": THREADS, "n_threads_batch": THREADS, "verbose": False}
    target, draft = (llama_cpp.Llama(path, logits_all=True, **options) for path in gguf)
    bundle = Bundle(name, PROGRAMS[name])
    with StepLogWriter(tmp_path / "log") as log:
        drafter = BundleDraftModel(bundle, llama_cpp.Llama(gguf[1], **options), log=log)
        speculating = llama_cpp.Llama(gguf[0], draft_model=drafter, **options)
        logged = []
        for prompt in ("def area(w, h):\n    return", "The sea is"):
            before = target.tokenize(prompt.encode())
            alone, text = (generate(model, before) for model in (target, speculating))
            top = np.sort(target.scores[len(before) - 1 : target.n_tokens], axis=1)
            check_same(text, Completion(alone, (top[:, -1] - top[:, -2]).tolist(), 0, 0, 0.0))
            logged += drafter.steps
            # The first token comes from the prompt; nothing tells what came of the last draft.
            assert 0 <= len(text) - 1 - sum(accepted + 1 for _, accepted in drafter.steps) <= max(bundle.gammas) + 1
            check_decisions(bundle, drafter.steps, likeliest_of(draft, before + text)[len(before) :])
    steps = StepLog.load(tmp_path / "log")
    assert list(zip(steps.gamma.tolist(), steps.accepted.tolist(), strict=True)) == logged and steps.seconds.min() > 0
    assert (len(set(steps.gamma.tolist())) > 1) == (name != "none")


def test_a_bundle_that_reads_what_the_target_says_is_refused():
    pytest.importorskip("llama_cpp")
    from speckv.runtime.llamacpp import BundleDraftModel

    hazard = Bundle("hazard", make_policy("hazard").fit(make_rollouts(), make_costs()).program())
    with pytest.raises(SpecKVError, match="'hazard' reads target_entropy, target_margin, which llama-cpp-python can't"):
        BundleDraftModel(hazard, draft=None)


def generate(model, prompt: list[int]) -> list[int]:
    """24 tokens, greedy, or fewer up to an end token."""
    text: list[int] = []
    for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
        text.append(token)
        if len(text) == 24 or token == model.token_eos():
            break
    return text


def likeliest_of(model, tokens: list[int]) -> list[float]:
    """The probability of the likeliest token in place of each of these tokens, and behind the last."""
    model.reset()
    model.eval(tokens)
    logits = model.scores[: len(tokens)].astype(float)
    return [1.0, *(1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))]


def check_decisions(bundle: Bundle, steps: list[tuple[int, int]], likeliest: list[float]) -> None:
    """Whether a bundle drafts as much by itself; of its thresholds, as sure as rounding leaves it."""
    sequence, at = bundle.start(), 1
    for drafted, accepted in steps:
        most = sequence.choose_gamma()
        if bundle.asks is None:
            assert drafted == most
        else:
            assert all(likeliest[at + place] > THRESHOLD - ROUNDING for place in range(accepted))
            assert accepted < drafted or drafted == most or likeliest[at + drafted] < THRESHOLD + ROUNDING
        sequence.observe(drafted, accepted)
        at += accepted + 1
