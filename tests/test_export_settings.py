"""Settings of decoders that run no policy: what fits them exactly, what comes near, and what their files hold."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.compression import COMPRESSIONS
from speckv.errors import SpecKVError
from speckv.exporters.assisted import AssistedExporter, AssistedThresholdExporter
from speckv.exporters.portable import BundlePolicy
from speckv.exporters.settings import FILE, Setting, SettingsExporter, fastest
from speckv.exporting import export
from speckv.plugins import make_policy
from speckv.replaying import replay
from speckv.runtime import Bundle
from speckv.runtime.programs import Program, Table, Threshold
from speckv.testing import check_exporter

from .portable import fitted, recording


class BehindTheDraw(SettingsExporter):
    """A cap and a threshold behind drawn tokens."""

    name = "behind"
    decoder = "a decoder with a threshold behind its tokens"
    signal = "draft_probability"
    caps, thresholds = (0, 1, 2, 4, 8), (0.0, 0.3, 0.6, 0.9)

    def to_native(self, setting):
        return {"most": setting.cap, "sure": setting.threshold}

    def from_native(self, native):
        return Setting(native["most"], native["sure"])


class BeforeTheDraw(BehindTheDraw):
    """A cap and a threshold before tokens are drawn."""

    name = "before"
    decoder = "a decoder with a threshold before its tokens"
    signal = "draft_top1"
    drawn = False


class ShareBeforeTheDraw(BeforeTheDraw):
    """A cap and a threshold on the likeliest token's share among the ten likeliest."""

    name = "share"
    of = "draft_top10"


class OneNumber(SettingsExporter):
    """A cap alone, of at least one token."""

    name = "one"
    decoder = "a decoder with one number"

    def to_native(self, setting):
        if not setting.cap:
            raise SpecKVError("a decoder with one number drafts at least one token")
        return {"most": setting.cap}

    def from_native(self, native):
        return Setting(native["most"])


DECODERS = [
    BehindTheDraw(),
    BeforeTheDraw(),
    ShareBeforeTheDraw(),
    OneNumber(),
    AssistedExporter(),
    AssistedThresholdExporter(),
]
each_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
some_settings = st.builds(Setting, st.integers(0, 12), st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]))


def everywhere(value):
    return np.full(len(COMPRESSIONS), value)


@each_decoder
@settings(max_examples=25, deadline=None)
@given(setting=some_settings)
def test_a_setting_survives_its_own_names_and_its_portable_form(decoder, setting):
    if decoder.unfit(setting) is not None:
        return
    assert decoder.from_native(decoder.to_native(setting)).plain(decoder.drawn) == setting.plain(decoder.drawn)
    found = decoder.settings_of(decoder.program_of(dict.fromkeys(COMPRESSIONS, setting)))
    assert found == dict.fromkeys(COMPRESSIONS, setting.plain(decoder.drawn))


def steps_of(policy):
    run = replay(policy, *recording(), controller=(0.0, 0.0))
    return np.stack([run.sequence, run.position, run.gamma, run.forwards])


@pytest.mark.parametrize("decoder", DECODERS[:3], ids=lambda decoder: decoder.name)
@settings(max_examples=25, deadline=None)
@given(setting=some_settings)
def test_what_does_not_matter_is_left_out_and_nothing_else(decoder, setting):
    """The decoder as set, without what can't matter, and the portable form decide alike."""
    expected = steps_of(decoder.played(setting))
    assert np.array_equal(expected, steps_of(decoder.played(setting.plain(decoder.drawn))))
    assert np.array_equal(expected, steps_of(BundlePolicy(Bundle("", decoder.played(setting).program()))))


@each_decoder
def test_candidates_are_different_settings_within_the_recording(decoder):
    candidates = decoder.candidates(8)
    caps = {setting.cap for setting in candidates}
    assert caps == {cap for cap in decoder.caps if cap <= 8} - ({0} if decoder.name == "one" else set())
    assert len(set(candidates)) == len(candidates) and candidates[0].cap == min(caps)
    if decoder.signal:
        different = {steps_of(decoder.played(setting)).tobytes() for setting in candidates}
        assert len(different) > 0.8 * len(candidates)


HELD = {
    "behind": ("none", "fixed:gamma=7", "best-fixed", "confidence", "confidence:threshold=0.4,cap=5", "svip:scale=0",
               "p-min:n_max=8", "kangaroo:cap=1"),
    "before": ("none", "best-fixed", "p-min:n_max=8,p_min=0.4", "p-min:n_max=2,n_min=2,p_min=0.7",
               "p-min:n_max=1,p_min=0.9", "kangaroo:cap=1", "confidence:threshold=0.9,cap=1"),
    "share": ("none", "best-fixed", "p-min:n_max=8", "kangaroo:cap=1"),
    "one": ("fixed:gamma=7", "svip:scale=0", "kangaroo:cap=1", "p-min:n_max=3,n_min=3,p_min=0.9"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name in HELD for spec in HELD[name]])
