"""Both sampling modes keep the target's distribution (rule R2): by exact enumeration on tiny vocabularies.

The models are real ones of transformers, of one or two layers and two to four tokens; decoder, caches, drafters,
samplers and policies are those that users run. Only the source of random numbers is replaced, by one that walks
through every outcome and weighs it. What comes out is compared with products of conditional probabilities from plain
forwards of the target, warped by transformers' own warpers.
"""

import itertools
import math
import os
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speckv.live import sampling
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import PromptLookup
from speckv.live.models import LanguageModel, early_exit
from speckv.live.sampling import Greedy, Gumbel, Randomness, Rejection
from speckv.policy import Policy
from tests.live import Fixed

PROMPT = [0, 1, 0, 0, 1]
PADDING = 2  # logits behind the vocabulary that mean nothing, as real models have


def language_model(seed: int, vocabulary: int, layers: int = 1, ends: bool = True) -> LanguageModel:
    """A random Qwen2. Its last token ends the text, if anything does."""
    words = {letter: index for index, letter in enumerate("abcd"[:vocabulary])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab=words, unk_token="a")),
        eos_token="abcd"[vocabulary - 1] if ends else None,
    )
    config = Qwen2Config(
        vocab_size=vocabulary + PADDING,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5, generator=generator)
        model.lm_head.weight.normal_(0, 0.25, generator=generator)
        model.lm_head.weight[vocabulary:] *= 100
    return LanguageModel(model, tokenizer, "fp32")


def constant_model(*probabilities: float) -> LanguageModel:
    """A model that gives every text the same next-token distribution: its layer adds nothing to equal embeddings."""
    made = language_model(0, len(probabilities), ends=False)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
        made.model.model.embed_tokens.weight.fill_(1.0)
        logits = torch.log(torch.tensor([*probabilities, *[1e3] * PADDING]))
        made.model.lm_head.weight.copy_(logits[:, None] / made.model.config.hidden_size)
    return made


# Policies of every kind


class Draw(Policy):
    """Looks at a distribution before anything is drawn from it."""

    name = "draw"
    features = ("draft_entropy",)

    def __init__(self, most):
        super().__init__()
        self.most = most

    def draw_token(self, features, state):
        return features["draft_entropy"] < self.most


class Keep(Policy):
    """Looks at the token that was drawn, and lets it be verified."""

    name = "keep"
    features = ("draft_probability",)

    def __init__(self, least):
        super().__init__()
        self.least = least

    def keep_drafting(self, features, state):
        return features["draft_probability"] > self.least


class Both(Policy):
    """Decides everywhere, from everything that earlier steps showed."""

    name = "both"
    features = ("last_accepted", "last_gamma", "last_mean_entropy", "running_acceptance", "target_margin",
                "draft_entropy", "draft_index", "draft_probability")  # fmt: skip

    def __init__(self, most=0.65):
        super().__init__()
        self.most = most

    def new_state(self, rows):
        return {"patience": np.full(rows, 2), "asked": np.zeros(rows)}

    def choose_gamma(self, features, state):
        eager = (features["running_acceptance"] > 0.6).astype(int) + (features["target_margin"] > 1.0)
        return np.clip(state["patience"] + eager - (features["last_mean_entropy"] > 0.6), 0, 4)

    def draw_token(self, features, state):
        return (features["draft_entropy"] < self.most) | (features["draft_index"] < 2)

    def keep_drafting(self, features, state):
        state["asked"] = state["asked"] + 1
        return (features["draft_probability"] > 0.4) | (state["asked"] % 3 == 0)

    def observe(self, outcome, state):
        grown = np.where(outcome.accepted == outcome.drafted, state["patience"] + 1, outcome.accepted)
        state["patience"] = np.clip(grown, 0, 3)


class Online(Policy):
    """Learns over all texts; here over the steps of one."""

    name = "online"

    def new_memory(self):
        return {"accepted": np.ones(()), "drafted": np.full((), 2.0)}

    def choose_gamma(self, features, state):
        return int(np.rint(4 * self.memory["accepted"] / self.memory["drafted"]))

    def observe(self, outcome, state):
        self.memory["accepted"] = self.memory["accepted"] + outcome.accepted.sum()
        self.memory["drafted"] = self.memory["drafted"] + outcome.drafted.sum()


