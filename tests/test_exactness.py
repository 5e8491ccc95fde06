"""Live decoding, replay and the target's own greedy text are one and the same (rules R2 and R3)."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from speckv.errors import SpecKVError
from speckv.live import decoder
from speckv.live.decoder import SpeculativeDecoder, _Decoding
from speckv.live.models import chat_tokens
from speckv.live.recorder import record
from speckv.plugins import registry
from speckv.policy import Clairvoyant, Policy
from speckv.prompts import Prompt
from speckv.replaying import replay
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, TraceDataset

BUDGET, GAMMA_MAX = 48, 8


class Fixed(Policy):
    name = "fixed"

    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features, state):
        return self.gamma


class Stateful(Policy):
    """Grows after a full acceptance, shrinks after a rejection, and remembers how surprised the draft was."""

    name = "stateful"
    features = ("last_gamma", "last_accepted", "last_mean_entropy", "last_max_entropy", "last_mean_top1",
                "last_min_top1", "is_first")  # fmt: skip

    def new_state(self, rows):
        return {"gamma": np.full(rows, 3), "drafted": np.zeros(rows)}

    def choose_gamma(self, features, state):
        unsure = (features["last_max_entropy"] > 1.5) | (features["last_min_top1"] < 0.3)
        sure = (features["last_mean_top1"] > 0.8) & (features["last_mean_entropy"] < 0.6)
        # It pauses after every ninth drafted token or so, so that the draft falls behind.
        pause = (state["drafted"] % 9 == 8) & (features["last_gamma"] > 0)
        gamma = state["gamma"] + sure - unsure + (features["last_accepted"] > 4) + (features["is_first"] > 0)
        return np.where(pause, 0, np.clip(gamma, 0, 20)).astype(np.int64)

    def observe(self, outcome, state):
        grown = np.where(outcome.accepted == outcome.drafted, state["gamma"] + 2, outcome.accepted)
        state["gamma"] = np.clip(grown, 1, 7)
        state["drafted"] = state["drafted"] + outcome.drafted


class Running(Policy):
    name = "running"
    features = ("running_acceptance", "position", "context_length")

    def choose_gamma(self, features, state):
        return (features["running_acceptance"] * 9 + (features["context_length"] - features["position"]) % 2).astype(
            int
        )


class TargetEntropy(Policy):
    name = "target-entropy"
    features = ("target_entropy", "target_margin", "compression", "cost_ratio")

    def choose_gamma(self, features, state):
        sure = (features["target_entropy"] < 0.8) & (features["target_margin"] > 1.0)
        return np.where(sure, 6, 2) + (features["cost_ratio"] < 0.5) + (features["compression"] == 0)


class Draw(Policy):
    """Looks at a distribution before anything is drawn from it."""

    name = "draw"
    features = ("draft_entropy", "draft_top2", "draft_top10", "draft_index")

    def draw_token(self, features, state):
        return (features["draft_entropy"] < 1.2) & (features["draft_top2"] < 0.4) & (features["draft_top10"] > 0.5)


class Keep(Policy):
    name = "keep"
    features = ("draft_probability", "draft_top1", "last_mean_top1")

    def new_state(self, rows):
        return {"asked": np.zeros(rows)}

    def keep_drafting(self, features, state):
        state["asked"] = state["asked"] + 1  # also behind the last token that fits
        patience = np.where(state["asked"] % 3 == 0, 0.3, 0.5) + 0.1 * (features["last_mean_top1"] > 0.7)
        return features["draft_probability"] > patience


class Both(Policy):
    """Decides before the step and at both places inside the draft."""

    name = "both"
    features = ("last_accepted", "draft_entropy", "draft_probability", "draft_index", "last_max_entropy")

    def choose_gamma(self, features, state):
        return (features["last_accepted"] + 2 - (features["last_max_entropy"] > 2.0)).astype(np.int64)

    def draw_token(self, features, state):
        return (features["draft_entropy"] < 2.0) | (features["draft_index"] == 2)

    def keep_drafting(self, features, state):
        return features["draft_probability"] > 0.4


class Unlimited(Policy):
    """Overrides a decision without reading anything."""

    name = "unlimited"

    def keep_drafting(self, features, state):
        return True


FIXED = [Fixed(gamma) for gamma in (0, 1, 2, 3, 4, 5, 8)]
OWN = [*FIXED, Stateful(), Running(), TargetEntropy(), Draw(), Keep(), Both(), Unlimited()]
ZOO = [name for name, entry in registry().policies.items() if not issubclass(entry.policy, Clairvoyant)]


@pytest.fixture(scope="module")
def greedy_text(small_pair, small_prompts):
    """What transformers' own greedy decoding of the target says to every other prompt: (prompt, token ids)."""
    texts = []
    for prompt in small_prompts[::2]:
        ids = torch.tensor([chat_tokens(small_pair.tokenizer, prompt.text)])
        # transformers would also choose among the padding rows of the embedding.
        padding = list(range(small_pair.vocabulary_size, small_pair.target.config.vocab_size))
        out = small_pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=BUDGET, do_sample=False, suppress_tokens=padding
        )
        texts.append((prompt, out[0, ids.shape[1] :].tolist()))
    assert any(text[-1] in small_pair.eos_ids for _, text in texts)
    return texts


