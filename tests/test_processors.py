"""Logits processors and warpers do to a speculated text what they do to a plain one (failure 7)."""

import itertools
import math

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from speckv.errors import SpecKVError
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import PromptLookup
from speckv.live.models import chat_tokens
from speckv.live.sampling import Greedy, Gumbel, Randomness, Rejection
from speckv.testing.pairs import END

from .live import KINDS, Fixed

BUDGET = 20
POLICIES = [*map(Fixed, range(7)), *KINDS[2:]]


def by_length(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Not one of transformers: what it does hangs on how long the prefix is, and how it ends."""
    tokens = torch.arange(scores.shape[-1])
    return scores - 6.0 * ((tokens + ids.shape[-1] + ids[:, -1:]) % 3 == 0)


def nothing_behind_an_end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """As a grammar would that has nothing to say where a text has ended."""
    if END in ids[0]:
        raise AssertionError("called behind the end")
    return scores


@pytest.fixture(scope="module")
def prompts(small_pair, small_prompts):
    return [chat_tokens(small_pair.target.tokenizer, prompt.text) for prompt in small_prompts[:5]]


@pytest.fixture(scope="module")
def plain(small_pair, prompts):
    """Greedy text of the target by transformers, which would also choose among the padding rows of the embedding."""
    target = small_pair.target
    padding = list(range(target.vocabulary_size, target.model.config.vocab_size))

    def decode(prompt, *processors):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "suppress_tokens": padding}
        out = target.model.generate(ids, max_new_tokens=BUDGET, logits_processor=list(processors), **options)
        return out[0, len(prompt) :].tolist()

    return decode


def processors_of(kind: str, text: list[int], prompt: list[int]):
    """Some that change the text. New ones each time: a bias keeps the size of the vocabulary that it met first."""
    return {
        "repetition penalty": lambda: [RepetitionPenaltyLogitsProcessor(1.6)],
        "logit bias": lambda: [SequenceBiasLogitsProcessor({(text[2],): -8.0, (text[5], text[6]): -9.0, (40,): 4.0})],
        "bad words": lambda: [NoBadWordsLogitsProcessor([text[3:4], text[6:8]], eos_token_id=END)],
        "no repeated n-gram": lambda: [NoRepeatNGramLogitsProcessor(1)],
        "least tokens": lambda: [
            SequenceBiasLogitsProcessor({(END,): 30.0}),
            MinNewTokensLengthLogitsProcessor(len(prompt), 9, END),
        ],
        "a function": lambda: [by_length],
        "several": lambda: [RepetitionPenaltyLogitsProcessor(1.3), by_length, NoBadWordsLogitsProcessor([[text[0]]])],
    }[kind]()


KINDS_OF_PROCESSORS = [
    "repetition penalty",
    "logit bias",
    "bad words",
    "no repeated n-gram",
    "least tokens",
    "a function",
    "several",
]


@pytest.mark.parametrize("kind", KINDS_OF_PROCESSORS)
def test_processed_text_is_that_of_transformers(kind, small_pair, prompts, plain):
    prompt = prompts[0]
    unprocessed = plain(prompt)
    expected = plain(prompt, *processors_of(kind, unprocessed, prompt))
    assert expected != unprocessed
    processors = processors_of(kind, unprocessed, prompt)
    for policy in POLICIES:
        decoded = SpeculativeDecoder(*small_pair, policy).generate(prompt, BUDGET, processors=processors)
        assert decoded.tokens == expected, policy
    lookup = SpeculativeDecoder(small_pair.target, PromptLookup(), Fixed(4))
    assert lookup.generate(prompt, BUDGET, processors=processors).tokens == expected
    assert expected[-1] == END or len(expected) == BUDGET


def test_the_draft_is_processed_as_well(small_pair, prompts):
    """Or it would propose what the target must not say."""
    decoder = SpeculativeDecoder(small_pair.target, small_pair.target, Fixed(4))
    decoded = decoder.generate(prompts[0], BUDGET, processors=[by_length])
    assert decoded.acceptance_rate == 1


class Noting:
    """A processor that notes the prefixes it is called with, and keeps the text from ending."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, ids, scores):
        assert ids.shape[0] == scores.shape[0] == 1 and scores.shape[1] == END + 1
        self.prefixes.append(ids[0].tolist())
        return by_length(ids, scores).index_fill(1, torch.tensor([END]), -torch.inf)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_one_call_a_position_with_that_positions_prefix(policy, small_pair, prompts):
    noting, prompt = Noting(), prompts[1]
    decoded = SpeculativeDecoder(*small_pair, policy).generate(prompt, BUDGET, processors=[noting])
    calls = iter(noting.prefixes)
    for step in decoded.steps:
        context = prompt + decoded.tokens[: step.position]
        of_draft, of_target = (
            list(itertools.islice(calls, step.forwards)),
            list(itertools.islice(calls, step.gamma + 1)),
        )
        drafted = of_target[-1][len(context) :]
        assert of_target == [context + drafted[:index] for index in range(step.gamma + 1)]
        assert of_draft[: step.gamma] == of_target[: step.forwards][: step.gamma]
        assert drafted[: step.accepted] == decoded.tokens[step.position :][: step.accepted]
    assert next(calls, None) is None


@pytest.mark.parametrize("sampler", [Greedy(), Rejection(temperature=0.8), Gumbel(temperature=0.8)], ids=type)
def test_every_row_of_a_batch_sees_its_own_prefix(sampler, small_pair, prompts):
    """Without padding; and its text is the one it has alone."""
    noting = Noting()
    assert len(set(map(len, prompts))) > 3
    for policy in (Fixed(3), *KINDS[2:]):
        decoder = SpeculativeDecoder(*small_pair, policy, sampler=sampler)
        together = decoder.generate_batch(prompts, BUDGET, processors=[noting])
        for seed, (prompt, text) in enumerate(zip(prompts, together, strict=True)):
            alone = decoder.generate(prompt, BUDGET, processors=[Noting()], seed=seed)
            assert text.tokens == alone.tokens
            whole = prompt + text.tokens
            for position in range(text.steps[-1].position + 1):
                assert whole[: len(prompt) + position] in noting.prefixes
        for prefix in noting.prefixes:
            assert any(prefix[: len(prompt)] == prompt for prompt in prompts)
        noting.prefixes.clear()


def test_gumbel_text_with_processors_depends_on_the_seed_alone(small_pair, prompts):
    """It is what plain Gumbel-max sampling of the processed target says."""
    target, prompt = small_pair.target, prompts[2]
    processors = [RepetitionPenaltyLogitsProcessor(1.3), by_length]
    for seed in range(3):
        randomness, tokens = Randomness([seed], torch.device("cpu")), list(prompt)
        while len(tokens) < len(prompt) + BUDGET and tokens[-1] != END:
            ids = torch.tensor([tokens])
            with torch.inference_mode():
                scores = target.model(input_ids=ids, use_cache=False).logits[:, -1, : END + 1]
                for processor in processors:
                    scores = processor(ids, scores)
            log_p = torch.log_softmax(scores[0] / 0.7, -1)
            tokens.append(int((log_p + randomness.gumbel(0, len(tokens), END + 1)).argmax()))
        for policy, draft in itertools.product(POLICIES, ("greedy", "sampled")):
            decoder = SpeculativeDecoder(*small_pair, policy, sampler=Gumbel(temperature=0.7, draft=draft))
            decoded = decoder.generate(prompt, BUDGET, processors=processors, seed=seed)
            assert decoded.tokens == tokens[len(prompt) :]


@pytest.mark.parametrize("sampler", [Greedy(), Greedy(draft="sampled"), Rejection(top_k=5), Gumbel(top_p=0.9)])
@pytest.mark.parametrize("drafter", ["model", "look-up"])
def test_processors_that_forbid_everything_are_named(drafter, sampler, small_pair, prompts):
    target, draft = small_pair.target, small_pair.draft if drafter == "model" else PromptLookup()

    def forbidding(ids, scores):
        return scores if ids.shape[1] < len(prompts[0]) + 3 else torch.full_like(scores, -torch.inf)

    for gamma in (0, 2, 6):
        decoder = SpeculativeDecoder(target, draft, Fixed(gamma), sampler=sampler)
        for decode, prompt in ((decoder.generate, prompts[0]), (decoder.generate_batch, prompts[:1] * 2)):
            with pytest.raises(SpecKVError) as caught:
                decode(prompt, processors=[forbidding])
            assert str(caught.value) == (
                "the logits processors leave no possible token behind 3 tokens of the text; relax them"
            )


@pytest.mark.parametrize("sampler", [Greedy(), Rejection(), Gumbel()], ids=type)
def test_what_no_text_can_begin_with_need_not_go_on(sampler, small_pair, prompts):
    """A grammar is asked neither behind a token that it forbids, which look-up may propose, nor behind the end."""
    letters = list(range(20, 60))

    def allowed(row, ids):
        new = ids[len(prompt) :].tolist()
        assert END not in new and all(token in letters for token in new)
        return [END] if len(new) == 9 else letters

    # What the prompt repeats is forbidden: look-up proposes it nevertheless.
    for prompt in ([70, 30, 71, 30], [25, 70, 70, 70, 25, 25, 70, 70, 70]):
        texts = set()
        for drafter, gamma in itertools.product((small_pair.draft, PromptLookup()), (0, 2, 5)):
            decoder = SpeculativeDecoder(small_pair.target, drafter, Fixed(gamma), sampler=sampler)
            grammar = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
            decoded = decoder.generate(prompt, BUDGET, processors=[grammar])
            assert len(decoded.tokens) == 10 and decoded.finish_reason == "eos"
            texts.add(tuple(decoded.tokens))
        assert isinstance(sampler, Rejection) or len(texts) == 1


def test_a_dead_end_that_the_text_does_not_take_is_no_error(small_pair, prompts, plain):
    """Nothing is allowed behind what the draft gets wrong; the target does not go there."""
    path = prompts[0] + plain(prompts[0])

    def only_the_path(ids, scores):
        return scores if ids[0].tolist() == path[: ids.shape[1]] else torch.full_like(scores, -torch.inf)

    for policy in POLICIES:
        decoded = SpeculativeDecoder(*small_pair, policy).generate(prompts[0], BUDGET, processors=[only_the_path])
        assert prompts[0] + decoded.tokens == path
    assert decoded.acceptance_rate < 1


def test_nothing_is_asked_behind_a_drafted_end(small_pair, prompts):
    endings = SequenceBiasLogitsProcessor({(END,): 12.0})
    ended = 0
    for policy in POLICIES:
        texts = SpeculativeDecoder(*small_pair, policy).generate_batch(
            prompts, BUDGET, processors=[endings, nothing_behind_an_end]
        )
        ended += sum(text.finish_reason == "eos" and text.drafted[-1] for text in texts)
    assert ended > 10


# Warpers


WARPINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 4},
    {"top_k": 1},
    {"top_p": 0.6},
    {"temperature": 0.5, "min_p": 0.2},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", WARPINGS, ids=str)