FIXED = [Fixed(gamma) for gamma in range(5)]
POLICIES = [*FIXED, Draw(0.62), Keep(0.5), Both()]


def label(value):
    return value.label if isinstance(value, Policy) else value if isinstance(value, str) else type(value).__name__


# Enumeration


class Walk:
    """One way through the random choices: those that are prescribed, then the first that are possible.

    Attributes:
        weight: probability of the choices.
        turns: ways not taken, each the choices up to a turn off this one.
    """

    def __init__(self, prescribed=()):
        self.prescribed, self.taken = prescribed, []
        self.weight, self.turns = 1.0, []

    def choose(self, weights) -> int:
        weights = np.asarray(weights, dtype=np.float64)
        weights = weights / weights.sum()
        if len(self.taken) < len(self.prescribed):
            choice = self.prescribed[len(self.taken)]
        else:
            choice, *others = np.flatnonzero(weights).tolist()
            self.turns += [(*self.taken, other) for other in others]
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice


class Enumerated(Randomness):
    """In place of random numbers: row number r goes the way number r of `walks`.

    Attributes:
        noises: for each position, differences of the Gumbel noise of two tokens with their probabilities.
    """

    walks: list[Walk]
    noises: dict[int, list[tuple[float, float]]]

    def __init__(self, seeds, device):
        super().__init__(seeds, device)
        self._noise = {}

    def accepts(self, row, probabilities):
        p = probabilities.double().clamp(max=1).tolist()
        # What is decided behind the first rejection changes nothing: one outcome stands for all.
        first = self.walks[self.seeds[row]].choose([math.prod(p[:n]) * (1 - (*p, 0)[n]) for n in range(len(p) + 1)])
        return torch.arange(len(p)) < first

    def categorical(self, row, weights):
        return torch.tensor(self.walks[self.seeds[row]].choose(weights.double()))

    def gumbel(self, row, position, size):
        assert size == 2, "only the difference of two counts"
        if position not in self.noises:
            return torch.full((2,), torch.nan)  # behind the budget: beside a longer draft in another row
        key = self.seeds[row], position
        if key not in self._noise:
            values, weights = zip(*self.noises[position], strict=True)
            self._noise[key] = values[self.walks[self.seeds[row]].choose(weights)]
        return torch.tensor([0.0, self._noise[key]])


def enumerate_texts(decoder, budget, prompt=PROMPT, noises=None, batch=256, **options):
    """The probability of every text that a decoder can write, and the steps of each way to it."""
    probabilities, steps, waiting = defaultdict(float), [], [()]
    if decoder.policy.online:
        batch = 1  # what it learns in one row changes the others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "Randomness", Enumerated)
        while waiting:
            ways, waiting = waiting[:batch], waiting[batch:]
            Enumerated.walks, Enumerated.noises = [Walk(way) for way in ways], noises
            decoder.policy.forget()
            texts = decoder.generate_batch([prompt] * len(ways), budget, **options)
            for walk, text in zip(Enumerated.walks, texts, strict=True):
                probabilities[tuple(text.tokens)] += walk.weight
                steps.append(text.steps)
                waiting += walk.turns
    return dict(probabilities), steps


