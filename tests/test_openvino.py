"""OpenVINO GenAI drafts as its parameters say, and as a replay of the same models predicts.

    SPECKV_GGUF=TARGET.gguf,DRAFT.gguf pytest -m real_model tests/test_openvino.py -s

Folders that OpenVINO made of such files will do as well.
"""

import json
import os
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from speckv.errors import SpecKVError
from speckv.exporters.openvino import OpenVinoExporter
from speckv.exporters.settings import Setting
from speckv.exporting import fidelity
from speckv.importers.openvino import steps_of
from speckv.plugins import make_policy
from speckv.replaying import replay
from speckv.runtime.programs import LONGEST
from speckv.steplog_writer import StepLogWriter
from speckv.steplogs import StepLog
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, Rollout, Rollouts

from .synthetic import make_costs, make_rollouts

NATIVE = {
    Setting(0): {"draft_model": None},
    Setting(3): {"num_assistant_tokens": 3},
    Setting(LONGEST, 0.4): {"assistant_confidence_threshold": 0.4, "logprobs": 1},
}


@pytest.mark.parametrize("setting", NATIVE)
def test_a_request_takes_one_of_two_parameters(setting):
    exporter = OpenVinoExporter()
    assert exporter.to_native(setting) == NATIVE[setting] and exporter.from_native(NATIVE[setting]) == setting
    for candidate in exporter.candidates(gamma_max=8):
        assert exporter.from_native(exporter.to_native(candidate)) == candidate


def test_no_cap_stands_beside_a_threshold():
    with pytest.raises(SpecKVError, match="limits no draft by its length where there is a threshold"):
        OpenVinoExporter().to_native(Setting(8, 0.4))


def test_parameters_that_contradict_each_other_are_refused(tmp_path):
    exporter = OpenVinoExporter()
    exporter.export(make_policy("fixed:gamma=3"), tmp_path)
    path = tmp_path / "settings.json"
    for native in (
        {"assistant_confidence_threshold": 0.4},
        NATIVE[Setting(LONGEST, 0.4)] | {"num_assistant_tokens": 3},
    ):
        value = json.loads(path.read_text())
        value["settings"]["nf4"] = native
        path.write_text(json.dumps(value))
        with pytest.raises(SpecKVError, match="goes with logprobs 1 and without num_assistant_tokens"):
            exporter.load(tmp_path)


def test_a_threshold_without_a_cap_is_held_exactly():
    traces, exporter = make_rollouts(), OpenVinoExporter()
    policy = exporter.played({"bf16": Setting(LONGEST, 0.6), "nf4": Setting(2)})
    assert fidelity(exporter, policy, traces, make_costs()).equal_decisions == 1
    fit, reason = exporter.verdict(make_policy("confidence:threshold=0.4,cap=6"))
    assert fit == "approximately" and "limits no draft" in reason


def told(tokens: list[int]) -> SimpleNamespace:
    """What OpenVINO tells of a request that committed so many tokens in each step."""
    return SimpleNamespace(raw_metrics=SimpleNamespace(m_batch_sizes=tokens, token_infer_durations=[2e4] * len(tokens)))


def test_the_steps_of_a_request():
    steps = list(steps_of(told([1, 3, 1, 4, 1]), num_assistant_tokens=3, max_new_tokens=10))
    assert [(step["gamma"], step["accepted"]) for step in steps] == [(0, 0), (3, 2), (3, 0), (3, 3), (0, 0)]
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert [step["seconds"] for step in steps] == [None, 0.02, 0.02, 0.02, 0.02]  # not those of reading the prompt
    ended = list(steps_of(told([1, 3, 2]), num_assistant_tokens=3, max_new_tokens=10))
    assert [(step["gamma"], step["accepted"]) for step in ended] == [(0, 0), (3, 2)]


#: Arithmetic that does not depend on how many tokens are in a forward.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
PROMPT, BUDGET = "def area(w, h):", 40


