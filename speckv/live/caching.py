"""A model with the key-value cache of several sequences, each of which rolls back on its own."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from speckv.errors import SpecKVError
from speckv.live.models import LanguageModel, to_device

#: Layers of a cache whose sequences can be moved against each other.
_MOVABLE = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


class CachedModel:
    """A language model and the key-value cache of n sequences.

    All sequences end at the same slot of the cache; shorter ones start behind padding, the longest does not. New
    tokens that are fewer than those of another sequence are padded at their end, where causal attention hides the
    padding, until `roll_back` aligns the ends again. It must follow every forward before the next one, padded or not.

    Args:
        model: the model.
        rows: n, sequences.
        capacity: tokens to allocate a static cache for. None for a dynamic cache, which grows with the text and holds
            no more than the window where a layer's attention slides.

    Attributes:
        lengths: tokens of each sequence in the cache.

    Raises:
        SpecKVError: the model's cache cannot be rolled back, or not for each of several sequences.
    """

    def __init__(self, model: LanguageModel, rows: int = 1, capacity: int | None = None) -> None:
        self._impossible = to_device(model.impossible_ids, model.device) if model.impossible_ids else None
        self.model, self.vocabulary_size, self.device = model.model, model.vocabulary_size, model.device
        self.name = model.name
        if capacity is None:
            self.cache: Any = DynamicCache(config=self.model.config)
        else:
            self.cache = StaticCache(config=self.model.config, max_cache_len=capacity)
        if not self.cache.is_croppable:
            kind = "cache" if capacity is None else "static cache"
            raise SpecKVError(f"{model.name}: its {kind} cannot be rolled back, so that it cannot speculate")
        if rows > 1 and not {type(layer) for layer in self.cache.layers} <= _MOVABLE:
            raise SpecKVError(f"{model.name}: its cache rolls back for one sequence at a time; decode without a batch")
        self.cache.activate_past_recording()
        self.lengths = [0] * rows
        self._ends = [0] * rows  # slot behind the last token of each sequence
        self._slots = 0

    def forward(
        self, tokens: torch.Tensor, counts: Sequence[int] | None = None, last: int | None = None
    ) -> torch.Tensor:
        """Append tokens to each sequence.

        Args:
            tokens: (n, k) ids on the model's device.
            counts: how many of the k belong to each sequence, the rest is padding. None for all of them.
            last: how many of the k, from the end, to compute logits behind. None for all of them.

        Returns:
            (n, last, vocabulary) float32 logits behind each token.
        """
        return self._forward(tokens, counts, logits_to_keep=last or 0)

    def next_logits(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Append tokens as `forward` does. Returns (n, vocabulary) float32 logits behind the last of each sequence."""
        if counts is None or min(counts) == tokens.shape[1]:
            return self._forward(tokens, None, logits_to_keep=1)[:, -1]
        logits = self._forward(tokens, counts, logits_to_keep=0)
        self.roll_back(self.lengths)
        last = to_device(counts, self.device) - 1
        return logits[torch.arange(len(counts), device=self.device), last]

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]]) -> None:
        """Append a list of tokens to each sequence, without asking for logits."""
        if any(sequences):
            tokens, counts = padded(sequences, self.device)
            self._forward(tokens, counts, logits_to_keep=1)
            self.roll_back(self.lengths)

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, counts: Sequence[int] | None, logits_to_keep: int) -> torch.Tensor:
        width = tokens.shape[1]
        counts = counts or [width] * len(self.lengths)
        padding = [self._slots - length for length in self.lengths]
        mask = positions = None
        if any(padding):
            starts = to_device(padding, self.device)[:, None]
            slots = torch.arange(self._slots + width, device=self.device)
            mask, positions = (slots >= starts).long(), slots[self._slots :] - starts
        logits = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits
        if not self._slots and all(getattr(layer, "keys", None) is None for layer in self.cache.layers):
            raise SpecKVError(f"{self.name}: keeps no cache that could be rolled back, so that it cannot speculate")
        self._ends = [self._slots + count for count in counts]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._slots += width
        logits = torch.as_tensor(logits[..., : self.vocabulary_size]).float()
        return logits if self._impossible is None else logits.index_fill(-1, self._impossible, -torch.inf)

    @torch.inference_mode()
    def roll_back(self, lengths: Sequence[int]) -> None:
        """Forget what is behind the first `lengths` tokens of each sequence, and align the sequences' ends."""
        if not self._slots:
            return  # layers that nothing was put into yet cannot be cropped
        ends = [end - old + new for end, old, new in zip(self._ends, self.lengths, lengths, strict=True)]
        last = max(ends)
        if min(ends) < last:
            shift = to_device([last - end for end in ends], self.device)
            for layer in self.cache.layers:
                # A sliding layer still has the slots that come into the window: it drops them in `crop`.
                layer.keys, layer.values = _moved(layer.keys, shift), _moved(layer.values, shift)
        self.cache.crop(last - self._slots)
        self.lengths = list(lengths)
        self._slots = last
        self._drop_empty(last - max(lengths))

    def _drop_empty(self, slots: int) -> None:
        """Drop slots in front that are padding in every sequence."""
        self._slots -= slots
        self._ends = [self._slots] * len(self.lengths)
        for layer in self.cache.layers if slots else ():
            if isinstance(layer, StaticLayer):
                layer.keys, layer.values = layer.keys.roll(-slots, 2), layer.values.roll(-slots, 2)
                layer.crop(-slots)
            else:
                first = max(layer.keys.shape[2] - self._slots, 0)
                layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length -= slots

    def can_roll_back(self, length: int) -> bool:
        """Whether a single sequence can be cut to its first `length` tokens, between two steps."""
        forgotten = (
            isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
            for layer in self.cache.layers
        )
        return length == self.lengths[0] or not any(forgotten)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the sequences."""
        self.cache.reorder_cache(to_device(rows, self.device))
        self.lengths = [self.lengths[row] for row in rows]
        self._drop_empty(self._slots - max(self.lengths))


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Token ids of sequences as (n, longest) with zeros behind the shorter ones, and their lengths."""
    columns = itertools.zip_longest(*sequences, fillvalue=0)
    rows = list(zip(*columns, strict=True)) or [()] * len(sequences)
    return to_device(rows, device), [len(sequence) for sequence in sequences]


def _moved(states: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """(n, heads, slots, width) with each sequence moved (n,) slots to the end; what moves out is lost."""
    slots = (torch.arange(states.shape[2], device=states.device) - shift[:, None]).clamp(min=0)
    return states.gather(2, slots[:, None, :, None].expand_as(states))
