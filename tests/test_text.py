"""Where a text ends, and what is shown of it while it grows: at every gamma what the target alone would say."""

import copy
import itertools
import os
import pathlib
from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from speckv.errors import SpecKVError
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import LanguageModel, chat_tokens, load_tokenizer
from speckv.live.sampling import Greedy, Gumbel, Rejection
from speckv.live.text import Detokenizer, decoded_text
from speckv.policy import Policy
from speckv.testing.pairs import byte_tokenizer

from .live import KINDS, Fixed

END, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
WIDTH = 64


class Speaker:
    """A pair that says what it is told: real models, made so that each token has one that surely follows.

    Args:
        pieces: the text, token by token; no two are the same.
        wrong: where, in the text and its end, the draft proposes something else.

    Attributes:
        ids: of the text's tokens, with the one that ends it.
        prompt: what to start from.
    """

    def __init__(self, *pieces: str | bytes, wrong: Collection[int] = ()):
        spelled = ["".join(map(bytes_to_unicode().get, p.encode() if isinstance(p, str) else p)) for p in pieces]
        words = [*sorted(bytes_to_unicode().values()), *spelled, END_OF_TURN, END]
        vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=END, extra_special_tokens=[END_OF_TURN]
        )
        self.ids = [*(vocabulary[word] for word in spelled), vocabulary[END]]
        self.prompt = [vocabulary[">"]]
        follows = dict(itertools.pairwise([*self.prompt, *self.ids]))
        off = vocabulary["#"]
        self.target = self._model(follows)
        strays = {token: off for at, token in enumerate(follows) if at in wrong}
        self.draft = self._model(follows | strays)

    def _model(self, follows: dict[int, int]) -> LanguageModel:
        config = Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=WIDTH,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=self.ids[-1],
        )
        model = Qwen2ForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
            for direction, (token, after) in enumerate(follows.items()):
                model.model.embed_tokens.weight[token, direction] = 1
                model.lm_head.weight[after, direction] = 4
        return LanguageModel(model, self.tokenizer)

    def decoder(self, policy: Policy | int, **options) -> SpeculativeDecoder:
        policy = Fixed(policy) if isinstance(policy, int) else policy
        return SpeculativeDecoder(self.target, self.draft, policy, **options)


def shown(decoder, prompt, budget=60, **options):
    """What a stream shows, and what it comes to."""
    stream = decoder.stream(prompt, budget, **options)
    pieces = [piece for step in stream for piece in step]
    assert all(piece.text for piece in pieces)
    return pieces, stream.decoded


def joined(pieces) -> str:
    return "".join(piece.text for piece in pieces)


LETTERS = tuple("abcdefghijkl")


# The end token


@pytest.mark.parametrize("wrong", [(), (3,), (0, 1, 2, 3, 4, 5, 6)], ids=["agrees", "once wrong", "always wrong"])
@pytest.mark.parametrize("gamma", range(5))
def test_an_end_token_anywhere_in_a_block(gamma, wrong):
    """In a step of gamma 4 an end token in place 0 to 3 is drafted, in place 4 it is the bonus."""
    for place in range(7):
        speaker = Speaker(*LETTERS[:place], wrong=wrong)
        pieces, decoded = shown(speaker.decoder(gamma), speaker.prompt)
        assert decoded.tokens == speaker.ids and decoded.finish_reason == "eos"
        assert decoded.text == joined(pieces) == "abcdefghijkl"[:place]
        assert sum(step.committed for step in decoded.steps) == len(decoded.drafted) == place + 1
        if not wrong:
            assert decoded.drafted[-1] == (place % (gamma + 1) < gamma)


@pytest.mark.parametrize("gamma", range(5))
def test_every_end_token_of_the_generation_settings_ends_the_text(gamma):
    for place in range(6):
        words = [*LETTERS[:6]]
        words[place] = END_OF_TURN
        speaker = Speaker(*words)
        speaker.target.model.generation_config.eos_token_id = [speaker.ids[-1], speaker.ids[place]]
        pieces, decoded = shown(speaker.decoder(gamma), speaker.prompt)
        assert decoded.tokens == speaker.ids[: place + 1] and decoded.finish_reason == "eos"
        assert decoded.text == joined(pieces) == "abcdef"[:place]


