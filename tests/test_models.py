"""Loading at a compression, computing in float32, and the signals of a distribution."""

import math

import numpy as np
import pytest
import torch

from speckv.errors import SpecKVError
from speckv.live.caching import CachedModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import LanguageModel, ModelPair, load_model
from speckv.live.signals import draft_signals, drawn_signals, entropy, target_signals
from speckv.testing.pairs import END, PADDED_VOCABULARY, byte_tokenizer
from tests.live import Fixed

TOKENS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]


def logits_of(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def calm_model(tmp_path_factory):
    """A folder with a random model of ordinary weights: rounding stays rounding on its way through the layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=PADDED_VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                         initializer_range=0.1, bos_token_id=None, eos_token_id=END)  # fmt: skip
    path = str(tmp_path_factory.mktemp("calm") / "calm")
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return path


def test_float32_of_float32_is_native(calm_model):
    native, computed = load_model(calm_model, "fp32"), load_model(calm_model, "fp32", "float32")
    assert relative_error(logits_of(computed), logits_of(native)) < 1e-5


@pytest.mark.parametrize(("compression", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_float32_of_16_bits_is_float32_with_rounded_weights(compression, dtype, calm_model):
    rounded = load_model(calm_model, "fp32")
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(dtype))
    computed = load_model(calm_model, compression, "float32")
    assert {parameter.dtype for parameter in computed.parameters()} == {torch.float32}
    assert relative_error(logits_of(computed), logits_of(rounded)) < 1e-5


@pytest.mark.parametrize(("compression", "largest"), [("int8", 0.06), ("nf4", 0.02)])
def test_float32_of_quantised_computes_with_the_stored_values(compression, largest, calm_model):
    """Close to bitsandbytes' own forward, and not the model as it was before compression."""
    native, computed = load_model(calm_model, compression), load_model(calm_model, compression, "float32")
    full = load_model(calm_model, "fp32")
    for token in TOKENS[:4]:
        ours = logits_of(computed, [token])
        assert relative_error(ours, logits_of(native, [token])) < largest
        assert relative_error(ours, logits_of(full, [token])) > 1e-3
    if compression == "nf4":
        assert relative_error(ours, logits_of(native, [token])) < relative_error(ours, logits_of(full, [token])) / 5


@pytest.mark.parametrize("compression", ["fp32", "bf16", "nf4", "int8"])
def test_float32_does_not_depend_on_how_many_tokens_share_a_forward(compression, calm_model):
    model = LanguageModel.load(calm_model, compression, "float32", tokenizer=byte_tokenizer())
    together, single = CachedModel(model), CachedModel(model)
    one_by_one = torch.cat([single.forward(torch.tensor([[token]])) for token in TOKENS], dim=1)
    assert relative_error(together.forward(torch.tensor([TOKENS])), one_by_one) < 1e-5


def test_padding_of_the_vocabulary_is_dropped(small_pair):
    target = small_pair.target
    assert target.vocabulary_size == END + 1 < target.model.config.vocab_size
    assert CachedModel(target).forward(torch.tensor([[1, 2]])).shape == (1, 2, END + 1)
    assert CachedModel(target).next_logits(torch.tensor([[1, 2]])).shape == (1, END + 1)


def test_different_tokenizers_are_refused(small_pair_paths, calm_model):
    byte_tokenizer(end="<|stop|>").save_pretrained(calm_model)
    with pytest.raises(SpecKVError) as caught:
        ModelPair.load(small_pair_paths.target, calm_model, "fp32")
    assert small_pair_paths.target in str(caught.value) and calm_model in str(caught.value)


@pytest.mark.parametrize(
    ("compression", "compute", "message"),
    [("int3", "native", "'int3' is unknown"), ("bf16", "float8", "'float8' is unknown")],
)
def test_unknown_forms_are_refused(compression, compute, message, calm_model):
    with pytest.raises(SpecKVError, match=message):
        load_model(calm_model, compression, compute)


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(SpecKVError, match="nowhere") as caught:
        load_model(str(tmp_path / "nowhere"), "fp32")
    assert "\n" not in str(caught.value)


def test_end_ids(small_pair):
    assert small_pair.target.eos_ids == {END}


def test_signals_of_a_known_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    logits = torch.tensor(np.log(p)[None] + 3, dtype=torch.float32)
    draft, target = draft_signals(logits), target_signals(logits)
    assert draft["draft_entropy"][0] == pytest.approx(-(p * np.log(p)).sum())
    assert draft["draft_top1"][0] == pytest.approx(0.5)
    assert draft["draft_top2"][0] == pytest.approx(0.25)
    assert draft["draft_top10"][0] == pytest.approx(1.0)
    assert target["target_entropy"][0] == pytest.approx(-(p * np.log(p)).sum())
    assert target["target_margin"][0] == pytest.approx(math.log(2))


def test_top10_is_the_mass_of_ten():
    logits = torch.zeros(1, 40)
    assert draft_signals(logits)["draft_top10"][0] == pytest.approx(0.25)


def test_impossible_tokens_leave_signals_finite():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [5.0, -math.inf, -math.inf, -math.inf]])
    drawn = drawn_signals(logits, torch.tensor([1, 0]))
    assert drawn["draft_entropy"].tolist() == pytest.approx([math.log(2), 0.0])
    assert drawn["draft_probability"].tolist() == pytest.approx([0.5, 1.0])
    assert all(values.isfinite().all() for values in drawn.values())
    assert entropy(torch.log_softmax(logits, -1)).isfinite().all()
    assert target_signals(logits)["target_entropy"].tolist() == pytest.approx([math.log(2), 0.0])


