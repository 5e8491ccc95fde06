"""Caches hold what they should after every step, whatever kind they are; a kept one changes nothing but the time."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speckv.errors import SpecKVError
from speckv.live.caching import CachedModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import ModelDrafter, PromptLookup
from speckv.live.models import LanguageModel, early_exit
from speckv.live.sampling import Greedy, Gumbel, Rejection
from speckv.testing.pairs import END, add_noise, byte_tokenizer, tiny_model
from tests.live import KINDS, WINDOW, Drawn, Fixed, Keep, decoding_of, pair_with, plain_text

BUDGET = 16
PROMPT = list(b"Solve 3x + 4 = 19")
#: Layers, and whether the caches are static: all that a cache can be.
MODES = [("full", False), ("sliding", False), ("mixed", False), ("full", True)]
SAMPLERS = [Greedy(), Rejection(temperature=0.7), Gumbel(temperature=0.7)]
by_name = functools.partial(pytest.mark.parametrize, ids=lambda value: type(value).__name__)


@functools.cache
def plain(layers, prompt, budget=BUDGET, sampler=None, seed=0):
    """What the target of a pair says without cache and draft, and no more than once."""
    return plain_text(pair_with(layers).target, list(prompt), budget, sampler, seed)


def assert_caches_are_right(decoding):
    """Step to the end, and compare the lengths of both caches with what a replay says they are."""
    (sequence,) = decoding.sequences
    target, draft = decoding.target, decoding.drafting.cached
    old = len(sequence.context)
    lag = old if decoding.decoder.merge_prefill else 1
    assert target.lengths == draft.lengths == [old - lag]
    while decoding.going:
        decoding.step()
        step = sequence.steps[-1]
        assert step.lag == (lag if step.forwards else 0)
        lag = step.accepted + 1 - min(step.accepted, step.forwards - 1) if step.forwards else lag + 1
        assert target.lengths == [old + step.accepted]
        assert draft.lengths == [old + step.accepted + 1 - lag]
        old += step.committed
        for cached in (target, draft):
            # A static cache gives a tensor; one that nothing was put into yet gives 0.
            assert [int(cached.cache.get_seq_length())] == cached.lengths
    assert old == len(sequence.context)


@pytest.mark.parametrize(("layers", "static"), MODES)
@pytest.mark.parametrize("policy", KINDS, ids=repr)
@by_name("sampler", SAMPLERS)
def test_caches_after_every_step(layers, static, policy, sampler):
    """And the text is that of a model that has no cache at all."""
    decoder = SpeculativeDecoder(*pair_with(layers), policy, sampler=sampler, gamma_max=8, static_cache=static)
    decoding = decoding_of(decoder, PROMPT, budget=BUDGET, seed=3)
    assert_caches_are_right(decoding)
    if not isinstance(sampler, Rejection):  # whose text depends on the draft
        assert decoding.sequences[0].tokens == plain(layers, tuple(PROMPT), sampler=sampler, seed=3)


@pytest.mark.parametrize(("layers", "static"), MODES)
@pytest.mark.parametrize("policy", KINDS, ids=repr)
def test_caches_after_a_merged_prefill(layers, static, policy):
    decoder = SpeculativeDecoder(*pair_with(layers), policy, gamma_max=8, static_cache=static, merge_prefill=True)
    decoding = decoding_of(decoder, PROMPT, budget=BUDGET)
    assert_caches_are_right(decoding)
    assert decoding.sequences[0].tokens == plain(layers, tuple(PROMPT))


@pytest.mark.parametrize(("layers", "static"), MODES)
def test_a_prompt_of_one_token(layers, static):
    """Nothing is in the caches at first; the draft's may stay empty for a while."""
    for policy in (Fixed(0), Drawn([0, 0, 3]), Fixed(3)):
        decoding = decoding_of(SpeculativeDecoder(*pair_with(layers), policy, static_cache=static), [65], budget=BUDGET)
        assert_caches_are_right(decoding)
        assert decoding.sequences[0].tokens == plain(layers, (65,))


