"""Where drafted tokens come from, what is refused, and that drafting does not make the host wait (rule R7)."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from speckv.errors import SpecKVError
from speckv.features import FEATURES, signal_of
from speckv.live import decoding as live
from speckv.live.caching import CachedModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.drafting import ModelDrafter, PromptLookup
from speckv.live.models import LanguageModel, early_exit
from speckv.live.sampling import Greedy, Gumbel, Rejection
from speckv.policy import Policy
from speckv.testing.pairs import END, byte_tokenizer, tiny_model
from tests.live import SAMPLERS, Both, Draw, Drawn, Fixed, Keep, Running, decoding_of, pair_with, plain_text

BUDGET = 20
PROMPT = list(b"Solve 3x + 4 = 19")
REPEATING = list(b"to be or not to be, to be or")


# Prompt look-up


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    limit=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
)
def test_look_up_finds_the_latest_of_the_longest(tokens, limit, sizes):
    shortest, longest = sizes
    expected = []
    for size in range(shortest, longest + 1):  # the longest that is found wins
        places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[-size:]]
        if places:
            expected = tokens[places[-1] + size :][:limit]
    assert PromptLookup(longest, shortest).find(tokens, limit) == expected


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (3, 0), (0, 0)])
def test_look_up_sizes_are_checked(longest, shortest):
    with pytest.raises(SpecKVError, match=f"longest is {longest} and shortest {shortest}"):
        PromptLookup(longest, shortest)


@pytest.mark.parametrize("prompt", [PROMPT, REPEATING, [65], [*REPEATING, END, *b"to be or"]], ids=len)
@pytest.mark.parametrize("sampler", [Greedy(), Gumbel(temperature=0.7)], ids=["greedy", "gumbel"])
def test_look_up_changes_no_text(prompt, sampler):
    """Also where what it finds holds an end token."""
    target = pair_with("full").target
    expected = plain_text(target, prompt, BUDGET, sampler)
    for policy in (Fixed(5), Drawn([2, 0, 7]), Running()):
        decoder = SpeculativeDecoder(target, PromptLookup(), policy, sampler=sampler, gamma_max=8)
        decoded = decoder.generate(prompt, BUDGET)
        assert decoded.tokens == expected
        for step in decoded.steps:
            assert step.forwards == step.lag == 0
            assert step.gamma <= len(PromptLookup().find(prompt + expected[: step.position], 8))


def test_look_up_by_rejection_is_a_point_mass():
    """A prompt that names every pair of tokens is drafted from at every step, and some of it is accepted."""
    target = pair_with("full").target
    text = plain_text(target, PROMPT, BUDGET)
    decoder = SpeculativeDecoder(target, PromptLookup(), Fixed(4), sampler=Rejection(temperature=0.05))
    decoded = decoder.generate([*PROMPT, *text, *PROMPT], BUDGET)
    assert all(0 <= step.accepted <= step.gamma for step in decoded.steps)
    assert sum(step.gamma for step in decoded.steps) > 0


# Early exit


@pytest.fixture(scope="module")
def three_layers():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model(seed=3, num_hidden_layers=3, layer_types=types, use_sliding_window=True, sliding_window=10)
    return LanguageModel(model, byte_tokenizer())


@pytest.mark.parametrize("layers", [1, 2])
def test_early_exit_is_the_first_layers_and_the_head(layers, three_layers):
    draft = early_exit(three_layers, layers)
    types = three_layers.model.config.layer_types[:layers]
    alone = tiny_model(4, num_hidden_layers=layers, layer_types=types, use_sliding_window=True, sliding_window=10)
    weights = three_layers.model.state_dict()
    alone.load_state_dict({name: weights[name] for name in alone.state_dict()})
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(draft.model(tokens).logits, alone(tokens).logits)
    for policy in (Fixed(4), Both()):
        decoded = SpeculativeDecoder(three_layers, draft, policy).generate(PROMPT, BUDGET)
        reference = SpeculativeDecoder(three_layers, LanguageModel(alone, byte_tokenizer()), policy)
        assert decoded.tokens == plain_text(three_layers, PROMPT, BUDGET)
        expected = reference.generate(PROMPT, BUDGET).steps
        assert [(s.gamma, s.accepted) for s in decoded.steps] == [(s.gamma, s.accepted) for s in expected]


def test_early_exit_shares_its_weights(three_layers):
    draft = early_exit(three_layers, 2)
    whole = dict(three_layers.model.named_parameters())
    shared = dict(draft.model.named_parameters())
    assert 0 < len(shared) < len(whole)
    assert all(parameter.data_ptr() == whole[name].data_ptr() for name, parameter in shared.items())
    assert len(three_layers.model.model.layers) == three_layers.model.config.num_hidden_layers == 3


@pytest.mark.parametrize("layers", [-1, 0, 3, 4])
def test_early_exit_out_of_range_is_refused(layers, three_layers):
    with pytest.raises(SpecKVError, match="qwen2 has 3 layers; exit early after 1 to 2"):
        early_exit(three_layers, layers)


def test_early_exit_of_unknown_layers_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=END + 1, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=END)
    with pytest.raises(SpecKVError, match="gpt2: its layers cannot be run apart"):
        early_exit(LanguageModel(GPT2LMHeadModel(config), byte_tokenizer()), 1)


# Policies and drafters that fit together


@pytest.mark.parametrize("feature", [name for name in FEATURES if signal_of(name)])
def test_look_up_refuses_policies_that_read_the_draft(feature):
    class Reading(Policy):
        name = "reading"
        features = (feature,)

        def choose_gamma(self, features, state):
            return 2

    with pytest.raises(SpecKVError, match=f"'reading' reads the feature '{feature}', which PromptLookup cannot give"):
        SpeculativeDecoder(pair_with("full").target, PromptLookup(), Reading())


class Every(Policy):
    """Reads all that there is without a draft's distribution."""

    name = "every"
    features = tuple(name for name in FEATURES if not signal_of(name) and name not in ("cost_ratio",))

    def choose_gamma(self, features, state):
        assert all(np.isfinite(features[name]).all() for name in self.features if FEATURES[name].when == "before")
        return 3

    def draw_token(self, features, state):
        return features["draft_index"] < 3

    def keep_drafting(self, features, state):
        return features["position"] % 2 == 0


