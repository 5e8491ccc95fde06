"""What a live decode gives: steps, the text with its tokens, and caches to go on from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from speckv.errors import SpecKVError
from speckv.live.caching import CachedModel
from speckv.live.models import LanguageModel

#: Signals by name, in the precision of a recording, so that a replay rounds as the live decoder does.
Signals = Mapping[str, npt.NDArray[np.float32]]
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Step:
    """One round of draft, verify, commit, in one sequence.

    Attributes:
        position: tokens committed before the step.
        chosen: tokens that the policy asked for before the step, up to the decoder's gamma_max.
        propensity: chance with which it asked for so many.
        gamma: tokens that were verified.
        accepted: of them, how many the target agreed with, before anything is cut off at the end of the text.
        committed: tokens that the text grew by: accepted + 1, or fewer in the last step.
        forwards: draft forwards, gamma or one more (a distribution that nothing was drawn from), and those that ran on
            behind an end token that nobody looked at; 0 if the drafter is not a model.
        lag: committed tokens that the first draft forward took in; 0 without a draft forward.
        batch_size: sequences that were decoded together.
        seconds: duration of the whole step.
        draft_seconds, verify_seconds: the forwards' part of it, choosing tokens from their logits included. On a
            device that works asynchronously only `seconds` is a duration; the parts say when the host was done.
        controller_seconds: the policy's part of it, features and signals included.
        signals: if they are recorded, those of the drafted tokens by their names in `speckv.traces.DRAFT_SIGNALS`,
            (gamma,) each, and `draft_probability`; and those of the target at the last token by their names in
            `TARGET_SIGNALS`, (1,) each.
    """

    position: int
    chosen: int
    propensity: float
    gamma: int
    accepted: int
    committed: int
    forwards: int
    lag: int
    batch_size: int
    seconds: float
    draft_seconds: float
    verify_seconds: float
    controller_seconds: float
    signals: Signals = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A token's text, and whether the token was drafted (or the target's own)."""

    text: str
    drafted: bool


@dataclass(frozen=True)
class Decoded:
    """One decoded text.

    Attributes:
        text: without special tokens, and without the stop string if one ended it.
        tokens: committed token ids, with the end-of-sequence token or the tokens of the stop string.
        drafted: for each token, whether it was drafted and accepted.
        log_probabilities: of each token under the target, before processors and warping; empty unless asked for.
        finish_reason: `eos`, `stop` (a stop string) or `length`.
        steps: what happened, step by step.
        seconds: duration of all steps.
        prefill_seconds: duration of the forwards over the prompt.
        cache: for a text that goes on, if asked for.
    """

    text: str
    tokens: list[int]
    drafted: list[bool]
    log_probabilities: list[float]
    finish_reason: FinishReason
    steps: list[Step]
    seconds: float
    prefill_seconds: float
    cache: "KeptCache | None" = None

    @property
    def throughput(self) -> float:
        """Committed tokens per second, without the prompt's forwards."""
        return len(self.tokens) / self.seconds

    @property
    def acceptance_rate(self) -> float:
        """Accepted to drafted tokens; 0 if nothing was drafted."""
        return sum(step.accepted for step in self.steps) / max(1, sum(step.gamma for step in self.steps))

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens a step."""
        return 1 + sum(step.accepted for step in self.steps) / len(self.steps)


class KeptCache:
    """The caches of a finished text. They serve one further call."""

    def __init__(self, context: list[int], target: CachedModel, draft: CachedModel | None) -> None:
        self.context, self.target, self.draft = context, target, draft
        self.used = False

    def take(self, context: Sequence[int], target: LanguageModel) -> tuple[CachedModel, CachedModel | None] | None:
        """The caches, cut to what they have in common with a new context but its last token; None if that fails."""
        if self.used:
            raise SpecKVError("this cache has been used; decode with keep_cache again and use the new one")
        if self.target.model is not target.model:
            raise SpecKVError(f"this cache was kept by another model, {self.target.name}; {target.name} cannot use it")
        self.used = True
        agree = (a == b for a, b in zip(self.context, context[:-1], strict=False))
        common = next((index for index, same in enumerate(agree) if not same), min(len(self.context), len(context) - 1))
        caches = [self.target, self.draft] if self.draft else [self.target]
        lengths = [min(common, cached.lengths[0]) for cached in caches]
        if not all(cached.can_roll_back(length) for cached, length in zip(caches, lengths, strict=True)):
            return None
        for cached, length in zip(caches, lengths, strict=True):
            cached.roll_back([length])
        return self.target, self.draft