def warpers(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    chain = [TemperatureLogitsWarper(float(temperature))]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    return LogitsProcessorList(chain)


def next_logits(model, tokens, settings=None, processors=()):
    """Logits of the next token by a plain forward."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits = model.model(input_ids=ids, use_cache=False).logits[:, -1, : model.vocabulary_size]
        return warpers(**settings or {})(ids, LogitsProcessorList(processors)(ids, logits))[0]


def target_texts(model, budget, settings=None, prompt=PROMPT, processors=()):
    """The probability of every text that the target writes by itself."""
    texts, going = {}, {(): 1.0}
    while going:
        text, probability = going.popitem()
        p = torch.softmax(next_logits(model, [*prompt, *text], settings, processors).double(), -1)
        for token in torch.nonzero(p)[:, 0].tolist():
            ends = token in model.eos_ids or len(text) + 1 == budget
            (texts if ends else going)[(*text, token)] = probability * float(p[token])
    return texts


def difference(one, other) -> float:
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())


def noises_between(thresholds):
    """Values of a difference of Gumbel noises, one in each interval between thresholds, and the intervals' mass."""
    cuts = sorted({t for t in thresholds if math.isfinite(t)})
    mass = np.diff([0.0, *stats.logistic.cdf(cuts), 1.0])
    inside = [(a + b) / 2 for a, b in itertools.pairwise(cuts)]
    values = [cuts[0] - 1, *inside, cuts[-1] + 1] if cuts else [0.0]
    return list(zip(values, mass.tolist(), strict=True))


def noises_that_matter(models, budget, settings=None, prompt=PROMPT):
    """For each position the noises that tell apart all choices any of the models makes there, behind any text."""
    noises = {}
    for length in range(budget):
        texts = list(itertools.product(range(2), repeat=length))
        logits = [next_logits(model, [*prompt, *text], settings) for model in models for text in texts]
        noises[len(prompt) + length] = noises_between([float(a - b) for a, b in logits])
    return noises


@pytest.fixture(scope="module")
def two():
    """Target and draft with two tokens and no end."""
    return language_model(6, 2, ends=False), language_model(2, 2, ends=False)


@pytest.fixture(scope="module")
def three():
    """Target and draft with two tokens and one that ends the text."""
    return language_model(7, 3, layers=2), language_model(1, 3)


SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 2},
    "top_p": {"top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.4},
}


def test_the_models_disagree_and_all_can_happen(two, three):
    for (target, draft), least in ((two, 2), (three, 3)):
        for text in itertools.product(range(2), repeat=2):
            p, q = (torch.softmax(next_logits(model, [*PROMPT, *text]), -1) for model in (target, draft))
            assert (p - q).abs().sum() > 0.2 and p.min() > 0.02 and q.min() > 0.02
        assert len(target_texts(target, 2)) > least


# Rejection sampling


def played(steps):
    return {step.gamma for way in steps for step in way}


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=label)
def test_rejection_sampling_writes_what_the_target_writes(policy, draft, two):
    """With every gamma from 0 to 4, and policies of all kinds."""
    budget = 5
    decoder = SpeculativeDecoder(*two, policy, sampler=Rejection(draft=draft))
    found, steps = enumerate_texts(decoder, budget)
    assert difference(found, target_texts(two[0], budget)) < 1e-6
    assert len(found) == 2**budget
    if isinstance(policy, Fixed):
        assert max(played(steps)) == policy.gamma
    else:
        assert len(played(steps)) > 1


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", [Fixed(2), Draw(0.8), Keep(0.3), Both(1.0)], ids=label)
@pytest.mark.parametrize("setting", SETTINGS)
def test_rejection_sampling_with_warping_and_an_end(setting, policy, draft, three):
    settings = SETTINGS[setting]
    decoder = SpeculativeDecoder(*three, policy, sampler=Rejection(**settings, draft=draft))
    found, steps = enumerate_texts(decoder, 3)
    assert difference(found, target_texts(three[0], 3, settings)) < 1e-6
    assert any(text[-1] == 2 and len(text) < 3 for text in found), "some texts end early"
    assert any(step.accepted < step.gamma for way in steps for step in way)


def drafter_of(kind, target, draft):
    if kind == "model":
        return draft
    return PromptLookup() if kind == "look-up" else early_exit(target, 1)


