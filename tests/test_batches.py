"""Sequences that are decoded side by side are what they would be one by one."""

import functools

import numpy as np
import pytest

from speckv.errors import SpecKVError
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import ModelDrafter, PromptLookup
from speckv.live.models import early_exit
from speckv.live.sampling import Gumbel, Rejection
from speckv.policy import Policy
from speckv.testing.pairs import END, byte_tokenizer
from tests.live import KINDS, SAMPLERS, Both, Drawn, Fixed, Stateful, decoding_of, pair_with, plain_text

BUDGET = 16
MODES = [("full", False), ("sliding", False), ("mixed", False), ("full", True)]
#: Policies that now and then draft nothing in a sequence while others go on.
PAUSING = (Drawn, Stateful)


class ByLength(Policy):
    """Drafts nothing in every other sequence, and differs in the rest."""

    name = "by-length"
    features = ("context_length", "position")

    def choose_gamma(self, features, state):
        length = (features["context_length"] - features["position"]).astype(int)
        return np.where(length % 2 == 0, 0, 1 + length % 4)


@functools.cache
def prompts(layers):
    """Of different lengths, one token among them; some texts end by themselves, at different times."""
    target = pair_with(layers).target
    ends = {}  # length of the text -> a prompt
    for number in range(400):
        text = plain_text(target, prompt := list(b"%d is" % number), BUDGET)
        if END in text:
            ends.setdefault(len(text), prompt)
        if len(ends) == 2:
            break
    assert len(ends) == 2
    return [list(b"Solve 3x + 4 = 19 for x"), *ends.values(), [65], list(b"Hi")]


def assert_same(batched, singles, exact_lags=True):
    for one, other in zip(batched, singles, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert one.drafted == other.drafted
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-3)
        facts = ("position", "gamma", "accepted", "committed", "forwards")
        for step, alone in zip(one.steps, other.steps, strict=True):
            assert [getattr(step, name) for name in facts] == [getattr(alone, name) for name in facts]
            # A draft that pauses catches up when another sequence drafts, and then has less to take in.
            assert step.lag == alone.lag if exact_lags else bool(alone.lag) <= step.lag <= alone.lag


def assert_batch_is_one_by_one(decoder, prompts, **options):
    batched = decoder.generate_batch(prompts, BUDGET, seed=7, log_probabilities=True, **options)
    singles = [
        decoder.generate(prompt, BUDGET, seed=7 + row, log_probabilities=True, **options)
        for row, prompt in enumerate(prompts)
    ]
    assert_same(batched, singles, exact_lags=not isinstance(decoder.policy, (*PAUSING, ByLength)))
    return batched


def names_of(value):
    return f"{type(value).__name__}-{value.draft}" if hasattr(value, "draft") else repr(value)


@pytest.mark.parametrize("policy", [*KINDS, ByLength()], ids=names_of)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=names_of)
def test_batch_is_one_by_one(policy, sampler):
    decoder = SpeculativeDecoder(*pair_with("full"), policy, sampler=sampler, gamma_max=6)
    batched = assert_batch_is_one_by_one(decoder, prompts("full"))
    if sampler is SAMPLERS[0]:
        assert {decoded.finish_reason for decoded in batched} == {"eos", "length"}
    if isinstance(policy, ByLength):
        assert {step.gamma == 0 for decoded in batched for step in decoded.steps[:1]} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "static"), MODES[1:])
@pytest.mark.parametrize("policy", [Drawn([3, 0, 6, 1]), Both(), ByLength()], ids=repr)
@pytest.mark.parametrize("sampler", [SAMPLERS[0], Rejection(temperature=0.7)], ids=names_of)
def test_batch_is_one_by_one_in_every_cache(layers, static, policy, sampler):
    decoder = SpeculativeDecoder(*pair_with(layers), policy, sampler=sampler, gamma_max=6, static_cache=static)
    assert_batch_is_one_by_one(decoder, prompts(layers))


@pytest.mark.parametrize("sampler", [SAMPLERS[0], Gumbel(temperature=0.7)], ids=names_of)
@pytest.mark.parametrize("make", [lambda target: ModelDrafter(early_exit(target, 1)), lambda _: PromptLookup()])
def test_batch_is_one_by_one_with_every_drafter(make, sampler):
    target = pair_with("full").target
    repeating = [*prompts("full"), list(b"abcabcabcab"), list(b"to be or not to be, that is to")]
    for policy in (Fixed(4), Drawn([2, 0, 5])):
        decoder = SpeculativeDecoder(target, make(target), policy, sampler=sampler)
        batched = assert_batch_is_one_by_one(decoder, repeating)
        assert any(step.accepted for decoded in batched for step in decoded.steps)


def test_options_hold_in_a_batch():
    """Stop strings, fewest tokens and processors."""
    target = pair_with("full").target
    text = plain_text(target, prompts("full")[0], BUDGET)
    stop = byte_tokenizer().decode(text[5:7])

    def louder(ids, scores):
        return scores + 3.0 * (ids[0, -1] == scores.argmax(-1)) * (scores.argmax(-1) % 2)

    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(4))
    batched = assert_batch_is_one_by_one(decoder, prompts("full"), stop=[stop], min_new_tokens=9, processors=[louder])
    assert batched[0].finish_reason == "stop"
    assert all(len(decoded.tokens) >= 9 for decoded in batched if decoded.finish_reason == "eos")


