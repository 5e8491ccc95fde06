"""Live decoding, replay and the target's own greedy text are one and the same (rules R2 and R3)."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from speckv.errors import SpecKVError
from speckv.live import decoding
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import LanguageModel, chat_tokens
from speckv.live.recorder import record
from speckv.plugins import registry
from speckv.policy import Clairvoyant, Policy
from speckv.prompts import Prompt
from speckv.replaying import replay
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, TraceDataset
from tests.live import Both, Draw, Fixed, Ids, Keep, Running, Stateful, TargetEntropy, Unlimited, decoding_of
from tests.zoo import quick

BUDGET, GAMMA_MAX = 48, 8


FIXED = [Fixed(gamma) for gamma in (0, 1, 2, 3, 4, 5, 8)]
OWN = [*FIXED, Stateful(), Running(), TargetEntropy(), Draw(), Keep(), Both(), Ids(), Unlimited()]
ZOO = [name for name, entry in registry().policies.items() if not issubclass(entry.value, Clairvoyant)]
#: One of each kind; the others take their time.
QUICK = ("fixed", "heuristic", "mlp", "confidence", "p-min", "hazard", "token-hazard", "ucb1", "tapout")


@pytest.fixture(scope="module")
def greedy_text(small_pair, small_prompts):
    """What transformers' own greedy decoding of the target says to every fourth prompt: (its id, token ids)."""
    texts = []
    for prompt in small_prompts[::4]:
        ids = torch.tensor([chat_tokens(small_pair.target.tokenizer, prompt.text)])
        # transformers would also choose among the padding rows of the embedding.
        padding = list(range(small_pair.target.vocabulary_size, small_pair.target.model.config.vocab_size))
        out = small_pair.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=BUDGET, do_sample=False, suppress_tokens=padding
        )
        texts.append((prompt.id, out[0, ids.shape[1] :].tolist()))
    assert any(text[-1] in small_pair.target.eos_ids for _, text in texts)
    return texts


def with_seconds(policy, seconds):
    """A copy of the policy that is told, step by step, that the step took as long as this."""
    policy, clock = copy.deepcopy(policy), iter(seconds)

    def observe(outcome, state):
        type(policy).observe(policy, dataclasses.replace(outcome, seconds=np.array([next(clock)])), state)

    policy.observe = observe
    return policy


def assert_live_is_replay(policy, pair, traces, costs, prompts, greedy_text):
    """Decode and replay these prompts; compare all steps and texts. Returns the replay.

    A policy that learns while it runs decodes all of them in the order of the replay; others only those of which the
    greedy text is known.
    """
    texts, prompts = dict(greedy_text), {prompt.id: prompt for prompt in prompts}
    rows = [row for row, identifier in enumerate(traces.ids) if policy.online or identifier in texts]
    before = copy.deepcopy(policy)
    replayed = replay(policy, traces, costs)
    seconds = replayed.seconds[np.isin(replayed.sequence, rows)]
    live = SpeculativeDecoder(*pair, with_seconds(before, seconds), gamma_max=traces.gamma_max, costs=costs)
    for row in rows:
        identifier = traces.ids[row]
        decoded = live.generate(chat_tokens(pair.target.tokenizer, prompts[identifier].text), BUDGET)
        recorded = traces.tokens[row, : traces.lengths[row]].tolist()
        assert decoded.tokens == recorded == texts.get(identifier, recorded)
        steps = replayed.sequence == row
        columns = (replayed.position, replayed.gamma, replayed.accepted, replayed.forwards)
        expected = list(zip(*(column[steps].tolist() for column in columns), strict=True))
        assert [(step.position, step.gamma, step.accepted, step.forwards) for step in decoded.steps] == expected
    return replayed


@pytest.mark.parametrize("policy", OWN, ids=repr)
def test_live_is_replay(policy, small_pair, small_traces, small_costs, small_prompts, greedy_text):
    replayed = assert_live_is_replay(policy, small_pair, small_traces, small_costs, small_prompts, greedy_text)
    if not isinstance(policy, Fixed | Unlimited):
        assert len(np.unique(replayed.gamma)) > 2, "a policy that always does the same tests little"


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_live_is_replay_for_the_zoo(name, small_pair, small_traces, small_costs, small_prompts, greedy_text):
    policy = quick(name).fit(small_traces, small_costs, seed=0)
    assert_live_is_replay(policy, small_pair, small_traces, small_costs, small_prompts, greedy_text)