def assert_live_is_replay(policy, pair, traces, costs, greedy_text):
    """Decode and replay these prompts; compare all steps and texts. Returns the replay."""
    replayed = replay(policy, traces, costs)
    live = SpeculativeDecoder(pair, policy, gamma_max=traces.gamma_max, costs=costs)
    rows = {identifier: row for row, identifier in enumerate(traces.ids)}
    for prompt, text in greedy_text:
        row = rows[prompt.id]
        decoded = live.generate(chat_tokens(pair.tokenizer, prompt.text), BUDGET)
        assert decoded.tokens == text == traces.tokens[row, : traces.lengths[row]].tolist()
        steps = replayed.sequence == row
        columns = (replayed.position, replayed.gamma, replayed.accepted, replayed.forwards)
        expected = list(zip(*(column[steps].tolist() for column in columns), strict=True))
        assert [(step.position, step.gamma, step.accepted, step.forwards) for step in decoded.steps] == expected
    return replayed


@pytest.mark.parametrize("policy", OWN, ids=repr)
def test_live_is_replay(policy, small_pair, small_traces, small_costs, greedy_text):
    replayed = assert_live_is_replay(policy, small_pair, small_traces, small_costs, greedy_text)
    if not isinstance(policy, Fixed | Unlimited):
        assert len(np.unique(replayed.gamma)) > 2, "a policy that always does the same tests little"


@pytest.mark.parametrize("name", ZOO)
def test_live_is_replay_for_the_zoo(name, small_pair, small_traces, small_costs, greedy_text):
    policy = registry().policies[name].policy().fit(small_traces, small_costs, seed=0)
    assert_live_is_replay(policy, small_pair, small_traces, small_costs, greedy_text)


def test_there_is_a_zoo():
    assert ZOO, "the tests over the zoo must not pass by being empty"


@pytest.mark.parametrize("policy", [Fixed(3), Stateful(), Draw(), Both()], ids=repr)
def test_caches_and_lags(policy, small_pair, small_prompts):
    """Between steps the target has seen all but the last token, and the draft's lag is what a replay says it is."""
    for prompt in small_prompts[:4]:
        tokens = chat_tokens(small_pair.tokenizer, prompt.text)
        decoding = _Decoding(SpeculativeDecoder(small_pair, policy, GAMMA_MAX), tokens, BUDGET)
        lag, old = 1, len(tokens)
        assert decoding.target.length == decoding.draft.length == old - 1
        for step in decoding.steps():
            assert step.lag == (lag if step.forwards else 0)
            assert decoding.target.length == old + step.accepted
            assert decoding.draft.length == (
                old + min(step.accepted, step.forwards - 1) if step.forwards else old - lag
            )
            for model in (decoding.target, decoding.draft):
                assert model.cache.get_seq_length() == model.length
            lag = step.accepted + 1 - min(step.accepted, step.forwards - 1) if step.forwards else lag + 1
            old = len(decoding.context)


