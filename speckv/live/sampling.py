"""How tokens are drawn from the draft and verified against the target, without changing what the target would say.

Greedy and Gumbel-coupled sampling make the target's choice at a position a function of its logits there, so a drafted
token is accepted if it is that choice. Rejection sampling accepts a drafted token at random, so that what is committed
has the target's distribution. Proofs by exact enumeration are in `tests/test_lossless.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speckv.errors import SpecKVError
from speckv.live.models import to_device

#: How the draft's tokens are chosen: as its likeliest ones, or drawn from its warped distribution.
DraftMode = Literal["greedy", "sampled"]


class Sampler(ABC):
    """Settings of drawing and verifying; `start` gives the random numbers of some sequences to go with them.

    Args:
        temperature: from 0.0001; logits are divided by it.
        top_k: keep this many likeliest tokens; 0 for all.
        top_p: keep the likeliest tokens that hold this probability together, in (0, 1].
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        draft: how the draft's tokens are chosen. Either way is lossless. Both models are warped alike.

    Raises:
        SpecKVError: a setting is out of its range.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        draft: DraftMode = "sampled",
    ) -> None:
        for name, value, fits, wanted in (
            ("temperature", temperature, 1e-4 <= temperature < math.inf, "from 0.0001 (0 is greedy decoding)"),
            ("top_k", top_k, isinstance(top_k, int) and top_k >= 0, "a whole number from 0"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
            ("min_p", min_p, 0 <= min_p <= 1, "from 0 to 1"),
            ("draft", draft, draft in ("greedy", "sampled"), "greedy or sampled"),
        ):
            if not fits:
                raise SpecKVError(f"{name} is {value}; it must be {wanted}")
        self.draft = draft
        self._warpers = LogitsProcessorList()
        if temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            self._warpers.append(MinPLogitsWarper(min_p))

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, (..., vocabulary), after temperature, top-k, top-p and min-p."""
        flat = logits.reshape(-1, logits.shape[-1])
        warped: torch.Tensor = self._warpers(torch.empty(0), flat)
        return torch.log_softmax(warped, dim=-1).view_as(logits)

    @abstractmethod
    def start(self, seeds: Sequence[int], device: torch.device) -> "Draws":
        """Random numbers for one sequence a seed."""


class Greedy(Sampler):
    """The target's likeliest token at every position."""

    def __init__(self, draft: DraftMode = "greedy") -> None:
        super().__init__(draft=draft)

    def start(self, seeds: Sequence[int], device: torch.device) -> "Draws":
        return _GreedyDraws(self, Randomness(seeds, device))


class Rejection(Sampler):
    """Samples of the target's distribution by rejection (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    The text depends on the seed and on what was drafted.
    """

    def start(self, seeds: Sequence[int], device: torch.device) -> "Draws":
        return _RejectionDraws(self, Randomness(seeds, device))


class Gumbel(Sampler):
    """Samples of the target's distribution by the Gumbel-max trick, with noise keyed by (seed, position).

    The text depends on the seed alone: not on the draft, gamma or the policy. A sampled draft uses the same noise,
    which makes it agree with the target more often than independent draws would.
    """

    def start(self, seeds: Sequence[int], device: torch.device) -> "Draws":
        return _GumbelDraws(self, Randomness(seeds, device))


class Randomness:
    """One stream of random numbers a sequence. Nothing in it waits for the device."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.seeds, self.device = list(seeds), device
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._keyed = torch.Generator(device)

    def accepts(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """One boolean each, (k,), true with these probabilities."""
        uniform = torch.rand(probabilities.shape, generator=self._generators[row], device=self.device)
        return uniform < probabilities

    def categorical(self, row: int, weights: torch.Tensor) -> torch.Tensor:
        """An index () drawn in proportion to non-negative weights, (vocabulary,)."""
        noise = torch.empty_like(weights).exponential_(generator=self._generators[row])
        return (weights / noise).argmax()

    def gumbel(self, row: int, position: int, size: int) -> torch.Tensor:
        """Gumbel noise, (size,), that depends on the sequence's seed and the position alone."""
        key = np.random.SeedSequence((self.seeds[row], position)).generate_state(1, np.uint64)[0]
        self._keyed.manual_seed(int(key))
        return -torch.empty(size, device=self.device).exponential_(generator=self._keyed).log()

    def select(self, rows: Sequence[int]) -> None:
        self.seeds = [self.seeds[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]


class Draws(ABC):
    """A sampler at work on n sequences.

    Args:
        sampler: the settings.
        randomness: of each sequence.
    """

    def __init__(self, sampler: Sampler, randomness: Randomness) -> None:
        self.sampler, self.randomness = sampler, randomness

    def draw(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the draft's next token in some of the sequences.

        Args:
            logits: (n, vocabulary) of the draft.
            rows: sequences to draw in.
            positions: of each of the n sequences, where the token will stand in it.

        Returns:
            (n,) tokens; those of other rows mean nothing. And the distributions that they were drawn from,
            (n, vocabulary), None for point masses.
        """
        if self.sampler.draft == "greedy":
            return logits.argmax(-1), None
        return self._sample(self.sampler.warp(logits), rows, positions)

    def _sample(
        self, log_p: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        probabilities = log_p.exp()
        tokens = torch.zeros(len(log_p), dtype=torch.long, device=log_p.device)
        for row in rows:
            tokens[row] = self.randomness.categorical(row, probabilities[row])
        return tokens, probabilities

    @abstractmethod
    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        gammas: Sequence[int],
        probabilities: torch.Tensor | None,
        positions: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide how many drafted tokens stand, and on what follows them.

        Args:
            logits: (n, most + 1, vocabulary) of the target, where the drafted tokens stand and behind the last.
            tokens: (n, most) drafted; a sequence's own are the first of its row.
            gammas: how many belong to each sequence.
            probabilities: (n, most, vocabulary) that `draw` gave; None for point masses.
            positions: of each sequence, where the first of the tokens stands in it.

        Returns:
            accepted (n,), and committed tokens (n, most + 1), of which the first accepted + 1 of each row count.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the sequences."""
        self.randomness.select(rows)


class _MatchingDraws(Draws):
    """Verifies by equality with what the target itself chooses at a position."""

    @abstractmethod
    def _choose(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The target's choices, (n, k), from logits (n, k, vocabulary) for positions from the given ones on."""

    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        gammas: Sequence[int],
        probabilities: torch.Tensor | None,
        positions: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        choices = self._choose(logits, positions)
        agrees = choices[:, :-1] == tokens
        if min(gammas) < tokens.shape[1]:
            agrees &= _inside(gammas, tokens)
        return agrees.long().cumprod(dim=1).sum(dim=1), choices


class _GreedyDraws(_MatchingDraws):
    def _choose(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        return logits.argmax(-1)


class _GumbelDraws(_MatchingDraws):
    def _choose(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        size = logits.shape[-1]
        noise = [
            torch.stack([self.randomness.gumbel(row, start + offset, size) for offset in range(logits.shape[1])])
            for row, start in enumerate(positions)
        ]
        return (self.sampler.warp(logits) + torch.stack(noise)).argmax(-1)

    def _sample(
        self, log_p: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        noise = torch.zeros_like(log_p)
        for row in rows:
            noise[row] = self.randomness.gumbel(row, positions[row], log_p.shape[-1])
        return (log_p + noise).argmax(-1), None  # verified by equality, whatever it was drawn from


class _RejectionDraws(Draws):
    def verify(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        gammas: Sequence[int],
        probabilities: torch.Tensor | None,
        positions: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.sampler.warp(logits).exp()
        if probabilities is None:
            q = torch.zeros_like(p).scatter_(2, _with_column(tokens)[..., None], 1.0)
        else:
            q = torch.cat([probabilities, torch.zeros_like(p[:, :1])], dim=1)
        q = q * _inside(gammas, q)[..., None]  # nothing is drafted at a bonus position: its residual is p
        drafted = tokens[..., None]
        ratio = (p[:, :-1].gather(2, drafted) / q[:, :-1].gather(2, drafted))[..., 0]
        accepted = torch.zeros(len(gammas), dtype=torch.long, device=p.device)
        committed = _with_column(tokens)
        for row, gamma in enumerate(gammas):
            accepts = self.randomness.accepts(row, ratio[row, :gamma])
            accepted[row] = accepts.long().cumprod(dim=0).sum()
            at = accepted[row : row + 1]  # a tensor, so that the host need not know it
            residual = (p[row].index_select(0, at) - q[row].index_select(0, at))[0].clamp(min=0)
            # Where p = q nothing is rejected but by rounding; what p says is then as good a residual as any.
            residual = torch.where(residual.sum() > 0, residual, p[row].index_select(0, at)[0])
            token = self.randomness.categorical(row, residual)
            committed[row].index_copy_(0, at, token[None])
        return accepted, committed


def _inside(gammas: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """(n, k) whether a column of `like`, (n, k, ...), holds one of the row's own drafted tokens."""
    columns = torch.arange(like.shape[1], device=like.device)
    return columns < to_device(gammas, like.device)[:, None]


def _with_column(tokens: torch.Tensor) -> torch.Tensor:
    """(n, k) tokens with a column of zeros behind them."""
    return torch.nn.functional.pad(tokens, (0, 1))