@pytest.mark.parametrize(("layers", "static"), MODES)
@pytest.mark.parametrize("policy", [Drawn([6, 0, 3]), Both()], ids=repr)
def test_caches_grow_with_the_longest_sequence(layers, static, policy):
    """Not with what the sequences accept between them: a static cache would overflow, others fill with padding."""
    decoder = SpeculativeDecoder(*pair_with(layers), policy, gamma_max=8, static_cache=static)
    decoding = decoding_of(decoder, *prompts(layers), budget=40)
    while decoding.going:
        decoding.step()
        if decoding.going:
            assert decoding.target.lengths == [len(sequence.context) - 1 for sequence in decoding.going]
            for cached in (decoding.target, decoding.drafting.cached):
                assert cached.cache.get_seq_length() == max(cached.lengths)
            assert all(n <= most for n, most in zip(cached.lengths, decoding.target.lengths, strict=True))
    assert [s.tokens for s in decoding.sequences] == [
        plain_text(pair_with(layers).target, p, 40) for p in prompts(layers)
    ]


class Watching(Fixed):
    """Notes how many sequences the feature says there are, and how many it is asked about."""

    name = "watching"
    features = ("batch_size",)

    def __init__(self, gamma):
        super().__init__(gamma)
        self.seen = []

    def choose_gamma(self, features, state):
        self.seen.append((features.rows, features["batch_size"].tolist()))
        return self.gamma


def test_batch_size_is_what_is_still_going():
    policy = Watching(2)
    batched = SpeculativeDecoder(*pair_with("full"), policy).generate_batch(prompts("full"), BUDGET)
    steps = [len(decoded.steps) for decoded in batched]
    going = [sum(count > at for count in steps) for at in range(max(steps))]
    assert going[0] == len(batched) and going[-1] < len(batched)
    assert policy.seen == [(size, [size] * size) for size in going]
    for decoded in batched:
        assert [step.batch_size for step in decoded.steps] == going[: len(decoded.steps)]


def test_order_of_prompts_makes_no_difference():
    decoder = SpeculativeDecoder(*pair_with("full"), Both())
    forwards = decoder.generate_batch(prompts("full"), BUDGET)
    backwards = decoder.generate_batch(prompts("full")[::-1], BUDGET)
    assert_same(backwards[::-1], forwards)


def test_texts_and_tokens_can_share_a_batch():
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(3))
    ids = byte_tokenizer()("7 * 8 =")["input_ids"]
    one, other = decoder.generate_batch(["7 * 8 =", ids], 9)
    assert one.tokens == other.tokens == decoder.generate("7 * 8 =", 9).tokens


def test_a_batch_of_nothing():
    assert SpeculativeDecoder(*pair_with("full"), Fixed(2)).generate_batch([]) == []


def test_a_batch_of_one():
    decoder = SpeculativeDecoder(*pair_with("full"), Both())
    assert_batch_is_one_by_one(decoder, prompts("full")[:1])


def test_refused_in_a_batch():
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(2))
    kept = decoder.generate([65], 3, keep_cache=True).cache
    for options in ({"keep_cache": True}, {"cache": kept}):
        with pytest.raises(SpecKVError, match="a batch neither takes nor keeps a cache"):
            decoder.generate_batch([[65], [66]], 3, **options)
    with pytest.raises(SpecKVError, match="prompt is empty"):
        decoder.generate_batch([[65], []], 3)


def test_a_model_that_rolls_back_one_sequence_at_a_time_is_refused(monkeypatch):
    monkeypatch.setattr("speckv.live.caching._MOVABLE", set())
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(2))
    assert decoder.generate([65], 3).tokens
    with pytest.raises(SpecKVError, match="qwen2: its cache rolls back for one sequence at a time"):
        decoder.generate_batch([[65], [66]], 3)


def test_a_sequence_with_nothing_cached_goes_on_alone():
    """The longer one ends in a step in which nobody drafted: nothing of it may stay in the draft's cache."""
    target, draft = pair_with("full")
    long = list(b"Solve 3x + 4 = 19 for x")
    decoder = SpeculativeDecoder(target, draft, Drawn([0, 4]), gamma_max=8)
    stop = decoder.generate(long, 1).text
    decoding = decoding_of(decoder, long, [65], budget=16, stop=[stop])
    decoding.step()
    assert len(decoding.going) == 1 and decoding.drafting.cached.cache.get_seq_length() == 0
    while decoding.going:
        decoding.step()
        for cached in (decoding.target, decoding.drafting.cached) if decoding.going else ():
            assert cached.cache.get_seq_length() == max(cached.lengths)
    alone = decoder.generate([65], 16, stop=[stop])
    assert decoding.decoded()[1].tokens == alone.tokens
    assert [step.accepted for step in decoding.decoded()[1].steps] == [step.accepted for step in alone.steps]


def test_a_text_is_not_a_batch():
    with pytest.raises(SpecKVError, match="prompts is a single text"):
        SpeculativeDecoder(*pair_with("full"), Fixed(1)).generate_batch("Hello")