@pytest.mark.parametrize("gamma", range(1, GAMMA_MAX + 1))
def test_own_draft_is_always_accepted(gamma, small_pair, small_prompts):
    pair = dataclasses.replace(small_pair, draft=small_pair.target)
    decoded = SpeculativeDecoder(pair, Fixed(gamma), GAMMA_MAX).generate(
        chat_tokens(pair.tokenizer, small_prompts[0].text), 30
    )
    assert all(step.accepted == step.gamma for step in decoded.steps)
    assert all(step.gamma == gamma for step in decoded.steps[:-1])


@pytest.mark.parametrize("budget", range(1, 11))
def test_budget_is_exact(budget, small_pair, small_prompts, small_traces):
    longest = small_traces.ids[small_traces.lengths.argmax()]
    prompt = next(prompt for prompt in small_prompts if prompt.id == longest)
    for policy in (Fixed(4), Draw(), Both()):
        decoded = SpeculativeDecoder(small_pair, policy).generate(
            chat_tokens(small_pair.tokenizer, prompt.text), budget
        )
        assert len(decoded.tokens) == budget
        assert sum(step.accepted + 1 for step in decoded.steps) == budget


def test_gamma_max_holds(small_pair, small_prompts):
    tokens = chat_tokens(small_pair.tokenizer, small_prompts[0].text)
    for policy in (Fixed(100), Unlimited()):
        steps = SpeculativeDecoder(small_pair, policy, gamma_max=3).generate(tokens, 20).steps
        assert max(step.gamma for step in steps) == 3
    assert all(
        step.gamma == 0 for step in SpeculativeDecoder(small_pair, Fixed(5), gamma_max=0).generate(tokens, 5).steps
    )


def test_time_adds_up(small_pair, small_prompts):
    tokens = chat_tokens(small_pair.tokenizer, small_prompts[0].text)
    decoded = SpeculativeDecoder(small_pair, Both()).generate(tokens, 20)
    assert decoded.prefill_seconds > 0
    assert sum(step.seconds for step in decoded.steps) <= decoded.seconds
    for step in decoded.steps:
        assert 0 < step.draft_seconds + step.verify_seconds + step.controller_seconds <= step.seconds


@pytest.mark.parametrize("policy", [Fixed(3), Keep()], ids=repr)
def test_signals_cost_nothing_unless_asked_for(policy, small_pair, small_prompts, monkeypatch):
    """A policy pays for the signals that it reads, and for no others."""
    calls = {"draft": 0, "target": 0}

    def counting(name, function):
        def counted(logits):
            calls[name] += 1
            return function(logits)

        return counted

    monkeypatch.setattr(decoder, "draft_signals", counting("draft", decoder.draft_signals))
    monkeypatch.setattr(decoder, "target_signals", counting("target", decoder.target_signals))
    tokens = chat_tokens(small_pair.tokenizer, small_prompts[0].text)
    steps = SpeculativeDecoder(small_pair, policy).generate(tokens, 20).steps
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
        SpeculativeDecoder(small_pair, policy).generate(prompt, budget)


def test_one_token_prompt(small_pair):
    """There is nothing to prefill in front of the only token."""
    plain = SpeculativeDecoder(small_pair, Fixed(0)).generate([65], 10)
    assert SpeculativeDecoder(small_pair, Both()).generate([65], 10).tokens == plain.tokens


def test_nan_logits_are_refused(small_pair, small_prompts):
    broken = copy.deepcopy(small_pair.target)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(SpecKVError, match="NaN"):
        SpeculativeDecoder(dataclasses.replace(small_pair, target=broken), Fixed(2)).generate([65, 66], 5)


def test_prompt_of_recording_and_decoder_are_the_same(small_pair):
    prompt = Prompt("x", "chat", "Hi")
    assert chat_tokens(small_pair.tokenizer, prompt.text) == [small_pair.tokenizer.get_vocab()[c] for c in "Hi"]