@pytest.mark.parametrize("policy", [Every(), Running(), Fixed(3)], ids=repr)
def test_other_policies_run_on_every_drafter(policy):
    pair = pair_with("full")
    for drafter in (pair.draft, ModelDrafter(early_exit(pair.target, 1)), PromptLookup()):
        decoded = SpeculativeDecoder(pair.target, drafter, policy).generate(REPEATING, BUDGET)
        assert decoded.tokens == plain_text(pair.target, REPEATING, BUDGET)
        assert any(step.gamma for step in decoded.steps)


# Vocabularies


def named(model, name):
    model.config.name_or_path = model.name_or_path = name
    return model


def test_different_tokenizers_are_refused():
    target = LanguageModel(named(tiny_model(1), "org/one"), byte_tokenizer())
    draft = LanguageModel(named(tiny_model(1), "org/other"), byte_tokenizer(end="<|stop|>"))
    with pytest.raises(SpecKVError, match="tokenizers of org/one and org/other differ"):
        SpeculativeDecoder(target, draft, Fixed(2))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: f"{type(sampler).__name__}-{sampler.draft}")
def test_padding_of_the_vocabulary_is_never_chosen(sampler):
    """Embeddings are padded differently, and the padding would win every time."""
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        draft.resize_token_embeddings(END + 64, mean_resizing=False)
        for model in (target, draft):
            row = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 1e4
            model.lm_head.weight[END + 1 :: 2] = row
            model.lm_head.weight[END + 2 :: 2] = -row
        logits = [model(torch.tensor([PROMPT])).logits[0, -1] for model in (target, draft)]
    assert len(logits[0]) < len(logits[1]) and all(part.argmax() > END for part in logits)
    pair = [LanguageModel(model, byte_tokenizer()) for model in (target, draft)]
    decoder = SpeculativeDecoder(*pair, Keep(), sampler=sampler)
    decoded = decoder.generate(PROMPT, BUDGET, log_probabilities=True)
    assert max(decoded.tokens) <= END
    if isinstance(sampler, Greedy) or sampler.draft == "sampled":
        assert decoded.acceptance_rate == 1, "the models are the same but for their padding"
    if isinstance(sampler, Greedy):
        assert decoded.tokens == plain_text(pair_with("full").target, PROMPT, BUDGET)
        assert min(decoded.log_probabilities) > -7, "padding has no share in the probabilities"


# What the host waits for


