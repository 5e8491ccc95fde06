"""Recordings and cost models made with NumPy alone: what the kit plays policies on, and tests can use as well."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from speckv.costs import CostModel, Timings
from speckv.features import FloatArray
from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS, Manifest, Rollout, Rollouts

TASKS = ("code", "math", "chat")
#: How often the draft is right in each task.
EASE = {"code": (9.0, 1.0), "math": (4.0, 1.5), "chat": (2.0, 1.5)}


def make_rollout(
    rng: np.random.Generator,
    identifier: str = "p",
    task: str = "code",
    compression: str = "bf16",
    gamma_max: int = 8,
    budget: int = 40,
    length: int | None = None,
) -> Rollout:
    """One sequence; shorter than the budget, it ended by itself. The draft's signals say how likely it is right."""
    length = budget if length is None else length
    chance = np.clip(rng.beta(*EASE[task], length), 0.02, 0.98)
    right = rng.random(length) < chance
    tokens = rng.integers(1, 1000, length).astype(np.int32)
    room = np.clip(budget - 2 - np.arange(length), 0, gamma_max - 1)
    cut = rng.random(length) < 0.2  # the draft proposes an end of the text, here or behind
    off_lengths = np.where(right, 0, np.where(cut, rng.integers(0, room + 1), room)).astype(np.int32)
    behind = np.clip(rng.beta(2, 2, off_lengths.sum()), 0.02, 0.98)
    target = {"target_entropy": rng.gamma(1.0, 0.5, length), "target_margin": rng.gamma(2.0, 2.0, length)}
    return Rollout(
        id=identifier,
        task=task,
        compression=compression,
        prompt_tokens=rng.integers(1, 1000, int(rng.integers(3, 30))).astype(np.int32),
        tokens=tokens,
        draft_tokens=np.where(right, tokens, tokens + 1).astype(np.int32),
        signals=_signals(rng, chance) | {name: values.astype(np.float32) for name, values in target.items()},
        off_lengths=off_lengths,
        off_tokens=rng.integers(1, 1000, len(behind)).astype(np.int32),
        off_signals=_signals(rng, behind),
        ended=length < budget,
    )


def _signals(rng: np.random.Generator, chance: FloatArray) -> dict[str, npt.NDArray[np.float32]]:
    top1 = np.clip(chance + rng.normal(0, 0.05, len(chance)), 0.01, 0.99)
    top2 = np.minimum((1 - top1) * rng.uniform(0.2, 0.9, len(chance)), top1)
    values = {
        "draft_entropy": 3 * (1 - top1) + rng.uniform(0, 0.2, len(chance)),
        "draft_top1": top1,
        "draft_top2": top2,
        "draft_top10": top1 + top2 + (1 - top1 - top2) * 0.8,
    }
    return {name: values[name].astype(np.float32) for name in DRAFT_SIGNALS}


def make_sequences(
    prompts: int = 12,
    compressions: Sequence[str] = ("bf16", "nf4"),
    gamma_max: int = 8,
    budget: int = 40,
    seed: int = 0,
) -> list[Rollout]:
    """Every prompt at every compression; tasks take turns and about a third of the sequences end early."""
    rng = np.random.default_rng(seed)
    sequences = []
    for number in range(prompts):
        for compression in compressions:
            early = rng.random() < 0.35
            length = int(rng.integers(1, budget)) if early and budget > 1 else budget
            task = TASKS[number % len(TASKS)]
            sequences.append(make_rollout(rng, f"p{number:03}", task, compression, gamma_max, budget, length))
    return sequences


def make_rollouts(gamma_max: int = 8, budget: int = 40, **keywords: Any) -> Rollouts:
    """`make_sequences` as dense arrays."""
    sequences = make_sequences(gamma_max=gamma_max, budget=budget, **keywords)
    return Rollouts.from_sequences(sequences, Manifest(gamma_max, budget, {"target": "synthetic"}))


def spelled(
    right: str, gamma_max: int = 4, budget: int | None = None, prompt: int = 5, **signals: Sequence[float]
) -> Rollout:
    """A sequence written by hand: `right` holds 1 where the draft is right and 0 where it is wrong.

    Args:
        signals: (T,) values of a signal, or `off_` and its name for the continuations; 0.5 where nothing is said.
    """
    length = len(right)
    budget = length if budget is None else budget
    tokens = np.arange(10, 10 + length, dtype=np.int32)
    hit = np.array([letter == "1" for letter in right])
    off = np.where(hit, 0, np.clip(budget - 2 - np.arange(length), 0, gamma_max - 1)).astype(np.int32)

    def values(name: str, count: int) -> npt.NDArray[np.float32]:
        return np.array(signals.get(name, [0.5] * count), dtype=np.float32)

    return Rollout(
        id="spelled",
        task="code",
        compression="bf16",
        prompt_tokens=np.arange(prompt, dtype=np.int32),
        tokens=tokens,
        draft_tokens=np.where(hit, tokens, -1).astype(np.int32),
        signals={name: values(name, length) for name in DRAFT_SIGNALS | TARGET_SIGNALS},
        off_lengths=off,
        off_tokens=np.zeros(off.sum(), dtype=np.int32),
        off_signals={name: values(f"off_{name}", off.sum()) for name in DRAFT_SIGNALS},
        ended=length < budget,
    )


def dense(*sequences: Rollout, gamma_max: int = 4, budget: int | None = None) -> Rollouts:
    """Hand-made sequences as dense arrays."""
    budget = max(len(sequence.tokens) for sequence in sequences) if budget is None else budget
    return Rollouts.from_sequences(sequences, Manifest(gamma_max, budget, {}))


def make_costs(
    draft: float = 0.01,
    verify: float = 0.05,
    compressions: Sequence[str] = ("bf16", "nf4"),
    stair: float = 0.01,
    lag: float = 0.002,
    growth: float = 1.2,
    name: str = "toy",
    controller: dict[str, tuple[float, float]] | None = None,
) -> CostModel:
    """Seconds with a staircase of four tokens in the target and a draft that pays for the tokens it catches up on.

    Args:
        draft, verify: of a forward of one token.
        stair: more for the target behind each fourth token; each further compression is 1.5 times as slow.
        lag: more for the draft for each token behind the first.
        growth: factor from a context of 1 to one of 200 tokens.
    """
    tokens, contexts = np.arange(1, 18), np.array([1, 200])
    growing = np.array([1.0, growth])
    base = verify + stair * ((tokens - 1) // 4)
    return CostModel(
        name=name,
        draft=Timings(tokens, contexts, (draft + lag * (tokens - 1))[:, None] * growing),
        verify={c: Timings(tokens, contexts, base[:, None] * growing * 1.5**n) for n, c in enumerate(compressions)},
        overhead=0.0007,
        controller=controller or {},
    )