@pytest.mark.parametrize(("layers", "static"), MODES)
@by_name("sampler", [*SAMPLERS, Rejection()])
def test_own_draft_is_always_accepted(layers, static, sampler):
    target = pair_with(layers).target
    for gamma in range(1, 9):
        decoder = SpeculativeDecoder(target, target, Fixed(gamma), sampler=sampler, gamma_max=8, static_cache=static)
        decoded = decoder.generate(PROMPT, BUDGET, seed=gamma)
        assert decoded.acceptance_rate == 1
        assert all(step.gamma == gamma for step in decoded.steps[:-1])


@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_the_window_matters(layers):
    """Or the tests of sliding windows would test nothing."""
    assert plain(layers, tuple(PROMPT)) != plain("full", tuple(PROMPT))


def test_a_mistral_slides_without_naming_its_layers():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(5)
    config = MistralConfig(vocab_size=END + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW,
                           initializer_range=0.2, bos_token_id=None, eos_token_id=END)  # fmt: skip
    target, draft = (LanguageModel(MistralForCausalLM(config).float().eval(), byte_tokenizer()) for _ in range(2))
    draft.model.load_state_dict(target.model.state_dict())
    add_noise(draft.model, amount=0.05, seed=6)
    decoded = SpeculativeDecoder(target, draft, Drawn([4, 0, 2])).generate(PROMPT, 40)
    assert 0 < decoded.acceptance_rate < 1
    assert decoded.tokens == plain_text(target, PROMPT, 40)


@given(
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=25).map(tuple),
    gammas=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    budget=st.integers(1, 14),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=40, deadline=None)
def test_any_gammas_give_the_greedy_text(prompt, gammas, budget, mode):
    layers, static = mode
    decoder = SpeculativeDecoder(*pair_with(layers), Drawn(gammas), gamma_max=8, static_cache=static)
    assert decoder.generate(prompt, budget).tokens == plain(layers, prompt, budget)


def drafter_of(pair, kind):
    """A drafter of each kind."""
    return {
        "model": ModelDrafter(pair.draft),
        "early exit": ModelDrafter(early_exit(pair.target, 1)),
        "look-up": PromptLookup(),
    }[kind]


@pytest.fixture(params=["model", "early exit", "look-up"])
def kind(request):
    return request.param


def continuations(first: list[int]) -> dict[str, list[int]]:
    """Prompts behind a text that began with PROMPT."""
    whole = PROMPT + first
    return {
        "goes on": [*whole, *b" So?"],
        "goes on with a token": [*whole, 65],
        "the same text": whole,
        "diverges in the middle": [*PROMPT[:9], *b" 77 ="],
        "diverges in the answer": [*whole[:-5], *b"??"],
        "is shorter": PROMPT[:6],
        "is the same prompt": PROMPT,
        "has nothing in common": list(b"Hello"),
        "is one token": PROMPT[:1],
    }


KEPT = [("full", "model"), ("full", "early exit"), ("full", "look-up"), ("sliding", "model"), ("mixed", "early exit")]


@pytest.mark.parametrize(("layers", "kind"), KEPT)
@pytest.mark.parametrize("how", continuations([0] * 9))
def test_a_kept_cache_changes_nothing(layers, how, kind):
    """Beyond its window a sliding cache has forgotten what a roll-back would need: then all is computed anew."""
    pair = pair_with(layers)
    decoder = SpeculativeDecoder(pair.target, drafter_of(pair, kind), Drawn([3, 0, 4]), gamma_max=8)
    first = decoder.generate(PROMPT, BUDGET, keep_cache=True)
    assert first.tokens == plain(layers, tuple(PROMPT))
    prompt = continuations(first.tokens)[how]
    second = decoder.generate(prompt, BUDGET, cache=first.cache, keep_cache=True)
    fresh = decoder.generate(prompt, BUDGET)
    assert second.tokens == fresh.tokens == plain(layers, tuple(prompt))
    facts = ("gamma", "accepted", "forwards", "committed")
    for step, other in zip(second.steps, fresh.steps, strict=True):
        assert [getattr(step, name) for name in facts] == [getattr(other, name) for name in facts]
    third = decoder.generate([*prompt, *second.tokens, 66], 5, cache=second.cache)
    assert third.tokens == plain(layers, (*prompt, *second.tokens, 66), 5)