class Waiting(TorchDispatchMode):
    """Notes what copies numbers from the device to the host, and from the host to the device, outside of `_read`.

    On a CPU nothing has to be waited for; on a device each of these would.
    """

    FROM_DEVICE = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2")
    METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__", "nonzero")

    def __init__(self, monkeypatch):
        super().__init__()
        self.events = []
        self._reading = False
        for name in self.METHODS:
            monkeypatch.setattr(torch.Tensor, name, self._noted(name, getattr(torch.Tensor, name)))
        read = live._read

        def reading(tensors):
            self._note("read")
            self._reading = True
            found = read(tensors)
            self._reading = False
            return found

        monkeypatch.setattr(live, "_read", reading)

    def watch(self, decoding):
        """Note when a decoding's draft forwards are launched, and when all of them are."""
        following, drafting = decoding.drafting.next, decoding._draft

        def forward(*arguments):
            answer = following(*arguments)
            self._note("forward")
            return answer

        def draft(clock):
            found = drafting(clock)
            self._note("drafted")
            return found

        decoding.drafting.next, decoding._draft = forward, draft

    def _note(self, event):
        if not self._reading:
            self.events.append(event)

    def _noted(self, name, method):
        def noted(tensor, *arguments, **options):
            self._note(name)
            return method(tensor, *arguments, **options)

        return noted

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if name in self.FROM_DEVICE:
            self._note(name)
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in arguments[1]):
            self._note("index by a mask")
        if name == "lift_fresh":
            self._note("torch.tensor")
        return function(*arguments, **options or {})


def steps_watched(monkeypatch, policy, sampler, looks_inside=None, record_signals=False):
    """Each step of a decode with what the host waited for in it."""
    decoder = SpeculativeDecoder(
        *pair_with("full"), policy, sampler=sampler, gamma_max=8, record_signals=record_signals
    )
    decoding = decoding_of(decoder, PROMPT, budget=BUDGET, log_probabilities=True)
    if looks_inside is not None:
        decoding.looks_inside = looks_inside
    with monkeypatch.context() as patch:
        waiting = Waiting(patch)
        waiting.watch(decoding)
        with waiting:
            while decoding.going:
                start = len(waiting.events)
                decoding.step()
                waiting.events[start:] = [waiting.events[start:]]
    return list(zip(decoding.sequences[0].steps, waiting.events, strict=True))


class Signals(Fixed):
    """Decides before the step by what the last one showed."""

    name = "signals"
    features = ("last_mean_entropy", "target_margin", "running_acceptance")


@pytest.mark.parametrize("policy", [Fixed(4), Drawn([3, 0, 5]), Signals(3)], ids=repr)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: f"{type(sampler).__name__}-{sampler.draft}")
@pytest.mark.parametrize("record_signals", [False, True])
def test_policies_that_decide_before_the_step_wait_once(policy, sampler, record_signals, monkeypatch):
    """For what was committed: a step of such a policy reads from the device when all forwards are under way."""
    watched = steps_watched(monkeypatch, policy, sampler, looks_inside=False, record_signals=record_signals)
    assert any(step.forwards > 2 for step, _ in watched)
    for step, events in watched:
        of_draft = events[: events.index("drafted")]
        behind_first = of_draft[of_draft.index("forward") :] if step.forwards else of_draft
        assert set(behind_first) <= {"forward"} and behind_first.count("forward") >= step.gamma
        assert [event for event in events if event not in ("forward", "drafted", "torch.tensor")] == ["read"]


@pytest.mark.parametrize("policy", [Draw(), Keep(), Both()], ids=repr)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: f"{type(sampler).__name__}-{sampler.draft}")
def test_policies_that_look_inside_wait_once_a_token(policy, sampler, monkeypatch):
    for step, events in steps_watched(monkeypatch, policy, sampler):
        waits = [event for event in events if event not in ("forward", "drafted", "torch.tensor")]
        assert waits == ["read"] * (step.forwards + 1)


def likelier_end(ids, scores):
    return scores + 9.0 * (torch.arange(END + 1) == END)


def counting(ids, scores):
    """Makes a model say the next number, and nothing behind it but an end token."""
    return scores + 1e4 * (torch.arange(END + 1) == ids[0, -1] + 1)


def stepped_to_the_end(decoder, prompts, looks_inside, **options):
    decoding = decoding_of(decoder, *prompts, budget=BUDGET, **options)
    decoding.looks_inside = looks_inside
    while decoding.going:
        decoding.step()
    return decoding.sequences


@pytest.mark.parametrize("drafter", ["model", "look-up"])
@pytest.mark.parametrize("sampler", [Greedy(), Greedy("sampled"), Gumbel(), Gumbel(draft="greedy")],
                         ids=lambda sampler: f"{type(sampler).__name__}-{sampler.draft}")  # fmt: skip