def test_an_end_token_in_the_prompt_ends_nothing():
    speaker = Speaker(*LETTERS)
    decoded = speaker.decoder(4).generate([speaker.ids[-1], *speaker.prompt])
    assert decoded.tokens == speaker.ids


def test_texts_of_a_batch_end_on_their_own():
    speaker = Speaker(*LETTERS)
    prompts = [[speaker.ids[at]] for at in (8, 2, 11, 5)]
    for gamma in range(5):
        decoded = speaker.decoder(gamma).generate_batch(prompts, 5)
        assert [text.text for text in decoded] == ["jkl", "defgh", "", "ghijk"]
        assert [text.finish_reason for text in decoded] == ["eos", "length", "eos", "length"]


# The budget


@given(
    budget=st.integers(1, 14),
    gamma=st.integers(0, 9),
    gamma_max=st.integers(0, 9),
    wrong=st.sets(st.integers(0, 12)),
)
@settings(max_examples=40, deadline=None)
def test_the_budget_is_never_exceeded(budget, gamma, gamma_max, wrong):
    speaker = Speaker(*LETTERS, wrong=wrong)
    decoded = speaker.decoder(min(gamma, gamma_max), gamma_max=gamma_max).generate(speaker.prompt, budget)
    assert decoded.tokens == speaker.ids[:budget]
    assert decoded.finish_reason == ("eos" if budget >= len(speaker.ids) else "length")
    assert len(decoded.tokens) == sum(step.committed for step in decoded.steps)
    position = 0
    for step in decoded.steps:
        assert step.position == position and step.position + step.gamma < budget
        position += step.committed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens is 6"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"stop": ["a", ""]}, r"stop is \['a', ''\]"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": "abc"}, "stop is 'abc'; it must be a list of strings"),
        ({"stop": ["a", 3]}, r"stop is \['a', 3\]"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    speaker = Speaker(*LETTERS)
    for decode in (
        speaker.decoder(2).generate,
        lambda prompt, **rest: speaker.decoder(2).generate_batch([prompt], **rest),
    ):
        with pytest.raises(SpecKVError, match=message) as caught:
            decode(speaker.prompt, **options)
        assert "\n" not in str(caught.value)


def plain_greedy(model: LanguageModel, prompt: list[int], budget: int, **options) -> list[int]:
    """What transformers says, which would also choose among the padding rows of the embedding."""
    ids = torch.tensor([prompt])
    padding = list(range(model.vocabulary_size, model.model.config.vocab_size))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "suppress_tokens": padding} | options
    return model.model.generate(ids, max_new_tokens=budget, **options)[0, len(prompt) :].tolist()


def test_no_end_before_min_new_tokens(small_pair, small_prompts):
    target = small_pair.target
    prompts = [chat_tokens(target.tokenizer, prompt.text) for prompt in small_prompts]
    prompt = min(prompts, key=lambda prompt: len(plain_greedy(target, prompt, 40)))
    lengths = []
    for least in (1, 12, 30, 40):
        expected = plain_greedy(target, prompt, 40, min_new_tokens=least)
        for policy in (Fixed(0), Fixed(1), Fixed(5), *KINDS[2:]):
            decoded = SpeculativeDecoder(*small_pair, policy).generate(prompt, 40, min_new_tokens=least)
            assert decoded.tokens == expected
        lengths.append(len(expected))
    assert lengths[0] < 30 and all(length >= least for length, least in zip(lengths, (1, 12, 30, 40), strict=True))