def test_there_is_a_zoo():
    assert set(QUICK) < set(ZOO), "the tests over the zoo must not pass by being empty"


@pytest.mark.parametrize("policy", [Fixed(3), Stateful(), Draw(), Both()], ids=repr)
def test_caches_and_lags(policy, small_pair, small_prompts):
    """Between steps the target has seen all but the last token, and the draft's lag is what a replay says it is."""
    for prompt in small_prompts[:4]:
        tokens = chat_tokens(small_pair.target.tokenizer, prompt.text)
        decoding = decoding_of(SpeculativeDecoder(*small_pair, policy, gamma_max=GAMMA_MAX), tokens, budget=BUDGET)
        (sequence,) = decoding.sequences
        target, draft = decoding.target, decoding.drafting.cached
        lag, old = 1, len(tokens)
        assert target.lengths == draft.lengths == [old - 1]
        while decoding.going:
            decoding.step()
            step = sequence.steps[-1]
            assert step.lag == (lag if step.forwards else 0)
            assert target.lengths == [old + step.accepted]
            assert draft.lengths == [old + min(step.accepted, step.forwards - 1) if step.forwards else old - lag]
            for cached in (target, draft):
                assert [cached.cache.get_seq_length()] == cached.lengths
            lag = step.accepted + 1 - min(step.accepted, step.forwards - 1) if step.forwards else lag + 1
            old = len(sequence.context)


@pytest.mark.parametrize("gamma", range(1, GAMMA_MAX + 1))
def test_own_draft_is_always_accepted(gamma, small_pair, small_prompts):
    pair = small_pair._replace(draft=small_pair.target)
    decoded = SpeculativeDecoder(*pair, Fixed(gamma), gamma_max=GAMMA_MAX).generate(
        chat_tokens(pair.target.tokenizer, small_prompts[0].text), 30
    )
    assert all(step.accepted == step.gamma for step in decoded.steps)
    assert all(step.gamma == gamma for step in decoded.steps[:-1])


@pytest.mark.parametrize("budget", range(1, 11))
def test_budget_is_exact(budget, small_pair, small_prompts, small_traces):
    longest = small_traces.ids[small_traces.lengths.argmax()]
    prompt = next(prompt for prompt in small_prompts if prompt.id == longest)
    for policy in (Fixed(4), Draw(), Both()):
        decoded = SpeculativeDecoder(*small_pair, policy).generate(
            chat_tokens(small_pair.target.tokenizer, prompt.text), budget
        )
        assert len(decoded.tokens) == budget
        assert sum(step.accepted + 1 for step in decoded.steps) == budget
        assert sum(step.committed for step in decoded.steps) == budget


def test_gamma_max_holds(small_pair, small_prompts):
    tokens = chat_tokens(small_pair.target.tokenizer, small_prompts[0].text)
    for policy in (Fixed(100), Unlimited()):
        steps = SpeculativeDecoder(*small_pair, policy, gamma_max=3).generate(tokens, 20).steps
        assert max(step.gamma for step in steps) == 3
    assert all(
        step.gamma == 0 for step in SpeculativeDecoder(*small_pair, Fixed(5), gamma_max=0).generate(tokens, 5).steps
    )


def test_time_adds_up(small_pair, small_prompts):
    tokens = chat_tokens(small_pair.target.tokenizer, small_prompts[0].text)
    decoded = SpeculativeDecoder(*small_pair, Both()).generate(tokens, 20)
    assert decoded.prefill_seconds > 0
    assert sum(step.seconds for step in decoded.steps) <= decoded.seconds
    for step in decoded.steps:
        assert 0 < step.draft_seconds + step.verify_seconds + step.controller_seconds <= step.seconds