@pytest.mark.parametrize(
    ("drafter", "policy", "draft"),
    [
        ("early exit", Fixed(3), "greedy"),
        ("early exit", Fixed(3), "sampled"),
        ("early exit", Both(1.0), "greedy"),
        ("early exit", Both(1.0), "sampled"),
        ("look-up", Fixed(3), "sampled"),  # it draws nothing, whatever is asked
        ("look-up", Online(), "greedy"),
    ],
    ids=label,
)
def test_rejection_sampling_with_other_drafters(drafter, policy, draft, three):
    decoder = SpeculativeDecoder(three[0], drafter_of(drafter, *three), policy, sampler=Rejection(draft=draft))
    found, steps = enumerate_texts(decoder, 4)
    assert difference(found, target_texts(three[0], 4)) < 1e-6
    assert max(played(steps)) >= 1


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
def test_rejection_sampling_with_processors(draft, three):
    """The distribution is the one that the processed logits give, position by position."""
    repetition, no_end = RepetitionPenaltyLogitsProcessor(1.5), MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [2])
    exact = target_texts(three[0], 4, {"top_k": 2}, processors=[repetition, no_end])
    assert difference(exact, target_texts(three[0], 4, {"top_k": 2})) > 0.1
    decoder = SpeculativeDecoder(*three, Fixed(2), sampler=Rejection(top_k=2, draft=draft))
    found, _ = enumerate_texts(decoder, 4, min_new_tokens=2, processors=[repetition])
    assert difference(found, exact) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        *itertools.product(["model", "early exit"], [*FIXED, Draw(0.8), Keep(0.3), Both(1.0), Online()]),
        *itertools.product(["look-up"], [*FIXED, Online()]),
    ],
    ids=label,
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_rejection_sampling_in_every_combination(setting, policy, drafter, draft, three):
    settings, budget = SETTINGS[setting], 4 if policy.online else 5
    sampler = Rejection(**settings, draft=draft)
    decoder = SpeculativeDecoder(three[0], drafter_of(drafter, *three), policy, sampler=sampler)
    found, _ = enumerate_texts(decoder, budget)
    assert difference(found, target_texts(three[0], budget, settings)) < 1e-6


# Greedy


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", [*FIXED, Draw(0.8), Keep(0.3), Both(1.0), Online()], ids=label)
def test_greedy_text_is_the_targets_whatever_is_drafted(policy, draft, three):
    target, _ = three
    expected = []
    while len(expected) < 4 and expected[-1:] != [2]:
        expected.append(int(next_logits(target, [*PROMPT, *expected]).argmax()))
    decoder = SpeculativeDecoder(*three, policy, sampler=Greedy(draft=draft))
    found, _ = enumerate_texts(decoder, 4)
    assert found.keys() == {tuple(expected)} and found[tuple(expected)] == pytest.approx(1)


# Gumbel


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", [*FIXED[:4], Draw(0.62), Keep(0.5), Both(), Online()], ids=label)
def test_gumbel_sampling_writes_what_the_target_writes(policy, draft, two):
    """Of two tokens the noise decides by its difference alone, which is logistic: intervals of it are all there is."""
    budget, settings = 2 if policy.online else 3, {"temperature": 0.7}
    noises = noises_that_matter(two, budget, settings)
    decoder = SpeculativeDecoder(*two, policy, sampler=Gumbel(**settings, draft=draft))
    found, _ = enumerate_texts(decoder, budget, noises=noises)
    assert difference(found, target_texts(two[0], budget, settings)) < 1e-6


@pytest.mark.parametrize("drafter", ["early exit", "look-up"])
@pytest.mark.parametrize("setting", ["plain", "top_p"])
def test_gumbel_sampling_with_other_drafters_and_an_end(drafter, setting):
    target = language_model(8, 2, layers=2)
    draft, settings = early_exit(target, 1), SETTINGS[setting]
    noises = noises_that_matter((target, draft), 3, settings)
    decoder = SpeculativeDecoder(
        target, drafter_of(drafter, target, draft), Fixed(2), sampler=Gumbel(**settings, draft="sampled")
    )
    found, _ = enumerate_texts(decoder, 3, noises=noises)
    assert difference(found, target_texts(target, 3, settings)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=label)
@pytest.mark.parametrize("setting", SETTINGS)
def test_gumbel_sampling_in_every_combination(setting, policy, draft, two):
    budget, settings = 4, SETTINGS[setting]
    noises = noises_that_matter(two, budget, settings)
    decoder = SpeculativeDecoder(*two, policy, sampler=Gumbel(**settings, draft=draft))
    found, _ = enumerate_texts(decoder, budget, noises=noises)
    assert difference(found, target_texts(two[0], budget, settings)) < 1e-6