def test_what_no_one_looks_at_changes_nothing(drafter, sampler):
    """A draft that does not see its end token goes on behind it, and is cut to what it would have been."""
    pair = pair_with("full")
    if drafter == "model":
        draft, processor, policies = pair.draft, likelier_end, (Fixed(6), Signals(4))
        prompts = [PROMPT, [65], *(list(b"%d is" % number) for number in range(12))]
    else:
        draft, processor, policies = PromptLookup(), counting, (Fixed(8), Fixed(3))
        prompts = [[*range(first, END + 1), 3, first] for first in range(245, 256)]
    facts = ("position", "gamma", "accepted", "committed", "batch_size", "lag")
    ended = cut = 0
    for policy in policies:
        decoder = SpeculativeDecoder(pair.target, draft, policy, sampler=sampler, gamma_max=8)
        looking, blind = (
            stepped_to_the_end(decoder, prompts, looks_inside, seed=5, processors=[processor])
            for looks_inside in (True, False)
        )
        for one, other in zip(looking, blind, strict=True):
            assert (one.context, one.finish_reason) == (other.context, other.finish_reason)
            if isinstance(sampler, Greedy) and sampler.draft == "sampled":
                continue  # its later drafts differ: behind the end token more random numbers are drawn
            assert one.drafted == other.drafted
            for step, unseen in zip(one.steps, other.steps, strict=True):
                assert [getattr(step, name) for name in facts] == [getattr(unseen, name) for name in facts]
                cut += unseen.forwards > step.forwards
            ended += one.finish_reason == "eos" and one.drafted[-1]
    if sampler.draft == "greedy" or isinstance(sampler, Gumbel):
        assert ended, "no text ended with a drafted token"
        assert cut or drafter == "look-up", "no draft went on behind an end token"


def test_rejection_without_a_drafted_end_is_the_same_unseen():
    """Behind a drafted end token more random numbers are drawn; up to there nothing differs."""
    decoder = SpeculativeDecoder(*pair_with("full"), Fixed(4), sampler=Rejection(temperature=0.7), gamma_max=4)
    prompts = [list(b"%d is" % number) for number in range(8)]
    looking, blind = (stepped_to_the_end(decoder, prompts, looks_inside) for looks_inside in (True, False))
    compared = 0
    for one, other in zip(looking, blind, strict=True):
        for step, unseen in zip(one.steps, other.steps, strict=False):
            if step.gamma < min(4, BUDGET - 1 - step.position):
                break
            assert (step.position, step.gamma, step.accepted) == (unseen.position, unseen.gamma, unseen.accepted)
            compared += 1
    assert compared > 20


def test_different_tokenizers_are_refused_in_a_drafter_too():
    target, draft = pair_with("full")
    other = LanguageModel(draft.model, byte_tokenizer(end="<|other|>"))
    with pytest.raises(SpecKVError, match=r"tokenizers of .* differ"):
        SpeculativeDecoder(target, ModelDrafter(other), Fixed(1))


def test_ids_without_a_token_are_never_chosen():
    """A tokenizer with a hole in its ids: what lies in it is as impossible as padding behind the last."""
    target, _ = pair_with("full")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|far|>"])
    vocabulary = tokenizer.get_vocab()
    hole = vocabulary["<|far|>"]
    tokenizer.get_vocab = lambda: {**vocabulary, "<|far|>": hole + 2}
    model = LanguageModel(target.model, tokenizer)
    assert model.vocabulary_size == hole + 3 and model.impossible_ids == [hole, hole + 1]
    cached = CachedModel(model)
    logits = cached.forward(torch.tensor([[65, 66]]))
    assert logits.shape[-1] == hole + 3
    assert logits[..., hole : hole + 2].isneginf().all() and logits[..., :hole].isfinite().all()


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([65, 100_000], 4, "the prompt holds ids beyond those of"),
        ([-1], 4, "the prompt holds ids beyond those of"),
        ([65] * 1000, 100, "are more than the .* positions"),
        ([65], 2.5, "max_new_tokens is 2.5; it must be a whole number"),
    ],
)
def test_what_the_model_would_take_for_an_index_out_of_range(prompt, budget, message):
    with pytest.raises(SpecKVError, match=message):
        SpeculativeDecoder(*pair_with("full"), Fixed(1)).generate(prompt, budget)


def test_a_misspelt_option_is_refused():
    with pytest.raises(SpecKVError, match="option 'max_tokens' is unknown"):
        SpeculativeDecoder(*pair_with("full"), Fixed(1)).generate([65], 4, max_tokens=3)


def test_a_model_with_a_forward_of_its_own_has_no_early_exit():
    target, _ = pair_with("full")
    hooked = copy.copy(target.model)
    hooked.forward = target.model.forward
    with pytest.raises(SpecKVError, match="no early exit"):
        early_exit(LanguageModel(hooked, target.tokenizer), 1)