class Alone:
    """One model without another, as a source of greedy tokens and of their probabilities."""

    def __init__(self, folder: pathlib.Path) -> None:
        import openvino_genai

        self.genai, self.requests = openvino_genai, 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", EXACT)

    def decode(self, context: list[int], count: int) -> tuple[list[int], list[float]]:
        import openvino

        parameters = self.genai.GenerationConfig()
        parameters.max_new_tokens, parameters.logprobs, self.requests = count, 1, self.requests + 1
        tokens = openvino.Tensor(np.array([context], dtype=np.int64))
        handle = self.pipeline.add_request(self.requests, tokens, parameters)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        (output,) = handle.read_all()
        return list(output.generated_ids), list(output.generated_log_probs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The target's and the draft's folder, as OpenVINO makes them of GGUF files."""
    openvino_genai = pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    if "SPECKV_GGUF" not in os.environ:
        pytest.skip("SPECKV_GGUF names no GGUF files: TARGET.gguf,DRAFT.gguf")
    made: dict[str, pathlib.Path] = {}
    names = os.environ["SPECKV_GGUF"].split(",")
    for name in names:
        if pathlib.Path(name).is_dir():
            made[name] = pathlib.Path(name)
        elif name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            file = made[name] / "model.gguf"
            file.symlink_to(pathlib.Path(name).resolve())
            openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
    return [made[name] for name in names]


@pytest.fixture(scope="module")
def recording(folders):
    """What both models would do behind the first token of the text, which OpenVINO decodes without a draft."""
    target, draft = Alone(folders[0]), Alone(folders[1])
    prompt = target.pipeline.get_tokenizer().encode(PROMPT).input_ids.data[0].tolist()
    (first, *path), _ = target.decode(prompt, BUDGET)
    before, room = [*prompt, first], len(path) - 1
    proposed, sure, off_lengths, off, off_sure = [], [], [], [], []
    for position, token in enumerate(path):
        (said,), (log,) = draft.decode(before + path[:position], 1)
        proposed.append(said)
        sure.append(log)
        more = 0 if said == token else max(room - position - 1, 0)
        off_lengths.append(more)
        if more:
            tokens, logs = draft.decode([*before, *path[:position], said], more)
            off_lengths[-1] = len(tokens)
            off += tokens
            off_sure += logs
    rollout = Rollout(
        id="area", task="code", compression="bf16", prompt_tokens=np.array(before, dtype=np.int32),
        tokens=np.array(path, dtype=np.int32), draft_tokens=np.array(proposed, dtype=np.int32),
        signals={name: np.zeros(len(path), np.float32) for name in DRAFT_SIGNALS | TARGET_SIGNALS}
        | {"draft_top1": probability(sure)},
        off_lengths=np.array(off_lengths, dtype=np.int32), off_tokens=np.array(off, dtype=np.int32),
        off_signals={name: np.zeros(len(off), np.float32) for name in DRAFT_SIGNALS}
        | {"draft_top1": probability(off_sure)},
        ended=len(path) < BUDGET - 1,
    )  # fmt: skip
    return [first, *path], Rollouts.from_sequences([rollout], Manifest(BUDGET, BUDGET - 1, {}))


def probability(logs: list[float]) -> np.ndarray:
    """Of tokens; OpenVINO takes a log probability of exactly 0 for one that it does not know, and stops."""
    known = np.array(logs, dtype=np.float32)
    return np.where(known == 0, 0, np.exp(known)).astype(np.float32)


@pytest.fixture(scope="module")
def pipeline(folders):
    import openvino_genai

    draft = openvino_genai.draft_model(str(folders[1]), "CPU", **EXACT)
    return openvino_genai.LLMPipeline(str(folders[0]), "CPU", draft_model=draft, **EXACT)


def generate(pipeline, **native):
    """Tokens of the text, and what is told of its steps."""
    import openvino_genai

    inputs = pipeline.get_tokenizer().encode(PROMPT)
    made = pipeline.generate(openvino_genai.TokenizedInputs(inputs.input_ids, inputs.attention_mask),
                             max_new_tokens=BUDGET, **native)  # fmt: skip
    return list(made.tokens[0]), made.extended_perf_metrics


SETTINGS = [Setting(1), Setting(2), Setting(5), *(Setting(LONGEST, threshold) for threshold in (0.3, 0.6, 0.9))]


@pytest.mark.real_model
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_drafts_as_the_replay_says(setting, pipeline, recording, tmp_path):
    text, traces = recording
    exporter = OpenVinoExporter()
    exporter.export(exporter.played(setting), tmp_path)
    native = json.loads((tmp_path / "settings.json").read_text())["settings"]["bf16"]
    tokens, metrics = generate(pipeline, **native)
    assert tokens == text

    predicted = replay(exporter.load(tmp_path), traces, make_costs())
    committed = list(metrics.raw_metrics.m_batch_sizes)
    print(f"{native}: {len(committed)} forwards of the target, {committed}")
    assert committed == [1, *(predicted.accepted + 1)]
    assert metrics.get_num_accepted_tokens() == predicted.accepted[:-1].sum()  # it leaves the last step out
    if not setting.threshold:
        steps = list(steps_of(metrics, setting.cap, BUDGET))
        assert [step["gamma"] for step in steps] == [0, *predicted.gamma]
        with StepLogWriter(tmp_path / "log") as log:
            for step in steps:
                log.write(sequence="area", compression="bf16", **step)
        read = StepLog.load(tmp_path / "log")
        assert read.accepted.tolist() == [0, *predicted.accepted]
        assert np.nansum(read.seconds) <= metrics.get_generate_duration().mean / 1000


@pytest.mark.real_model
def test_the_number_of_tokens_is_obeyed(pipeline, recording):
    forwards = [len(generate(pipeline, num_assistant_tokens=n)[1].raw_metrics.m_batch_sizes) for n in (1, 5)]
    assert forwards[0] > forwards[1]
    default = generate(pipeline, num_assistant_tokens=0)[1].raw_metrics.m_batch_sizes
    assert len(default) == forwards[1]  # 0 is not none: OpenVINO's default is 5


@pytest.mark.real_model
def test_a_greedy_threshold_needs_log_probabilities(pipeline, recording):
    """Otherwise every probability is taken for unknown, and a draft has one token."""
    tokens = generate(pipeline, assistant_confidence_threshold=0.01)[1].raw_metrics.m_batch_sizes
    assert max(tokens) <= 2
