"""The recorder: greedy decodes of a model pair become rollout traces (rule R3)."""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from speckv.errors import SpecKVError
from speckv.live.models import LanguageModel, ModelPair, chat_tokens
from speckv.live.signals import draft_signals, target_signals
from speckv.prompts import Prompt
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Rollout, TraceDataset


def record(
    pair: ModelPair, prompts: Sequence[Prompt], dataset: TraceDataset, *, batch_size: int = 1
) -> Iterator[Rollout]:
    """Record every prompt that the dataset does not hold yet, and yield each when it is safely on disk.

    Both models see one new token of a sequence in a forward, as a live draft does. Several sequences may share
    that forward (`batch_size`), and so do the continuations off the path.

    Args:
        pair: the models.
        prompts: what to decode.
        dataset: where to add the rollouts; its manifest gives gamma_max and max_new_tokens.
        batch_size: sequences that are recorded side by side. They finish together, so a recording that is
            killed loses at most so many.

    Raises:
        SpecKVError: a prompt of the same name but another text stands in the dataset, or a prompt is empty.
    """
    manifest = dataset.manifest
    recorded = dataset.keys()
    left = [prompt for prompt in prompts if (prompt.id, pair.target.compression) not in recorded]
    others: dict[str, list[Rollout]] = {}
    for rollout in dataset:
        others.setdefault(rollout.id, []).append(rollout)
    for prompt in prompts:
        for rollout in others.get(prompt.id, []):
            if rollout.prompt_tokens.tolist() != chat_tokens(pair.target.tokenizer, prompt.text):
                raise SpecKVError(
                    f"{dataset.path}: {prompt.id} was recorded from another prompt; choose another folder"
                )
    if batch_size > 1:  # prompts of similar length share a batch, so that little of it is padding
        left.sort(key=lambda prompt: len(chat_tokens(pair.target.tokenizer, prompt.text)))
    for start in range(0, len(left), batch_size):
        batch = left[start : start + batch_size]
        recording = _Recording(pair, batch, manifest.gamma_max, manifest.max_new_tokens)
        for prompt, path in zip(batch, recording.paths, strict=True):
            path.others = others.get(prompt.id, [])
        for rollout in recording.run():
            dataset.add(rollout)
            yield rollout


class _BatchedModel:
    """A model and the key-value cache of several sequences, padded on the left to one length."""

    def __init__(self, language_model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        model = self.model = language_model.model
        self.vocabulary_size = language_model.vocabulary_size
        longest = max(len(prompt) for prompt in prompts)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=model.device)
        self.mask = (torch.arange(longest, device=model.device) >= padding[:, None]).long()
        self.next_position = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
        self.cache = _stack([_prefill(model, prompt) for prompt in _after_common_prefix(model, prompts)], longest)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append (n,) tokens, one a row. Returns (n, vocabulary) float32 logits behind them."""
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        logits = self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.next_position[:, None],
            cache=self.cache,
        ).logits
        self.next_position = self.next_position + 1
        return torch.as_tensor(logits[:, -1, : self.vocabulary_size]).float()

    def fork(self, rows: torch.Tensor, prefix: torch.Tensor) -> "_BatchedModel":
        """A copy for (n,) `rows`, each of which sees only the first `prefix` tokens of its sequence."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        other.cache.batch_select_indices(rows)
        mask = self.mask[rows]
        other.mask = mask * (mask.cumsum(-1) <= prefix[:, None])
        other.next_position = prefix
        return other


def _after_common_prefix(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[DynamicCache, Sequence[int]]]:
    """For each prompt a cache of the tokens that all prompts begin with, and the tokens left to prefill."""
    common = 0
    if len(prompts) > 1:
        agree = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
        common = sum(1 for _ in itertools.takewhile(bool, agree))
    shared = _prefill(model, (DynamicCache(), prompts[0][:common]))
    for prompt in prompts:
        yield copy.deepcopy(shared), prompt[common:]