def test_gumbel_text_depends_on_the_seed_alone():
    """It is plain Gumbel-max sampling of the target, one token after the other."""
    target, settings = language_model(15, 4, layers=2), {"temperature": 0.8, "top_k": 3}
    budget, seeds, texts = 8, range(40), []
    for seed in seeds:
        randomness, text = Randomness([seed], torch.device("cpu")), []
        while len(text) < budget and text[-1:] != [3]:
            log_p = torch.log_softmax(next_logits(target, [*PROMPT, *text], settings), -1)
            text.append(int((log_p + randomness.gumbel(0, len(PROMPT) + len(text), 4)).argmax()))
        texts.append(text)
    assert len({tuple(text) for text in texts}) > 20 and any(len(text) < budget for text in texts)
    for policy in [*FIXED, Draw(1.1), Keep(0.4), Both(), Online()]:
        for drafter in (language_model(5, 4), early_exit(target, 1), PromptLookup()):
            if isinstance(drafter, PromptLookup) and policy.features:
                continue
            for draft in ("greedy", "sampled"):
                decoder = SpeculativeDecoder(target, drafter, policy, sampler=Gumbel(**settings, draft=draft))
                decoded = decoder.generate_batch([PROMPT] * len(seeds), budget)
                assert [text.tokens for text in decoded] == texts, (policy, drafter, draft)
                alone = decoder.generate(PROMPT, budget, seed=seeds[7])
                assert alone.tokens == texts[7]


@pytest.mark.parametrize("sampler", [Rejection, Gumbel])
def test_a_draft_that_is_the_target_is_always_right(sampler):
    """Its probabilities are those of the target, and so is its noise, position by position."""
    target = language_model(15, 4, layers=2)
    for gamma, setting in itertools.product((1, 4), SETTINGS.values()):
        decoder = SpeculativeDecoder(target, target, Fixed(gamma), sampler=sampler(**setting, draft="sampled"))
        texts = decoder.generate_batch([PROMPT] * 40, 8)
        assert min(text.acceptance_rate for text in texts if any(step.gamma for step in text.steps)) == 1
        assert len({tuple(text.tokens) for text in texts}) > 5


def test_gumbel_noise_is_gumbel_and_new_at_every_position_and_seed():
    randomness = Randomness(range(10), torch.device("cpu"))
    noise = torch.stack([randomness.gumbel(row, position, 50) for row in range(10) for position in range(10)])
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 0.01
    assert len(noise.unique()) > 0.999 * noise.numel()
    correlations = np.corrcoef(noise.numpy())[np.triu_indices(100, 1)]
    assert np.abs(correlations).max() < 0.65 and abs(correlations.std() - 1 / math.sqrt(49)) < 0.01
    torch.testing.assert_close(randomness.gumbel(3, 4, 50), noise[34], rtol=0, atol=0)
    randomness.select([3])
    torch.testing.assert_close(randomness.gumbel(0, 4, 50), noise[34], rtol=0, atol=0)


# That the proof can fail


class Custom(Rejection):
    """Rejection sampling with another way to draw or verify."""

    def __init__(self, draws, **settings):
        super().__init__(**settings)
        self.draws = draws

    def start(self, seeds, device):
        return self.draws(self, sampling.Randomness(seeds, device))


class GreedyAsIfSampled(sampling._RejectionDraws):
    """Failure 1: the likeliest token is drafted, and verified as if it had been drawn."""

    def draw(self, logits, rows, positions):
        return logits.argmax(-1), self.sampler.warp(logits).exp()


class Unwarped(sampling._RejectionDraws):
    """Failure 2: the token is drawn from the warped distribution, and verified with the one before."""

    def draw(self, logits, rows, positions):
        tokens, _ = super().draw(logits, rows, positions)
        return tokens, logits.softmax(-1)


class WrongResidual(sampling._RejectionDraws):
    """Failure 3: a rejected token is replaced by one of another distribution than the residual."""

    def residual(self, p, q):
        raise NotImplementedError

    def verify(self, logits, tokens, gammas, probabilities, positions):
        accepted, committed = super().verify(logits, tokens, gammas, probabilities, positions)
        p = self.sampler.warp(logits).exp()
        for row, (gamma, count) in enumerate(zip(gammas, accepted.tolist(), strict=True)):
            if count < gamma:
                residual = self.residual(p[row, count], probabilities[row, count])
                committed[row, count] = self.randomness.categorical(row, residual)
        return accepted, committed


