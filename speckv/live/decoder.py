"""The live decoder: a draft proposes, a policy says how much, the target verifies.

What `speckv.replaying` computes from a recording is what happens here, step for step (rule R3).
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from speckv.compression import COMPRESSIONS
from speckv.costs import CostModel
from speckv.errors import SpecKVError
from speckv.features import FeatureTracker, When, check_features
from speckv.live.models import CachedModel, ModelPair
from speckv.live.signals import draft_signals, target_signals
from speckv.policy import Clairvoyant, Outcome, Policy, as_booleans, as_integers, check_playable

#: By name, in the precision of a recording, so that a replay rounds as the live decoder does.
_Signals = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Step:
    """One round of draft, verify, commit.

    Attributes:
        position: tokens committed before the step.
        gamma: tokens that were verified.
        accepted: of them, how many the target agreed with.
        forwards: draft forwards, gamma or one more (a distribution that nothing was drawn from).
        lag: committed tokens that the first draft forward took in; 0 without a draft forward.
        seconds: duration of the whole step.
        draft_seconds, verify_seconds: the forwards' part of it, choosing tokens from their logits included.
        controller_seconds: the policy's part of it, features and signals included.
    """

    position: int
    gamma: int
    accepted: int
    forwards: int
    lag: int
    seconds: float
    draft_seconds: float
    verify_seconds: float
    controller_seconds: float


@dataclass(frozen=True)
class Decoded:
    """One decoded sequence.

    Attributes:
        tokens: committed token ids, the end-of-sequence token included if there was one.
        steps: what happened, step by step.
        seconds: duration of all steps.
        prefill_seconds: duration of both models' forwards over the prompt.
    """

    tokens: list[int]
    steps: list[Step]
    seconds: float
    prefill_seconds: float


class SpeculativeDecoder:
    """Greedy speculative decoding: the target's own greedy text, in fewer forwards of the target.

    Args:
        pair: the models.
        policy: decides how many tokens to draft; fitted, if it learns.
        gamma_max: no step drafts more, whatever the policy says.
        costs: measured on this machine; only needed by policies that read the feature `cost_ratio`.

    Raises:
        SpecKVError: the policy is a bound that knows the future, or reads a feature that cannot be had.
    """

    def __init__(self, pair: ModelPair, policy: Policy, gamma_max: int = 16, costs: CostModel | None = None) -> None:
        if isinstance(policy, Clairvoyant):
            raise SpecKVError(f"policy {policy.name!r} knows the future: replay it, it cannot decode live")
        if gamma_max < 0:
            raise SpecKVError(f"gamma_max is {gamma_max}; it must be 0 or more")
        check_playable(policy, gamma_max)
        check_features(policy.features)
        if costs is None and "cost_ratio" in policy.features:
            raise SpecKVError(f"policy {policy.name!r} reads the feature 'cost_ratio': give the decoder a cost model")
        self.pair, self.policy, self.gamma_max = pair, policy, gamma_max
        self.cost_ratio = costs.cost_ratio(pair.compression) if costs else 0.0

    def generate(self, prompt_tokens: Sequence[int], max_new_tokens: int) -> Decoded:
        """Decode until an end-of-sequence token (it is kept) or `max_new_tokens` tokens.

        Raises:
            SpecKVError: the prompt is empty, the budget is not positive, the models' logits hold NaN, or the
                policy answers out of range.
        """
        if not len(prompt_tokens):
            raise SpecKVError("the prompt is empty: give at least one token")
        if max_new_tokens < 1:
            raise SpecKVError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
        start = time.perf_counter()
        decoding = _Decoding(self, prompt_tokens, max_new_tokens)
        prefilled = time.perf_counter()
        steps = list(decoding.steps())
        return Decoded(decoding.tokens, steps, time.perf_counter() - prefilled, prefilled - start)


class _Clock:
    """Seconds spent in the parts of one step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.parts = {"draft": 0.0, "verify": 0.0, "controller": 0.0}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start


@dataclass(frozen=True)
class _Draft:
    """What a draft came to: tokens to verify, forwards spent, what the first took in, and signals of the tokens."""

    tokens: list[int]
    forwards: int
    lag: int
    signals: _Signals