def test_a_certain_end_is_held_back():
    """Neither the target nor the draft can choose it, sampled or not; then the text goes on where it leads."""
    speaker = Speaker("a", "b")
    for sampler, gamma in itertools.product((Greedy(), Rejection(), Gumbel()), range(4)):
        decoded = speaker.decoder(gamma, sampler=sampler).generate(speaker.prompt, 8, min_new_tokens=6)
        assert decoded.tokens[:2] == speaker.ids[:2] and speaker.ids[-1] not in decoded.tokens[:6]


# Stop strings

TEXT = ("He", "llo", " wor", "ld", "! He", "llo!", "!!", " aab", "aa", "ab")
STOPS = {
    "inside a token": ["or"],
    "across tokens": ["lo w"],
    "across three tokens": ["lo world"],
    "a whole token": ["ld"],
    "at the beginning": ["He"],
    "first of all": ["H"],
    "the earlier of two": ["ld", "o w"],
    "both in one token": ["e", "H"],
    "a prefix of another": ["wor", "world"],
    "another's rest": ["world!", "rl"],
    "begun and not ended": ["world?", "Hello?"],
    "begun twice": ["aaab"],
    "overlapping itself": ["!!!"],
    "never": ["xyz"],
    "at the end": ["baaab"],
}


def cut(tokenizer, ids, stop):
    """Tokens and text up to the first token that completes a stop string."""
    for end in range(1, len(ids) + 1):
        text = decoded_text(tokenizer, ids[:end])
        if found := [text.find(string) for string in stop if string in text]:
            return ids[:end], text[: min(found)], True
    return ids, decoded_text(tokenizer, ids), False


@pytest.mark.parametrize("wrong", [(), (2, 4, 7)], ids=["agrees", "wrong"])
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stop_strings(stop, wrong):
    speaker = Speaker(*TEXT, wrong=wrong)
    tokens, text, stopped = cut(speaker.tokenizer, speaker.ids, stop)
    for gamma in (0, 1, 2, 3, 5, 9):
        decoder = speaker.decoder(gamma)
        pieces, decoded = shown(decoder, speaker.prompt, stop=stop)
        assert (decoded.tokens, decoded.text) == (tokens, text)
        assert joined(pieces) == text
        assert decoded.finish_reason == ("stop" if stopped else "eos")
        assert decoded.text == decoder.generate_batch([speaker.prompt], stop=stop)[0].text
        assert len(decoded.drafted) == len(tokens) == sum(step.committed for step in decoded.steps)


def test_the_stops_are_worth_testing():
    ends = {name: cut(Speaker(*TEXT).tokenizer, Speaker(*TEXT).ids, stop) for name, stop in STOPS.items()}
    assert {name for name, end in ends.items() if not end[2]} == {"begun and not ended", "never"}
    assert ends["at the beginning"][1] == ends["first of all"][1] == ""