@pytest.mark.parametrize("ending", ["eos", "stop"])
def test_a_kept_cache_of_a_text_that_ended_early(ending, kind):
    """The caches then hold more than the text, or all of it."""
    pair = pair_with("full")
    prompt = (
        list(b"Solve 3x + 4 = 19")
        if ending == "stop"
        else next(list(text) for text in (b"%d" % n for n in range(300)) if END in plain("full", tuple(text)))
    )
    text = plain("full", tuple(prompt))
    stop = byte_tokenizer().decode(text[7:9]) if ending == "stop" else ()
    for gamma in range(9):
        decoder = SpeculativeDecoder(pair.target, drafter_of(pair, kind), Fixed(gamma), gamma_max=8)
        first = decoder.generate(prompt, BUDGET, stop=[stop] if stop else [], keep_cache=True)
        assert first.finish_reason == ending
        following = [*prompt, *first.tokens, *b"And?"]
        second = decoder.generate(following, 8, cache=first.cache)
        assert second.tokens == plain("full", tuple(following), 8)


@pytest.fixture
def widths(monkeypatch):
    """Tokens of each forward of either model."""
    noted, forward = [], CachedModel._forward

    def note(cached, tokens, *arguments, **options):
        noted.append(tokens.shape[1])
        return forward(cached, tokens, *arguments, **options)

    monkeypatch.setattr(CachedModel, "_forward", note)
    return noted


@pytest.mark.parametrize("merge", [False, True], ids=["prefill", "merged"])
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_a_kept_cache_saves_the_prefill(layers, merge, widths):
    """Both models see of a longer chat what is new."""
    decoder = SpeculativeDecoder(*pair_with(layers), Fixed(2), merge_prefill=merge)
    first = decoder.generate(PROMPT, BUDGET, keep_cache=True)
    del widths[:]
    decoder.generate([*PROMPT, *first.tokens, *b" So?"], 1, cache=first.cache)
    assert max(widths) <= len(" So?") + 3


def test_a_merged_prefill_saves_a_forward_of_each_model(widths):
    texts, counts = [], []
    for merge in (False, True):
        del widths[:]
        texts.append(SpeculativeDecoder(*pair_with("full"), Fixed(2), merge_prefill=merge).generate(PROMPT, BUDGET))
        counts.append(len(widths))
    assert texts[0].tokens == texts[1].tokens
    assert [step.gamma for step in texts[0].steps] == [step.gamma for step in texts[1].steps]
    assert counts[1] == counts[0] - 2


def test_merge_prefill_is_of_a_single_text():
    prompts = [PROMPT, PROMPT[:3]]
    texts = [
        SpeculativeDecoder(*pair_with("full"), Fixed(2), merge_prefill=merge).generate_batch(prompts, BUDGET)
        for merge in (False, True)
    ]
    assert [text.tokens for text in texts[0]] == [text.tokens for text in texts[1]]
    assert texts[1][0].steps[0].lag == 1


def test_a_used_cache_is_refused():
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(2))
    first = decoder.generate(PROMPT, 5, keep_cache=True)
    decoder.generate(PROMPT, 5, cache=first.cache)
    with pytest.raises(SpecKVError, match="has been used"):
        decoder.generate(PROMPT, 5, cache=first.cache)