class _Decoding:
    """One sequence being decoded.

    Between two steps both caches hold a prefix of `context`: the target's all of it but the last token, the
    draft's at most so much.
    """

    def __init__(self, decoder: SpeculativeDecoder, prompt_tokens: Sequence[int], max_new_tokens: int) -> None:
        pair, policy = decoder.pair, decoder.policy
        self.policy, self.gamma_max, self.max_new_tokens = policy, decoder.gamma_max, max_new_tokens
        self.eos_ids = pair.eos_ids
        self.context = [int(token) for token in prompt_tokens]
        self.prompt_length = len(self.context)
        self.target = CachedModel(pair.target, pair.vocabulary_size)
        self.draft = CachedModel(pair.draft, pair.vocabulary_size)
        self.target.prefill(self.context[:-1])
        self.draft.prefill(self.context[:-1])
        self.tracker = FeatureTracker(
            policy.features,
            prompt_lengths=np.array([self.prompt_length]),
            compression=np.array([list(COMPRESSIONS).index(pair.compression)]),
            cost_ratio=np.array([decoder.cost_ratio]),
        )
        self.state = policy.new_state(1)
        self.chooses, self.observes = policy.overrides("choose_gamma"), policy.overrides("observe")
        self.draws, self.keeps = policy.overrides("draw_token"), policy.overrides("keep_drafting")

    @property
    def tokens(self) -> list[int]:
        """Committed so far."""
        return self.context[self.prompt_length :]

    def steps(self) -> Iterator[Step]:
        """Decode to the end; each step's tokens are in `context` when it is yielded."""
        while True:
            yield self._step()
            if self.context[-1] in self.eos_ids or len(self.tokens) == self.max_new_tokens:
                return

    @torch.inference_mode()
    def _step(self) -> Step:
        clock = _Clock()
        position, length = len(self.tokens), len(self.context)
        draft = self._draft(clock)
        with clock.measure("verify"):
            logits = self.target.forward([self.context[-1], *draft.tokens])
            choices = choose_greedily(logits)
        accepted = 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
            accepted += 1
        # The target's last choice, a correction or a bonus, has been seen by neither model.
        self.target.crop(length + accepted)
        self.draft.crop(length + accepted)
        self.context += _up_to_end(choices[: accepted + 1], self.eos_ids)
        with clock.measure("controller"):
            self._learn(draft, accepted, logits[accepted : accepted + 1], clock.seconds)
        return Step(
            position=position,
            gamma=len(draft.tokens),
            accepted=accepted,
            forwards=draft.forwards,
            lag=draft.lag,
            seconds=clock.seconds,
            draft_seconds=clock.parts["draft"],
            verify_seconds=clock.parts["verify"],
            controller_seconds=clock.parts["controller"],
        )

    def _draft(self, clock: _Clock) -> _Draft:
        """Draft until the policy, the budget (the target's own token must fit) or an end token says stop."""
        policy, name = self.policy, self.policy.name
        limit = min(self.gamma_max, self.max_new_tokens - len(self.tokens) - 1)
        with clock.measure("controller"):
            features = self.tracker.before(1)
            if self.chooses:
                chosen = as_integers(policy.choose_gamma(features, self.state), 1, f"{name}.choose_gamma")
                limit = min(limit, int(chosen[0]))
        unseen = self.context[self.draft.length :]
        lag = len(unseen) if limit else 0
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        signals: list[_Signals] = []
        for index in range(1, limit + 1):
            with clock.measure("draft"):
                logits.append(self.draft.forward(unseen)[-1:])
                unseen = choose_greedily(logits[-1])
            with clock.measure("controller"):
                if self.tracker.token_signals and (self.draws or self.keeps):
                    signals.append(_as_recorded(draft_signals(logits[-1])))
                if self.draws and not self._agrees("draw_token", index, signals):
                    break
                tokens += unseen
                if index == limit or tokens[-1] in self.eos_ids:
                    break
                if self.keeps and not self._agrees("keep_drafting", index, signals):
                    break
        with clock.measure("controller"):
            of_draft = self._signals_of_draft(logits, signals) if self.tracker.draft_signals and tokens else {}
        return _Draft(tokens, len(logits), lag, of_draft)

    def _agrees(self, decision: str, index: int, signals: list[_Signals]) -> bool:
        """What the policy says, inside the draft, to token number `index`."""
        values = {feature: signals[-1][signal] for feature, signal in self.tracker.token_signals.items()}
        when: When = "distribution" if decision == "draw_token" else "drawn"
        features = self.tracker.token(index, values, np.zeros(1, dtype=np.int64), when)
        answer = getattr(self.policy, decision)(features, self.state)
        return bool(as_booleans(answer, 1, f"{self.policy.name}.{decision}")[0])

    def _signals_of_draft(self, logits: list[torch.Tensor], signals: list[_Signals]) -> _Signals:
        """Signals of all drafted tokens by name, each (1, forwards): those known already, or all in one go."""
        if not signals:
            signals = [_as_recorded(draft_signals(torch.cat(logits)))]
        return {name: np.concatenate([part[name] for part in signals])[None] for name in self.tracker.draft_signals}

    def _learn(self, draft: _Draft, accepted: int, last_logits: torch.Tensor, seconds: float) -> None:
        """Let features and policy take in the outcome, before anything is cut off at the end of the text."""
        drafted, agreed = np.array([len(draft.tokens)]), np.array([accepted])
        target = _as_recorded(target_signals(last_logits)) if self.tracker.target_signals else {}
        self.tracker.verified(drafted, agreed, draft.signals, target)
        if self.observes:
            self.policy.observe(Outcome(drafted, agreed, np.array([seconds])), self.state)


def choose_greedily(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row, (n, vocabulary) -> n ids. NaN would win silently, so it is refused."""
    tokens = logits.argmax(dim=-1, keepdim=True)
    # Both in one transfer from the device; float32 holds ids up to 2^24 exactly.
    ids, largest = torch.stack([tokens[:, 0].float(), logits.gather(-1, tokens)[:, 0]]).tolist()
    if any(math.isnan(value) for value in largest):
        raise SpecKVError("the model's logits hold NaN; choose another compression, or compute in float32")
    return [int(token) for token in ids]


def _up_to_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens up to and with the first that ends the sequence."""
    end = next((index for index, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tokens[: end + 1]


def _as_recorded(signals: Mapping[str, list[float]]) -> _Signals:
    return {name: np.array(values, dtype=np.float32) for name, values in signals.items()}