class TargetAsResidual(WrongResidual):
    def residual(self, p, q):
        return p


class SoftmaxedResidual(WrongResidual):
    def residual(self, p, q):
        return (p - q).clamp(min=0).softmax(-1)


class AlwaysAccepting(sampling._RejectionDraws):
    def verify(self, logits, tokens, gammas, probabilities, positions):
        return super().verify(logits, tokens, gammas, torch.full_like(probabilities, 1e-9), positions)


class RightAgain(WrongResidual):
    """The true residual, by the same detour."""

    def residual(self, p, q):
        return (p - q).clamp(min=0)


@pytest.mark.parametrize(
    "draws",
    [GreedyAsIfSampled, Unwarped, TargetAsResidual, SoftmaxedResidual, AlwaysAccepting],
    ids=lambda d: d.__name__,
)
def test_wrong_samplers_are_caught(draws, three):
    exact = target_texts(three[0], 3, SETTINGS["temperature"])
    for kind, wrong in ((draws, True), (RightAgain, False)):
        decoder = SpeculativeDecoder(*three, Fixed(2), sampler=Custom(kind, **SETTINGS["temperature"]))
        found, _ = enumerate_texts(decoder, 3)
        assert sum(found.values()) == pytest.approx(1)
        assert (difference(found, exact) > 0.01) == wrong


def test_one_noise_for_a_whole_block_is_caught(two):
    """The noise is keyed by position, not by step."""

    class Block(Gumbel):
        def start(self, seeds, device):
            draws = super().start(seeds, device)
            gumbel = draws.randomness.gumbel
            draws.randomness.gumbel = lambda row, position, size: gumbel(row, len(PROMPT), size)
            return draws

    exact, noises = target_texts(two[0], 3), noises_that_matter(two, 3)
    noises[len(PROMPT)] = noises_between([value for of in noises.values() for value, _ in of])
    for sampler, wrong in ((Block(draft="sampled"), True), (Gumbel(draft="sampled"), False)):
        found, _ = enumerate_texts(SpeculativeDecoder(*two, Fixed(2), sampler=sampler), 3, noises=noises)
        assert (difference(found, exact) > 0.01) == wrong


class Dropping(Policy):
    """Not a lawful policy: it has seen which token was drawn, and throws away every token 1."""

    name = "dropping"

    def draw_token(self, features, state):
        return SeenDraws.last == 0


class SeenDraws(sampling._RejectionDraws):
    last = 0

    def draw(self, logits, rows, positions):
        tokens, probabilities = super().draw(logits, rows, positions)
        SeenDraws.last = int(tokens[0])
        return tokens, probabilities


@pytest.mark.parametrize(("policy", "first"), [(Dropping(), 0.85), (Keep(0.9), 0.7), (Draw(0.1), 0.7)], ids=label)
def test_throwing_a_drawn_token_away_changes_the_distribution(policy, first):
    """Why `draw_token` must not see the token: target (.7, .3), draft (.5, .5)."""
    decoder = SpeculativeDecoder(
        constant_model(0.7, 0.3), constant_model(0.5, 0.5), policy, sampler=Custom(SeenDraws), gamma_max=1
    )
    found, _ = enumerate_texts(decoder, 2, batch=1)
    assert sum(p for text, p in found.items() if text[0] == 0) == pytest.approx(first, abs=1e-6)


# Where a residual has no mass


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_residual_without_mass_gives_a_possible_token(noise, monkeypatch):
    """The draft is the target up to rounding; by rounding, too, the token is rejected."""
    monkeypatch.setattr(Randomness, "accepts", lambda self, row, p: torch.zeros(len(p), dtype=torch.bool))
    draws = Rejection(top_k=3).start(range(200), torch.device("cpu"))
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).repeat(200, 2, 1)
    q = draws.sampler.warp(
        logits[:, :1] + noise * torch.randn(200, 1, 5, generator=torch.Generator().manual_seed(1))
    ).exp()
    accepted, committed = draws.verify(logits, torch.zeros(200, 1, dtype=torch.long), [1] * 200, q, [0] * 200)
    assert not accepted.any() and set(committed[:, 0].tolist()) <= {0, 1, 2}
    if not noise:
        assert set(committed[:, 0].tolist()) == {0, 1, 2}