def test_the_cache_of_other_models_is_refused(kind):
    pair, other = pair_with("full"), pair_with("sliding")
    kept = SpeculativeDecoder(pair.target, drafter_of(pair, kind), Fixed(2)).generate(PROMPT, 5, keep_cache=True).cache
    with pytest.raises(SpecKVError, match="kept by another model, qwen2"):
        SpeculativeDecoder(*other, Fixed(2)).generate(PROMPT, 5, cache=kept)


def test_a_cache_can_be_taken_over_by_another_policy_and_drafter(kind):
    """Only the target must be the same model; a draft's cache serves no other draft."""
    pair = pair_with("full")
    first = SpeculativeDecoder(pair.target, drafter_of(pair, kind), Fixed(2)).generate(PROMPT, 9, keep_cache=True)
    prompt = [*PROMPT, *first.tokens, 67]
    decoder = SpeculativeDecoder(*pair, Keep())
    second = decoder.generate(prompt, 9, cache=first.cache)
    assert second.tokens == plain("full", tuple(prompt), 9)
    assert second.acceptance_rate == decoder.generate(prompt, 9).acceptance_rate


def test_a_static_cache_is_not_kept():
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(2), static_cache=True)
    with pytest.raises(SpecKVError, match="a static cache is made for one text"):
        decoder.generate(PROMPT, 5, keep_cache=True)
    kept = SpeculativeDecoder(*pair_with("full"), Fixed(2)).generate(PROMPT, 5, keep_cache=True).cache
    with pytest.raises(SpecKVError, match="a static cache is made for one text"):
        decoder.generate(PROMPT, 5, cache=kept)


def test_a_static_cache_shorter_than_the_window_slides_nowhere():
    window = 4 * len(PROMPT)
    settings = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": window}
    model = LanguageModel(tiny_model(seed=1, **settings), byte_tokenizer())
    decoder = SpeculativeDecoder(model, model, Fixed(3), gamma_max=4, static_cache=True)
    assert decoder.generate(PROMPT, 8).tokens == plain("full", tuple(PROMPT), 8)
    with pytest.raises(SpecKVError, match="qwen2: its static cache cannot be rolled back") as caught:
        decoder.generate(PROMPT, window)
    assert "\n" not in str(caught.value)


def recurrent(kind: str) -> LanguageModel:
    import transformers

    sizes = {"vocab_size": END + 1, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None,
             "eos_token_id": END, "pad_token_id": END}  # fmt: skip
    if kind == "mamba":
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    elif kind == "falcon_h1":  # attention and recurrence side by side
        config = transformers.FalconH1Config(**sizes, intermediate_size=32, num_attention_heads=2,
                                             num_key_value_heads=1, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16,
                                             mamba_d_state=4, mamba_chunk_size=8)  # fmt: skip
        model = transformers.FalconH1ForCausalLM(config)
    else:
        model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))
    return LanguageModel(model.float().eval(), byte_tokenizer())


@pytest.mark.parametrize("architecture", ["mamba", "falcon_h1", "rwkv"])
def test_recurrent_models_are_refused(architecture):
    """By name and in one line, as target and as draft."""
    model, usual = recurrent(architecture), pair_with("full")
    for target, draft in ((model, usual.draft), (usual.target, model), (model, PromptLookup())):
        with pytest.raises(SpecKVError, match=f"{architecture}: .* rolled back, so that it cannot") as caught:
            SpeculativeDecoder(target, draft, Fixed(2)).generate(PROMPT, 5)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("static", [False, True])
def test_no_tensor_of_a_cache_is_changed_outside_of_inference_mode(static):
    """On a GPU a static cache's counter becomes an inference tensor, which nothing outside may change in place."""
    target, _ = pair_with("full")
    modes = []
    cached = CachedModel(target, capacity=64 if static else None)
    crop = cached.cache.crop
    cached.cache.crop = lambda n: (modes.append(torch.is_inference_mode_enabled()), crop(n))
    cached.prefill([[65, 66, 67]])
    cached.roll_back([2])
    assert modes == [True, True]