def _prefill(model: Any, start: tuple[DynamicCache, Sequence[int]]) -> DynamicCache:
    """Append tokens to the cache of one sequence."""
    cache, tokens = start
    if tokens:
        model(input_ids=torch.tensor([list(tokens)], device=model.device), cache=cache, logits_to_keep=1)
    return cache


def _stack(caches: Sequence[DynamicCache], length: int) -> DynamicCache:
    """One cache of all sequences, each padded on the left to `length` tokens."""
    stacked = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        padded = [
            [
                torch.nn.functional.pad(states, (0, 0, length - states.shape[-2], 0))
                for states in (layer.keys, layer.values)
            ]
            for layer in layers
        ]
        keys, values = (torch.cat(states) for states in zip(*padded, strict=True))
        stacked.update(keys, values, index)
    return stacked


@dataclass
class _Path:
    """What is known of one sequence while it is being recorded."""

    tokens: list[int] = field(default_factory=list)
    draft_tokens: list[int] = field(default_factory=list)
    signals: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in DRAFT_SIGNALS | TARGET_SIGNALS})
    ended: bool = False
    #: position of a wrong proposal -> the draft's continuation behind it, and its signals
    branches: dict[int, tuple[list[int], dict[str, list[float]]]] = field(default_factory=dict)
    #: recordings of the same prompt at other compressions of the target, with the same draft
    others: list[Rollout] = field(default_factory=list)

    def copy_known_branches(self) -> None:
        """Take over continuations that the draft has been asked for already.

        The draft knows nothing of the target behind the path, so that behind the same tokens it goes on as it did.
        """
        for other in self.others:
            ends = np.cumsum(other.off_lengths)
            for position, (token, proposal) in enumerate(zip(self.tokens, self.draft_tokens, strict=True)):
                if position >= len(other.tokens) or other.draft_tokens[position] != proposal:
                    break
                if (length := other.off_lengths[position]) and proposal != token:
                    part = slice(ends[position] - length, ends[position])
                    signals = {name: values[part].tolist() for name, values in other.off_signals.items()}
                    self.branches[position] = (other.off_tokens[part].tolist(), signals)
                if other.tokens[position] != token:
                    break