def test_what_fits_decides_as_it_did(name, spec, tmp_path):
    (decoder,) = (decoder for decoder in DECODERS if decoder.name == name)
    result = export(decoder, fitted(spec), tmp_path / "out", *recording())
    assert result.equal_decisions == 1.0 and result.steps > 50


REFUSED = {
    ("behind", "kangaroo"): "it reads draft_top1, which a decoder with a threshold behind its tokens can't show",
    ("before", "kangaroo"): "its rule that stops a draft is not that of a decoder with a threshold before its tokens, "
    "which compares draft_top1 with a threshold before it draws a token",
    ("before", "p-min:n_max=6,n_min=2,p_min=0.7"): "its rule that stops a draft is not that of",
    ("share", "p-min:n_max=8,p_min=0.4"): "which compares draft_top1 / draft_top10 with a threshold before it draws",
    ("behind", "heuristic"): "it learns from what came of each step",
    ("behind", "svip"): "it reads draft_entropy",
    ("one", "confidence:threshold=0.4,cap=5"): "it decides at both times; one can hold policies that decide before",
    ("one", "none"): "a decoder with one number drafts at least one token (fp32)",
    ("behind", "p-min:n_max=1,p_min=0.9"): "it reads draft_top1",
    ("behind", "mlp"): "it reads last_mean_entropy",
    ("behind", "ucb1"): "it learns from what came",
    ("assisted", "confidence:threshold=0.4"): "is not fitted",
    ("assisted", "confidence:threshold=0.4,cap=5"): "assisted can hold policies that decide before the step",
    ("one", "oracle"): "it knows the future",
}


@pytest.mark.parametrize(("name", "spec"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name, spec):
    (decoder,) = (decoder for decoder in DECODERS if decoder.name == name)
    policy = make_policy(spec) if spec in ("oracle", "confidence:threshold=0.4") else fitted(spec)
    with pytest.raises(SpecKVError) as caught:
        decoder.check(policy)
    assert REFUSED[name, spec] in str(caught.value) and "\n" not in str(caught.value)
    replaced = spec != "oracle" and "is not fitted" not in str(caught.value)
    assert str(caught.value).endswith("; --approximate replaces it") == replaced


def test_a_threshold_of_another_kind_is_refused():
    """By the portable form, whatever the policy says that it reads."""
    decoder, caps = BehindTheDraw(), Table(everywhere(4))
    for stop in (
        Threshold("draft_probability", everywhere(0.5), above=False),
        Threshold("draft_probability", everywhere(0.5), drawn=False),
        Threshold("draft_top1", everywhere(0.5)),
        Threshold("draft_probability", everywhere(0.5), least=2),
    ):
        with pytest.raises(SpecKVError, match="its rule that stops a draft is not that of"):
            decoder.settings_of(Program(caps, stop))
    with pytest.raises(SpecKVError, match=r"threshold is 1\.5; it must be from 0 to 1"):
        decoder.settings_of(Program(caps, Threshold("draft_probability", everywhere(1.5))))
    free = Threshold("draft_probability", everywhere(0.5), least=4)
    assert decoder.settings_of(Program(caps, free))["nf4"] == Setting(4), "it never has a say"


def test_settings_may_differ_by_compression():
    decoder = BehindTheDraw()
    mixed = {"fp32": Setting(4), "bf16": Setting(6, 0.5), "nf4": Setting(2, 0.3)}
    assert decoder.settings_of(decoder.program_of(mixed)) == dict.fromkeys(COMPRESSIONS, Setting(0)) | mixed


def test_the_fastest_is_chosen_for_each_compression():
    seconds = np.zeros((3, len(COMPRESSIONS)))
    seconds[:, 1], seconds[:, 4] = (5, 1, 2), (4, 6, 3)
    assert fastest(seconds).tolist() == [2, 1, 2, 2, 2], "where nothing is known, the sum decides"


@each_decoder
@pytest.mark.parametrize("spec", ["hazard", "mlp"])
def test_what_does_not_fit_is_replaced_by_the_fastest_setting(decoder, spec, tmp_path):
    traces, costs = recording()
    policy = fitted(spec)
    result = export(decoder, policy, tmp_path / "out", traces, costs, approximate=True)
    assert 0 < result.equal_decisions < 1
    best = decoder.settings_of(decoder.approximate(policy, traces, costs).program())
    for name in np.unique(traces.compressions):
        part = traces.take(traces.compressions == name)
        settings = [best[name], *decoder.candidates(8)]
        speeds = [replay(decoder.played(setting), part, costs).throughput for setting in settings]
        assert speeds[0] == max(speeds)


def test_the_file_is_in_the_decoders_own_names(tmp_path):
    export(AssistedThresholdExporter(), fitted("confidence:threshold=0.4,cap=5"), tmp_path / "out", *recording())
    value = json.loads((tmp_path / "out" / FILE).read_text())
    assert (value["format"], value["schema_version"], value["decoder"]) == ("speckv-settings", 1, "assisted-threshold")
    assert value["settings"]["nf4"] == {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
    }


DAMAGED = {
    "holds no settings of": {"format": "speckv-bundle"},
    "holds no settings of assisted generation": {"decoder": "another"},
    "newer than 1": {"schema_version": 2},
    "KeyError('num_assistant_tokens')": {"settings": {"nf4": {"num_assistant_tokens_schedule": "constant"}}},
    "expected 'constant'": {"settings": {"nf4": {"num_assistant_tokens_schedule": "heuristic"}}},
    "compression 'q4' is unknown": {"settings": {"q4": {}}},
    "has no attribute 'items'": {"settings": [1]},
    "cap is -1; it must be a whole number": {
        "settings": {"nf4": AssistedExporter().to_native(Setting(3)) | {"num_assistant_tokens": -1}}
    },
    "threshold is 'high'; it must be a number": {
        "settings": {"nf4": AssistedExporter().to_native(Setting(3)) | {"assistant_confidence_threshold": "high"}}
    },
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(reason, tmp_path):
    decoder = AssistedThresholdExporter()
    decoder.export(fitted("none"), tmp_path)
    path = tmp_path / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | DAMAGED[reason]))
    with pytest.raises(SpecKVError) as caught:
        decoder.load(tmp_path)
    assert reason in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_setting_that_the_decoder_cannot_have_is_not_read(tmp_path):
    """Not even as another one: a threshold that would be forgotten."""
    decoder = AssistedExporter()
    decoder.export(fitted("fixed:gamma=3"), tmp_path)
    value = json.loads((tmp_path / FILE).read_text())
    value["settings"]["nf4"]["assistant_confidence_threshold"] = 0.4
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(SpecKVError, match=r"assisted generation of transformers 5\.24 has no threshold"):
        decoder.load(tmp_path)


