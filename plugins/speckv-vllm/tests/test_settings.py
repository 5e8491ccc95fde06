"""What can't be played is refused in one line before a model is loaded."""

import re

import pytest
from pair import MOST
from speckv_vllm.settings import Settings, check_engine
from vllm.config import ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig, replace
from vllm.engine.arg_utils import EngineArgs

from speckv import SpecKVError
from speckv.exporters.vllm import VllmExporter
from speckv.plugins import make_policy
from speckv.runtime import Bundle

RANGES = [[1, 1, MOST]]
#: Stands for the folder of one that is whole.
BUNDLE = "BUNDLE"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("exported")
    VllmExporter().write(Bundle("p-min", make_policy("p-min").program()), folder)
    return str(folder)


def configure(pair, additional, speculative=None, **options):
    draft = {"method": "draft_model", "model": str(pair.folder / "draft"), "num_speculative_tokens": MOST}
    ranges = {"num_speculative_tokens_per_batch_size": RANGES}
    return EngineArgs(
        str(pair.folder / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        speculative_config=draft | ranges if speculative is None else speculative(draft, ranges),
        additional_config=additional,
        **options,
    ).create_engine_config()


def test_what_can_be_played(pair, bundle):
    config = configure(pair, {"speckv": {"bundle": bundle, "cost_ratio": 1}}, dtype="bfloat16")
    settings = Settings.of(config)
    assert settings == Settings(bundle, cost_ratio=1)
    assert settings.start(config) == {"compression": "bf16", "cost_ratio": 1}
    assert Settings.of(configure(pair, {"another": 1})) is None
    config = configure(pair, {"speckv": {"bundle": bundle, "compression": "int8"}})
    assert Settings.of(config).start(config)["compression"] == "int8"


def test_how_the_draft_is_stored_does_not_matter(pair, bundle):
    """vLLM completes a second configuration for it, with the same settings."""
    config = configure(
        pair, {"speckv": {"bundle": bundle}}, lambda draft, ranges: draft | ranges | {"quantization": "fp8"}
    )
    draft = replace(config, quant_config=None, model_config=config.speculative_config.draft_model_config)
    assert draft.model_config.quantization == "fp8" and draft.additional_config == config.additional_config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("folder", "speckv is 'folder'; it must be an object with the folder of a `bundle`"),
        ({"log": "log"}, "it must be an object with the folder of a `bundle`"),
        ({"bundle": "nowhere"}, "nowhere/bundle.json: no such file; expected a policy bundle"),
        ({"bundle": 3}, "speckv: bundle can't be 3"),
        ({"bundle": "b", "cost_ratio": True}, "speckv: cost_ratio can't be True"),
        ({"bundle": "b", "lgo": "log"}, "speckv has no 'lgo'; it has bundle, log, compression, cost_ratio"),
        ({"bundle": BUNDLE, "compression": "int3"}, "compression 'int3' is unknown"),
        ({"bundle": BUNDLE, "log": __file__}, "test_settings.py: cannot be written"),
    ],
)
def test_settings_that_are_none(given, message, pair, bundle):
    if isinstance(given, dict) and given.get("bundle") == BUNDLE:
        given = given | {"bundle": bundle}
    with pytest.raises(SpecKVError, match=re.escape(message)) as caught:
        configure(pair, {"speckv": given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("speculative", "options", "message"),
    [
        (lambda draft, ranges: None, {}, "a policy needs a draft model, and the method is none"),
        (
            lambda draft, ranges: {"method": "ngram", "num_speculative_tokens": 2} | ranges,
            {},
            """the method is 'ngram'; set "method": "draft_model\"""",
        ),
        (
            lambda draft, ranges: draft,
            {},
            """add to the speculative_config: "num_speculative_tokens_per_batch_size": [[1, 1, 6]]""",
        ),
        (lambda draft, ranges: draft | ranges | {"use_local_argmax_reduction": True}, {}, "use_local_argmax_reduction"),
    ],
    ids=["nothing drafts", "another method", "constant lengths", "hidden probabilities"],
)
def test_engines_that_cannot_play_a_policy(speculative, options, message, pair, bundle):
    with pytest.raises(SpecKVError, match=re.escape(message)) as caught:
        configure(pair, {"speckv": {"bundle": bundle}}, speculative, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("of", "name", "value", "message"),
    [
        (VllmConfig, "use_v2_model_runner", property(lambda self: True), "VLLM_USE_V2_MODEL_RUNNER=0"),
        (SchedulerConfig, "async_scheduling", True, "--no-async-scheduling"),
        (ParallelConfig, "data_parallel_size", 2, "start single engines instead"),
        (SpeculativeConfig, "parallel_drafting", True, "parallel_drafting drafts all tokens at once"),
        (ModelConfig, "quantization", "awq", "the target's weights are awq; say which of fp32, bf16, fp16, int8, nf4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engines_of_other_machines(of, name, value, message, pair, bundle, monkeypatch):
    """What no engine on a CPU can be, set behind vLLM's back."""
    config = configure(pair, {"speckv": {"bundle": bundle}})
    check_engine(config, Settings.of(config))
    parts = [config, config.scheduler_config, config.parallel_config, config.speculative_config, config.model_config]
    (part,) = [part for part in parts if isinstance(part, of)]
    monkeypatch.setattr(of if isinstance(value, property) else part, name, value)
    with pytest.raises(SpecKVError, match=re.escape(message)) as caught:
        check_engine(config, Settings.of(config))
    assert "\n" not in str(caught.value)