@pytest.mark.parametrize("policy", [Fixed(3), Keep()], ids=repr)
def test_signals_cost_nothing_unless_asked_for(policy, small_pair, small_prompts, monkeypatch):
    """A policy pays for the signals that it reads, and for no others."""
    calls = {"draft": 0, "target": 0}

    def counting(name, function):
        def counted(*arguments):
            calls[name] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(decoding, "drawn_signals", counting("draft", decoding.drawn_signals))
    monkeypatch.setattr(decoding, "target_signals", counting("target", decoding.target_signals))
    tokens = chat_tokens(small_pair.target.tokenizer, small_prompts[0].text)
    steps = SpeculativeDecoder(*small_pair, policy).generate(tokens, 20).steps
    expected = sum(step.forwards for step in steps) if isinstance(policy, Keep) else 0
    assert calls == {"draft": expected, "target": 0}


def test_recorder_batches_are_single_sequences(small_pair, small_prompts, tmp_path):
    manifest = Manifest(GAMMA_MAX, BUDGET, {})
    datasets = {size: TraceDataset.create(tmp_path / str(size), manifest) for size in (1, 5)}
    rollouts = {
        size: {rollout.id: rollout for rollout in record(small_pair, small_prompts, dataset, batch_size=size)}
        for size, dataset in datasets.items()
    }
    for identifier, single in rollouts[1].items():
        batched = rollouts[5][identifier]
        for name in ("prompt_tokens", "tokens", "draft_tokens", "off_lengths", "off_tokens"):
            np.testing.assert_array_equal(getattr(single, name), getattr(batched, name))
        assert single.ended == batched.ended
        for name in DRAFT_SIGNALS | TARGET_SIGNALS:
            np.testing.assert_allclose(single.signals[name], batched.signals[name], atol=1e-4)
        for name in DRAFT_SIGNALS:
            np.testing.assert_allclose(single.off_signals[name], batched.off_signals[name], atol=1e-4)


class Knowing(Clairvoyant):
    name = "knowing"


class Costly(Fixed):
    name = "costly"
    features = ("cost_ratio",)


class Nonsense(Policy):
    name = "nonsense"

    def choose_gamma(self, features, state):
        return 2.5


@pytest.mark.parametrize(
    ("policy", "prompt", "budget", "message"),
    [
        (Knowing(), [1], 5, "knowing"),
        (Costly(2), [1], 5, "cost_ratio"),
        (Fixed(2), [], 5, "prompt is empty"),
        (Fixed(2), [1], 0, "max_new_tokens is 0"),
        (Nonsense(), [1], 5, "nonsense.choose_gamma must return integers"),
    ],
)
def test_refused(policy, prompt, budget, message, small_pair):
    with pytest.raises(SpecKVError, match=message):
        SpeculativeDecoder(*small_pair, policy).generate(prompt, budget)


def test_one_token_prompt(small_pair):
    """There is nothing to prefill in front of the only token."""
    plain = SpeculativeDecoder(*small_pair, Fixed(0)).generate([65], 10)
    assert SpeculativeDecoder(*small_pair, Both()).generate([65], 10).tokens == plain.tokens


@pytest.mark.parametrize(("which", "policy"), [("target", Fixed(0)), ("draft", Fixed(3)), ("draft", Keep())], ids=repr)
def test_nan_logits_are_refused(which, policy, small_pair, small_prompts):
    """One line says of which model they are, and behind how many tokens of the text."""
    prompt = chat_tokens(small_pair.target.tokenizer, small_prompts[0].text)
    text = SpeculativeDecoder(*small_pair, Fixed(0)).generate(prompt, 20).tokens
    at = next(at for at, token in enumerate(text) if at > 4 and token not in prompt + text[:at])
    broken = copy.deepcopy(small_pair.target.model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[text[at]] = float("nan")
    pair = small_pair._replace(draft=small_pair.target)
    pair = pair._replace(**{which: LanguageModel(broken, small_pair.target.tokenizer)})
    with pytest.raises(SpecKVError, match=f"of the {which} hold NaN behind {at + 1} tokens of the text") as caught:
        SpeculativeDecoder(*pair, policy).generate(prompt, 20)
    assert "\n" not in str(caught.value)


def test_prompt_of_recording_and_decoder_are_the_same(small_pair):
    prompt = Prompt("x", "chat", "Hi")
    tokenizer = small_pair.target.tokenizer
    assert chat_tokens(tokenizer, prompt.text) == [tokenizer.get_vocab()[character] for character in "Hi"]