def test_a_stop_string_wins_over_the_budget_in_the_same_token():
    speaker = Speaker(*LETTERS)
    for gamma in range(4):
        decoded = speaker.decoder(gamma).generate(speaker.prompt, 4, stop=["cd"])
        assert (decoded.text, decoded.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("stop", [[], ["€"], ["é€😀"], ["😀x", "😀y"], ["\N{REPLACEMENT CHARACTER}"]])
def test_characters_that_are_split_over_tokens(stop):
    """Every byte is a token; no half character is shown, nor taken for a stop string."""
    whole = "né€😀y"
    speaker = Speaker(*(bytes([byte]) for byte in whole.encode()))
    for gamma in range(6):
        pieces, decoded = shown(speaker.decoder(gamma), speaker.prompt, stop=stop)
        expected = whole[: min([whole.index(string) for string in stop if string in whole], default=None)]
        assert decoded.text == joined(pieces) == expected
        assert all(piece.text in whole for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_such():
    speaker = Speaker("a", *(bytes([byte]) for byte in "€".encode()))
    for gamma in range(4):
        pieces, decoded = shown(speaker.decoder(gamma), speaker.prompt, 3)
        assert decoded.text == joined(pieces) == "a\N{REPLACEMENT CHARACTER}"


# Text as it grows


def fallback_tokenizer():
    """As of Llama 2: bytes are tokens of their own, and a run of them is text if all of it is."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": 256, "a": 257, "▁the": 258}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def level_bytes(text: str | bytes) -> list[int]:
    vocabulary = byte_tokenizer().get_vocab()
    return [vocabulary[bytes_to_unicode()[byte]] for byte in (text.encode() if isinstance(text, str) else text)]


def merged_tokenizer():
    """Of bytes and of frequent strings of them, as of GPT-2; its tokens begin and end inside characters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(bytes_to_unicode().values())
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<end>"])
    spelled = ["".join(bytes_to_unicode()[byte] for byte in text.encode()) for text in ("ab aé", "€é😀", " é€a\n😀")]
    tokenizer.train_from_iterator(spelled * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZERS = {"byte level": (byte_tokenizer(), level_bytes), "byte fallback": (fallback_tokenizer(), list)}
MERGED = merged_tokenizer()
#: Pieces of characters, pieces of stop strings, and what is no text at all.
FRAGMENTS = [
    *(c.encode() for c in "abé€😀 \n"),
    b"ab",
    b"aba",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xe2",
    b"\xac",
    b"\xff",
    b"\x80",
]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    stop=st.lists(st.text("abé€😀 \n", min_size=1, max_size=4), max_size=3),
    ends=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_was_shown_is_the_text(kind, fragments, stop, ends):
    tokenizer, encode = TOKENIZERS[kind]
    ids = encode(b"".join(fragments)) + [256] * ends
    detokenizer, pieces = Detokenizer(tokenizer, stop), [""]
    for token in ids:
        pieces.append(detokenizer.push(token))
        so_far = "".join(pieces)
        assert detokenizer.text.startswith(so_far)
        assert detokenizer.stopped or not any(string in so_far for string in stop)
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    text = "".join(pieces)
    assert text == detokenizer.text and not any(string in text for string in stop)
    if kind == "byte level" or "\N{REPLACEMENT CHARACTER}" not in text + decoded_text(tokenizer, ids):
        _, expected, stopped = cut(tokenizer, ids, stop)
        assert (text, detokenizer.stopped) == (expected if ids else "", stopped)


@given(text=st.text("abé€\n", max_size=10), stop=st.lists(st.text("abé€\n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=100, deadline=None)
def test_no_more_is_held_back_than_what_may_yet_be_taken_back(text, stop):
    detokenizer, pieces = Detokenizer(byte_tokenizer(), stop), [""]
    for character in text:
        pieces += [detokenizer.push(token) for token in level_bytes(character)]
        if detokenizer.stopped:
            return
        held = detokenizer.text.removeprefix("".join(pieces))
        assert not held or any(string.startswith(held) for string in stop)


def decoded_piece_by_piece(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@given(st.lists(st.integers(0, 289) | st.sampled_from([0, 255, 128, 33]), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_tokens_of_bytes_join_to_their_text(ids):
    """Broken ones and special ones, too; none of a character is shown before all of it."""
    tokenizer = MERGED
    ids = [token for token in ids if token < len(tokenizer)]
    assert "".join(decoded_piece_by_piece(tokenizer, ids)) == decoded_text(tokenizer, ids)


@pytest.mark.parametrize(
    "ids",
    [
        level_bytes(b"\xff" * 100 + "a😀".encode() + b"\xf0\x9f\x98" * 50 + "€".encode() + b"\xe2\x82" * 40),
        [*level_bytes("aé"), *[256] * 100, *level_bytes("é b€")],
    ],
    ids=["broken", "special"],
)
def test_a_long_run_without_a_whole_character(ids):
    assert "".join(decoded_piece_by_piece(byte_tokenizer(), ids)) == decoded_text(byte_tokenizer(), ids)


def test_a_token_costs_the_same_however_long_the_text_is():
    """Counted in tokens that are decoded; they were of order length squared."""

    class Counting:
        decoded = 0

        def decode(self, tokens, **options):
            self.decoded += len(tokens)
            return byte_tokenizer().decode(tokens, **options)

    tokenizer = Counting()
    ids = level_bytes("All of it, né€😀, and on. " * 20) + [256] * 60 + level_bytes(b"\xff" * 60)
    assert "".join(decoded_piece_by_piece(tokenizer, ids)) == decoded_text(byte_tokenizer(), ids)
    assert tokenizer.decoded < 50 * len(ids)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen-coder-0.5b"])
def test_real_tokenizers_join_to_their_text(name):
    folder = pathlib.Path(os.environ.get("SPECKV_MODELS", ""), name)
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"SPECKV_MODELS names no folder with {name}")
    tokenizer = load_tokenizer(str(folder))
    random = np.random.default_rng(0)
    for length in (1, 10, 300):
        for ids in (
            random.integers(0, len(tokenizer), length).tolist(),
            tokenizer("né€ 😀\n x = [1]\t" * length).input_ids,
        ):
            assert "".join(decoded_piece_by_piece(tokenizer, ids)) == decoded_text(tokenizer, ids)


def test_a_broken_byte_takes_nothing_back():
    """The decoder of a byte-fallback tokenizer turns the valid byte in front of it into a broken one."""
    tokenizer, _ = TOKENIZERS["byte fallback"]
    assert decoded_text(tokenizer, [10]) == "\n" and "\n" not in decoded_text(tokenizer, [10, 0xF0, 257])
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in (10, 0xF0, 257)]
    assert pieces[0] == "\n" and "".join(pieces) == detokenizer.text


def test_pieces_know_whether_they_were_drafted(small_pair, small_prompts):
    """With one byte to a token and nothing held back, a piece is a token."""
    drafted = set()
    speaker = Speaker(*LETTERS, wrong=(1, 2, 5))
    for policy in (Fixed(0), Fixed(2), Fixed(4), *KINDS):
        pieces, decoded = shown(
            SpeculativeDecoder(speaker.target, speaker.draft, policy, sampler=Greedy()), speaker.prompt
        )
        assert [piece.drafted for piece in pieces] == decoded.drafted[: len(pieces)]
        assert [piece.text for piece in pieces] == list(LETTERS)
        for step in decoded.steps:
            flags = decoded.drafted[step.position : step.position + step.committed]
            assert flags == [index < step.accepted for index in range(step.committed)]
        drafted.update(decoded.drafted)
    assert drafted == {False, True}


# Log-probabilities


@pytest.mark.parametrize("sampler", [Greedy(), Rejection(temperature=0.7, top_k=5), Gumbel(draft="greedy")], ids=type)
def test_log_probabilities_are_the_targets_own(sampler, small_pair, small_prompts):
    """Before processors and warping, whoever proposed the token, in a batch as alone."""
    target = small_pair.target
    prompts = [chat_tokens(target.tokenizer, prompt.text) for prompt in small_prompts[:3]]
    shifted = {"processors": [lambda ids, scores: scores - 5.0 * (torch.arange(scores.shape[1]) % 3)]}
    for policy, options in itertools.product((Fixed(0), Fixed(4), KINDS[-1]), ({}, shifted)):
        decoder = SpeculativeDecoder(*small_pair, policy, sampler=sampler)
        decoded = decoder.generate_batch(prompts, 12, log_probabilities=True, **options)
        for prompt, text in zip(prompts, decoded, strict=True):
            with torch.inference_mode():
                logits = target.model(input_ids=torch.tensor([[*prompt, *text.tokens]])).logits[0]
            log_p = torch.log_softmax(logits[len(prompt) - 1 : -1, : target.vocabulary_size], -1)
            expected = log_p[torch.arange(len(text.tokens)), torch.tensor(text.tokens)]
            np.testing.assert_allclose(text.log_probabilities, expected, atol=2e-4)
        assert decoder.generate(prompts[0], 12, **options).log_probabilities == []


# Feedback and state


class Noting(Policy):
    """Notes what it is told of every step."""

    name = "noting"

    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma
        self.outcomes = []

    def choose_gamma(self, features, state):
        return self.gamma

    def observe(self, outcome, state):
        self.outcomes += zip(outcome.drafted.tolist(), outcome.accepted.tolist(), outcome.seconds > 0, strict=True)


@pytest.mark.parametrize(
    ("options", "last", "committed"),
    [
        ({"stop": ["g"]}, (4, 4), 2),  # a b c d e | f g
        ({"stop": ["j"]}, (4, 4), 5),  # the bonus token ends it
        ({"max_new_tokens": 8}, (2, 2), 3),  # no more was drafted than fits
        ({}, (3, 3), 3),  # k l and the end token, which was drafted: nothing follows it
    ],
    ids=["stop", "bonus", "budget", "end token"],
)
def test_feedback_is_the_acceptance_before_the_text_was_cut(options, last, committed):
    speaker, policy = Speaker(*LETTERS), Noting(4)
    decoded = speaker.decoder(policy).generate(speaker.prompt, **options)
    assert policy.outcomes[-1] == (*last, True) and policy.outcomes[0] == (4, 4, True)
    assert (decoded.steps[-1].gamma, decoded.steps[-1].accepted, decoded.steps[-1].committed) == (*last, committed)
    assert [(step.gamma, step.accepted) for step in decoded.steps] == [outcome[:2] for outcome in policy.outcomes]


@pytest.mark.parametrize("policy", KINDS, ids=lambda policy: policy.name)
def test_a_text_leaves_nothing_behind_for_the_next(policy, small_pair, small_prompts):
    def steps(decoder, prompt):
        decoded = decoder.generate(prompt.text, 24)
        return decoded.tokens, [(step.gamma, step.accepted, step.forwards) for step in decoded.steps]

    used = SpeculativeDecoder(*small_pair, copy.deepcopy(policy))
    for prompt in (*small_prompts[:3], small_prompts[0]):
        new = SpeculativeDecoder(*small_pair, copy.deepcopy(policy))
        assert steps(used, prompt) == steps(new, prompt)


@pytest.mark.parametrize("gamma", range(1, 9))
def test_steps_in_which_all_or_nothing_is_accepted(gamma):
    for wrong, accepted in (((), 1), (tuple(range(13)), 0)):
        speaker = Speaker(*LETTERS, wrong=wrong)
        decoded = speaker.decoder(gamma, record_signals=True).generate(speaker.prompt, 12)
        assert decoded.tokens == speaker.ids[:12]
        for step in decoded.steps:
            assert step.accepted == accepted * step.gamma and step.committed == step.accepted + 1
            assert all(len(values) == step.gamma for name, values in step.signals.items() if name.startswith("draft"))
        assert decoded.acceptance_rate == accepted


@pytest.mark.parametrize("how", ["policy", "host", "draw_token"])
def test_gamma_zero_in_every_step(how, small_pair, small_prompts):
    class Never(Policy):
        name = "never"

        def draw_token(self, features, state):
            return False

    policy = {"policy": Fixed(0), "host": KINDS[-1], "draw_token": Never()}[how]
    for sampler in (Greedy(), Rejection(), Gumbel()):
        decoder = SpeculativeDecoder(*small_pair, policy, sampler=sampler, gamma_max=0 if how == "host" else 5)
        texts = decoder.generate_batch([prompt.text for prompt in small_prompts[:3]], 8)
        assert {(step.gamma, step.accepted, step.committed) for text in texts for step in text.steps} == {(0, 0, 1)}
        assert not any(flag for text in texts for flag in text.drafted)
        assert [text.acceptance_rate for text in texts] == [0, 0, 0]
        forwards = {step.forwards for text in texts for step in text.steps}
        assert forwards <= ({0, 1} if how == "draw_token" else {0})