class _Recording:
    """Several sequences being recorded side by side."""

    # Continuations off the path that share a forward: enough for an efficient matrix product, few enough
    # that their copies of the cache fit in memory.
    BRANCHES = 64

    def __init__(self, pair: ModelPair, prompts: Sequence[Prompt], gamma_max: int, max_new_tokens: int) -> None:
        self.pair, self.prompts = pair, prompts
        self.gamma_max, self.max_new_tokens = gamma_max, max_new_tokens
        self.prompt_tokens = [chat_tokens(pair.target.tokenizer, prompt.text) for prompt in prompts]
        for prompt, tokens in zip(prompts, self.prompt_tokens, strict=True):
            if not tokens:
                raise SpecKVError(f"prompt {prompt.id}: is empty once tokenized")
        self.paths = [_Path() for _ in prompts]

    @torch.inference_mode()
    def run(self) -> Iterator[Rollout]:
        draft = self._follow_paths()
        self._follow_branches(draft)
        for prompt, tokens, path in zip(self.prompts, self.prompt_tokens, self.paths, strict=True):
            yield self._to_rollout(prompt, tokens, path)

    def _follow_paths(self) -> _BatchedModel:
        """Decode greedily with the target, and ask the draft at each position what it would have proposed."""
        target = _BatchedModel(self.pair.target, [tokens[:-1] for tokens in self.prompt_tokens])
        draft = _BatchedModel(self.pair.draft, [tokens[:-1] for tokens in self.prompt_tokens])
        last = torch.tensor([tokens[-1] for tokens in self.prompt_tokens], device=self.pair.target.device)
        for _ in range(self.max_new_tokens):
            target_logits, draft_logits = target.forward(last), draft.forward(last.to(self.pair.draft.device))
            signals = _finite(draft_signals(draft_logits) | target_signals(target_logits))
            last = target_logits.argmax(-1)
            columns = zip(self.paths, last.tolist(), draft_logits.argmax(-1).tolist(), strict=True)
            for row, (path, token, proposal) in enumerate(columns):
                if path.ended:
                    continue
                path.tokens.append(token)
                path.draft_tokens.append(proposal)
                for name, values in signals.items():
                    path.signals[name].append(values[row])
                path.ended = token in self.pair.target.eos_ids
            if all(path.ended for path in self.paths):
                break
        return draft

    def _follow_branches(self, draft: _BatchedModel) -> None:
        """Draft on behind every wrong proposal: up to gamma_max - 1 tokens, the budget, or an end token."""
        for path in self.paths:
            path.copy_known_branches()
        wrong = [
            (row, position, room)
            for row, path in enumerate(self.paths)
            for position, (token, proposal) in enumerate(zip(path.tokens, path.draft_tokens, strict=True))
            if proposal != token and proposal not in self.pair.target.eos_ids and position not in path.branches
            if (room := min(self.gamma_max - 1, self.max_new_tokens - 2 - position)) > 0
        ]
        for start in range(0, len(wrong), self.BRANCHES):
            self._follow_some_branches(draft, wrong[start : start + self.BRANCHES])

    def _follow_some_branches(self, draft: _BatchedModel, branches: list[tuple[int, int, int]]) -> None:
        device = draft.model.device
        prefix = [len(self.prompt_tokens[row]) + position for row, position, _ in branches]
        fork = draft.fork(
            torch.tensor([row for row, _, _ in branches], device=device), torch.tensor(prefix, device=device)
        )
        tokens = torch.tensor([self.paths[row].draft_tokens[p] for row, p, _ in branches], device=device)
        going = [True] * len(branches)
        for step in range(max(room for _, _, room in branches)):
            logits = fork.forward(tokens)
            tokens, signals = logits.argmax(-1), _finite(draft_signals(logits))
            for index, (token, (row, position, room)) in enumerate(zip(tokens.tolist(), branches, strict=True)):
                if not going[index]:
                    continue
                branch = self.paths[row].branches.setdefault(position, ([], {n: [] for n in DRAFT_SIGNALS}))
                branch[0].append(token)
                for name, values in signals.items():
                    branch[1][name].append(values[index])
                going[index] = token not in self.pair.target.eos_ids and step + 1 < room
            if not any(going):
                break

    def _to_rollout(self, prompt: Prompt, prompt_tokens: list[int], path: _Path) -> Rollout:
        lengths = np.zeros(len(path.tokens), dtype=np.int32)
        for position, (tokens, _) in path.branches.items():
            lengths[position] = len(tokens)
        branches = [path.branches[position] for position in sorted(path.branches)]
        return Rollout(
            id=prompt.id,
            task=prompt.task,
            compression=self.pair.target.compression,
            prompt_tokens=np.array(prompt_tokens, dtype=np.int32),
            tokens=np.array(path.tokens, dtype=np.int32),
            draft_tokens=np.array(path.draft_tokens, dtype=np.int32),
            signals={name: np.array(values, dtype=np.float32) for name, values in path.signals.items()},
            off_lengths=lengths,
            off_tokens=np.array([t for tokens, _ in branches for t in tokens], dtype=np.int32),
            off_signals={
                name: np.array([v for _, signals in branches for v in signals[name]], dtype=np.float32)
                for name in DRAFT_SIGNALS
            },
            ended=path.ended,
        )


def _finite(signals: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Signals by name as lists of numbers."""
    lists = {name: values.tolist() for name, values in signals.items()}
    for name, values in lists.items():
        for row, value in enumerate(values):
            if not math.isfinite(value):
                raise SpecKVError(
                    f"{name} is not a number in sequence {row} of the batch: the model's logits hold NaN; choose "
                    "another compression, or compute in float32"
                )
    return lists