def test_decisions_of_the_decoder_take_no_time(tmp_path):
    """Whatever those of the policy took that it stands for."""
    traces, costs = recording()
    costs = dataclasses.replace(costs, controller={"fixed": (0.01, 0.0)})
    result = export(OneNumber(), fitted("fixed"), tmp_path / "out", traces, costs)
    assert result.equal_decisions == 1.0
    free = dataclasses.replace(costs, controller={"fixed": (0.0, 0.0)})
    assert result.throughput == replay(fitted("fixed"), traces, free).throughput > result.original_throughput


@each_decoder
def test_the_kit_finds_nothing(decoder):
    policies = [fitted(spec) for spec in ("fixed:gamma=3", "best-fixed", "confidence:threshold=0.4,cap=5", "heuristic")]
    made = check_exporter(decoder, policies=policies)
    assert {result.status for result in made.results} == {"passed"}, str(made)


@pytest.mark.parametrize("setting", [Setting(8, 0.35), Setting(1, 0.9), Setting(3), Setting(0)], ids=str)
def test_transformers_drafts_as_replayed(setting, small_pair, small_dataset, small_costs, monkeypatch):
    """Its own assisted generation, without scikit-learn where there is a threshold: token counts of every step."""
    import torch
    from transformers.generation import candidate_generator

    decoder = AssistedThresholdExporter() if setting.threshold else AssistedExporter()
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: not setting.threshold)
    told = []
    original = candidate_generator.AssistedCandidateGenerator.update_candidate_strategy

    def update(self, input_ids, scores, num_matches):
        told.append((scores.shape[1] - 1, int(num_matches)))
        original(self, input_ids, scores, num_matches)

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "update_candidate_strategy", update)
    draft, target = small_pair.draft.model, small_pair.target.model
    for name, value in decoder.to_native(setting).items():
        monkeypatch.setattr(draft.generation_config, name, value, raising=False)
    padding = list(range(small_pair.target.vocabulary_size, target.config.vocab_size))
    run = replay(decoder.played(setting), small_dataset, small_costs)
    for row, rollout in enumerate(itertools.islice(small_dataset, 4)):
        told.clear()
        ids = torch.tensor(rollout.prompt_tokens[None].astype(int))
        target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False,
                        assistant_model=draft, suppress_tokens=padding)  # fmt: skip
        of_row = run.sequence == row
        drafted, matched = map(list, zip(*told, strict=True))
        assert drafted == run.gamma[of_row].tolist()
        # Of a draft that ends the text, transformers counts the last token as its own.
        assert matched[:-1] == run.accepted[of_row].tolist()[:-1]
