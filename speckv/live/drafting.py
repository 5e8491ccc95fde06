"""Where drafted tokens come from: a draft model, the first layers of the target, or the text so far."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from speckv.errors import SpecKVError
from speckv.live.caching import CachedModel, padded
from speckv.live.models import LanguageModel
from speckv.traces import DRAFT_SIGNALS


class Drafter(ABC):
    """A source of drafted tokens; `start` sets it to work on some sequences.

    Attributes:
        signals: which of `speckv.traces.DRAFT_SIGNALS` it can give. A policy that needs another is refused.
    """

    signals: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def start(
        self, contexts: Sequence[Sequence[int]], capacity: int | None = None, kept: CachedModel | None = None
    ) -> "Drafting":
        """Begin to draft for sequences. What takes long is left to `Drafting.prefill`.

        Args:
            contexts: tokens of each sequence.
            capacity: tokens to allocate a static cache for, None for a dynamic one.
            kept: a draft model's cache of an earlier text that begins like the only sequence.
        """


class Drafting(ABC):
    """A drafter at work on n sequences.

    A step is one `begin`, a number of `next`, and one `end`. In front of the first there may be one `prefill`.

    Attributes:
        cached: the draft model and its cache, if there is one.
    """

    cached: CachedModel | None = None

    def prefill(self, contexts: Sequence[Sequence[int]]) -> None:  # noqa: B027 (not every drafter has to)
        """Take in the prompts ahead of the first step, which otherwise has to.

        Args:
            contexts: tokens of each sequence; of the last one there is nothing to know yet.
        """

    @abstractmethod
    def begin(self, contexts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[list[int], list[int]]:
        """Start a step.

        Args:
            contexts: committed tokens of each sequence, the prompt included.
            limits: how many tokens may be drafted in each.

        Returns:
            How many can be, and how many committed tokens the first draft forward will take in (the lag; 0 where
            there will be no forward).
        """

    @abstractmethod
    def next(self, previous: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        """What may come next in each sequence.

        Args:
            previous: (n,) the tokens drafted last, None in front of the first.
            rows: sequences that are still drafting; the other rows of arguments and result mean nothing.

        Returns:
            (n, vocabulary) float32 logits; or, from a drafter without distributions, (n,) tokens.
        """

    @abstractmethod
    def end(self, lengths: Sequence[int]) -> None:
        """Forget what was drafted behind the first `lengths` tokens of each sequence."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the sequences."""


class ModelDrafter(Drafter):
    """A draft model; `speckv.live.early_exit` makes one of the target's own first layers.

    Args:
        model: its tokenizer must be the target's.
    """

    signals = frozenset(DRAFT_SIGNALS)

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def start(
        self, contexts: Sequence[Sequence[int]], capacity: int | None = None, kept: CachedModel | None = None
    ) -> "ModelDrafting":
        if kept is None or kept.model is not self.model.model:
            kept = CachedModel(self.model, len(contexts), capacity)
        return ModelDrafting(kept)


class ModelDrafting(Drafting):
    """A draft model at work. Between steps its cache holds a prefix of each sequence, without the last token."""

    cached: CachedModel

    def __init__(self, cached: CachedModel) -> None:
        self.cached = cached

    def prefill(self, contexts: Sequence[Sequence[int]]) -> None:
        self.cached.prefill([tokens[n:-1] for tokens, n in zip(contexts, self.cached.lengths, strict=True)])

    def begin(self, contexts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[list[int], list[int]]:
        self._known = list(self.cached.lengths)
        going = max(limits) > 0
        self._unseen = [tokens[n:] if going else [] for tokens, n in zip(contexts, self._known, strict=True)]
        return list(limits), [len(unseen) if limit else 0 for unseen, limit in zip(self._unseen, limits, strict=True)]

    def next(self, previous: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        if previous is None:
            tokens, counts = padded(self._unseen, self.cached.device)
            for row, count in enumerate(counts):
                self._known[row] += count
            return self.cached.next_logits(tokens, counts)
        for row in rows:
            self._known[row] += 1
        return self.cached.next_logits(previous[:, None].to(self.cached.device))

    def end(self, lengths: Sequence[int]) -> None:
        self.cached.roll_back([min(pair) for pair in zip(self._known, lengths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        self.cached.select(rows)


class PromptLookup(Drafter):
    """Continues as the text went on where its last tokens stood before (prompt look-up, n-gram drafting).

    Args:
        longest: tokens to look for; fewer are tried, down to `shortest`, until they are found.
        shortest: fewest tokens to look for.

    The latest earlier place wins. There is no distribution, hence no signal.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise SpecKVError(f"longest is {longest} and shortest {shortest}; they must be 1 or more, in this order")
        self.longest, self.shortest = longest, shortest

    def start(
        self, contexts: Sequence[Sequence[int]], capacity: int | None = None, kept: CachedModel | None = None
    ) -> "Drafting":
        return _LookingUp(self)

    def find(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that followed the text's last tokens earlier in the text."""
        tokens = list(tokens)
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            tail = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start] == tail[0] and tokens[start : start + size] == tail:
                    return tokens[start + size : start + size + limit]
        return []


class _LookingUp(Drafting):
    def __init__(self, lookup: PromptLookup) -> None:
        self.lookup = lookup

    def begin(self, contexts: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[list[int], list[int]]:
        pairs = zip(contexts, limits, strict=True)
        found = [self.lookup.find(tokens, limit) if limit else [] for tokens, limit in pairs]
        self._found, _ = padded(found, torch.device("cpu"))
        self._index = 0
        return [len(tokens) for tokens in found], [0] * len(found)

    def next(self, previous: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        self._index += 1
        return self._found[:, self._index - 1]

    def end(self, lengths: Sequence[int]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        pass


def prompt_lookup(target: LanguageModel, longest: int = 3, shortest: int = 1) -> PromptLookup:
    """`PromptLookup`, as the factory that a drafter is registered with: whatever the target is, it drafts the same."""
    return PromptLookup(longest, shortest)