def test_warping_is_that_of_transformers(settings, small_pair):
    """With the warpers that its own sampling would build, in its order."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, "temperature": 1.0} | settings)
    own = small_pair.target.model._get_logits_processor(config, input_ids_seq_length=1)
    logits = 4 * torch.randn(5, 3, 30, generator=torch.Generator().manual_seed(1))
    logits[0, 0, 3:9] = -torch.inf
    before = logits.clone()
    expected = torch.log_softmax(own(torch.zeros(15, 1, dtype=torch.long), logits.view(15, 30)), -1).view(5, 3, 30)
    for sampler in (Rejection(**settings), Gumbel(**settings)):
        torch.testing.assert_close(sampler.warp(logits), expected)
        torch.testing.assert_close(sampler.warp(logits[1, 2]), expected[1, 2])
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("sampler", [Rejection, Gumbel])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature is 0; it must be from 0.0001 (0 is greedy decoding)"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be from 0.0001 (0 is greedy decoding)"),
        ({"temperature": math.nan}, "temperature is nan; it must be from 0.0001 (0 is greedy decoding)"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number from 0"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number from 0"),
        ({"top_p": 0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0 to 1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
        ({"draft": "best"}, "draft is best; it must be greedy or sampled"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(settings, message, sampler):
    with pytest.raises(SpecKVError) as caught:
        sampler(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize("sampler", [Greedy(), Rejection(), Gumbel()], ids=type)
def test_a_seed_below_zero_is_refused_in_one_line(sampler, small_pair, prompts):
    with pytest.raises(SpecKVError, match=r"^seed is -1; it must be from 0 to 2\^63 - 1$"):
        SpeculativeDecoder(*small_pair, Fixed(2), sampler=sampler).generate(prompts[0], 4, seed=-1)