def test_an_impossible_token_that_was_drawn_has_probability_zero():
    drawn = drawn_signals(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    assert drawn["draft_probability"].tolist() == [0.0]


def test_probability_of_the_likeliest_token_is_the_recorded_number():
    """Bit for bit, also when several positions share a call: a replay has nothing but `draft_top1`."""
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)) * 4
    drawn = drawn_signals(logits, logits.argmax(-1))
    assert drawn["draft_probability"].equal(draft_signals(logits)["draft_top1"])


@pytest.mark.parametrize("signals", [draft_signals, target_signals])
def test_nan_logits_show_in_their_own_row(signals):
    for values in signals(torch.tensor([[0.0, 1.0], [0.0, math.nan]])).values():
        assert values.isnan().tolist() == [False, True]


@pytest.mark.parametrize("draft", ["fp32", "nf4"])
@pytest.mark.parametrize("compression", ["fp32", "bf16", "fp16", "int8", "nf4"])
def test_every_compression_decodes(compression, draft, calm_model):
    """The text is plain decoding's up to a near tie; INT8 rounds a token by its neighbours, and may differ earlier."""
    byte_tokenizer().save_pretrained(calm_model)
    pair = ModelPair.load(calm_model, calm_model, compression, draft)
    assert [model.compression for model in pair] == [compression, draft]
    decoded = SpeculativeDecoder(*pair, Fixed(4)).generate(TOKENS, 24)
    plain = SpeculativeDecoder(*pair, Fixed(0), record_signals=True).generate(TOKENS, 24)
    assert len(decoded.tokens) == len(plain.tokens) == 24
    differing = [at for at, (a, b) in enumerate(zip(decoded.tokens, plain.tokens, strict=True)) if a != b]
    if differing and compression != "int8":
        assert compression != "fp32" and plain.steps[differing[0]].signals["target_margin"][0] < 0.1
    assert decoded.acceptance_rate > (0.7 if compression == draft else 0)


def test_what_a_loaded_model_is_called(calm_model):
    """A model that the user loaded tells its compression itself."""
    for compression in ("fp32", "bf16", "nf4", "int8"):
        assert LanguageModel(load_model(calm_model, compression), byte_tokenizer()).compression == compression


def test_loading_leaves_the_libraries_as_talkative_as_they_were(calm_model):
    import transformers

    before = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    load_model(calm_model, "bf16")
    after = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    assert after == before