def test_a_certain_target_accepts_its_token():
    """All of p on the drafted token: nothing is left for a residual, and nothing is rejected."""
    draws = Rejection().start(range(50), torch.device("cpu"))
    logits = torch.tensor([0.0, -torch.inf, -torch.inf]).repeat(50, 3, 1)
    for q in (None, torch.tensor([0.2, 0.4, 0.4]).repeat(50, 2, 1)):
        accepted, committed = draws.verify(logits, torch.zeros(50, 2, dtype=torch.long), [2] * 50, q, [0] * 50)
        assert (accepted == 2).all() and not committed.any()


def test_an_impossible_drafted_token_is_rejected():
    draws = Rejection().start(range(50), torch.device("cpu"))
    logits = torch.tensor([-torch.inf, 0.0, 0.0]).repeat(50, 2, 1)
    for q in (None, torch.tensor([0.2, 0.4, 0.4]).repeat(50, 1, 1)):
        accepted, committed = draws.verify(logits, torch.zeros(50, 1, dtype=torch.long), [1] * 50, q, [0] * 50)
        assert not accepted.any() and (committed[:, 0] > 0).all()


# With real random numbers


def p_value(counts: Counter, exact: dict) -> float:
    """Of a chi-square test; texts that are hardly ever expected count as one."""
    total = sum(counts.values())
    assert counts.keys() <= exact.keys(), "a text that the target cannot write"
    rare = [text for text, p in exact.items() if p * total < 5]
    cells = [(counts[text], p * total) for text, p in exact.items() if text not in rare]
    if rare:
        cells.append((sum(counts[text] for text in rare), sum(exact[text] for text in rare) * total))
    observed, expected = map(np.array, zip(*cells, strict=True))
    assert len(cells) > 4
    return float(stats.chisquare(observed, expected * (total / expected.sum())).pvalue)


def sample(decoder, prompt, budget, texts, batch=500):
    counts = Counter()
    for seed in range(0, texts, batch):
        counts.update(tuple(text.tokens) for text in decoder.generate_batch([prompt] * batch, budget, seed=seed))
    return counts


@pytest.mark.parametrize("sampler", [Rejection, Gumbel])
@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("policy", [Fixed(2), Both()], ids=label)
def test_chi_square_of_many_texts(policy, draft, sampler):
    target, settings = language_model(15, 4, layers=2), {"temperature": 0.8, "top_k": 3}
    exact = target_texts(target, 3, settings)
    decoder = SpeculativeDecoder(target, early_exit(target, 1), policy, sampler=sampler(**settings, draft=draft))
    counts = sample(decoder, PROMPT, 3, texts=1500)
    assert p_value(counts, exact) > 1e-3
    # It has the power to tell this from another temperature.
    assert p_value(counts, target_texts(target, 3, {"temperature": 2.0, "top_k": 3})) < 1e-3


@pytest.fixture(scope="module")
def real():
    """A real model in float32, and its first layers as a draft."""
    if not (folder := os.environ.get("SPECKV_MODELS")):
        pytest.skip("SPECKV_MODELS is not set: name a folder with smollm2-135m in it")
    target = LanguageModel.load(f"{folder}/smollm2-135m", "fp32")
    return target, early_exit(target, 26)


@pytest.mark.real_model
@pytest.mark.parametrize("sampler", [Rejection, Gumbel])
def test_chi_square_of_a_real_models_texts(sampler, real):
    target, draft = real
    prompt, settings, texts = target.tokenizer("The weather today is")["input_ids"], {"top_k": 3}, 600
    decoder = SpeculativeDecoder(target, draft, Fixed(2), sampler=sampler(**settings))
    decoded = decoder.generate_batch([prompt] * texts, 3, seed=1)
    accepted, drafted = (sum(getattr(text.steps[0], name) for text in decoded) for name in ("accepted", "gamma"))
    assert 0.1 < accepted / drafted < 0.9
    counts = Counter(tuple(text.tokens) for text in decoded)
    assert p_value(counts, target_texts(target, 3, settings, prompt)) > 1e-3
    assert p_value(counts, target_texts(target, 3, settings | {"temperature": 2.5}, prompt)) < 1e-3
