"""The profiler: how long forwards take on this machine, and how well that predicts real steps (rule R4)."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speckv.costs import CostModel, StepCosts, Timings
from speckv.errors import SpecKVError
from speckv.features import Features
from speckv.live.caching import CachedModel
from speckv.live.decoder import SpeculativeDecoder
from speckv.live.models import ModelPair, chat_tokens
from speckv.live.results import Step
from speckv.machine import machine
from speckv.policy import Policy, State
from speckv.prompts import Prompt

#: Fixed gammas that the held-out steps are decoded with; those above gamma_max are left out.
HELD_OUT_GAMMAS = (0, 2, 4, 8)


class _Fixed(Policy):
    name = "profile-fixed"

    def __init__(self, gamma: int) -> None:
        super().__init__()
        self.gamma = gamma

    def choose_gamma(self, features: Features, state: State) -> npt.ArrayLike:
        return self.gamma


#: A forward to be timed: ("draft" or "verify", its tokens, tokens in the cache).
_Forward = tuple[str, int, int]


def profile(
    load: Callable[[str], ModelPair],
    compressions: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    name: str,
    gamma_max: int = 16,
    contexts: Sequence[int] = (128, 384),
    repeats: int = 9,
    max_new_tokens: int = 32,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CostModel:
    """Measure a cost model on this machine.

    Timed are forwards of the draft over 1, 2, 4, 8, … tokens and forwards of the target over every number of
    tokens up to gamma_max + 1, in shuffled order, so that a drift of the machine's speed does not look like a
    staircase. Then real prompts are decoded at fixed gammas, and each step is predicted from the tables.

    Args:
        load: gives the pair with the target at a compression. One pair is in memory at a time.
        compressions: of the target. The draft is timed beside each of them.
        prompts: decoded for the held-out steps.
        name: of the cost model.
        gamma_max: tokens drafted at most.
        contexts: tokens in the cache, increasing.
        repeats: timed forwards of each kind; the table holds their medians and interquartile ranges.
        max_new_tokens: of each held-out decode.
        seed: of the order of the measurements.
        provenance: kept in the model, beside machine, settings and held-out errors.
        progress: called with a compression, the measurements and decodes done there, and how many there are.

    Raises:
        SpecKVError: contexts do not increase from 1 or more, there is no compression or no prompt, or a model
            cannot be loaded.
    """
    if not compressions or len(prompts) < 2:
        raise SpecKVError("a profile needs a compression, and two prompts: one for the overhead, one to be held out")
    if not contexts or contexts[0] < 1 or list(contexts) != sorted(set(contexts)):
        raise SpecKVError(f"contexts must increase from 1 or more, and are {', '.join(map(str, contexts))}")
    draft_counts = [2**power for power in range((gamma_max + 1).bit_length())]
    verify_counts = list(range(1, gamma_max + 2))
    forwards: list[_Forward] = [("draft", n, context) for n in draft_counts for context in contexts]
    forwards += [("verify", n, context) for n in verify_counts for context in contexts]
    gammas = [gamma for gamma in HELD_OUT_GAMMAS if gamma <= gamma_max]
    total = len(forwards) * repeats + len(prompts) * len(gammas)
    rng = np.random.default_rng(seed)

    draft_seconds: dict[_Forward, list[float]] = {}
    verify: dict[str, Timings] = {}
    decodes: dict[str, list[tuple[int, list[Step]]]] = {}
    for compression in compressions:
        pair = load(compression)
        done = 0
        progress(compression, done, total)
        verify_seconds: dict[_Forward, list[float]] = {}
        order = [forwards[i] for i in rng.permutation(np.repeat(np.arange(len(forwards)), repeats))]
        for forward, seconds in _time_forwards(pair, forwards, order, rng):
            (draft_seconds if forward[0] == "draft" else verify_seconds).setdefault(forward, []).append(seconds)
            progress(compression, done := done + 1, total)
        verify[compression] = _timings(verify_seconds, "verify", verify_counts, contexts)
        decodes[compression] = []
        for prompt in prompts:
            tokens = chat_tokens(pair.target.tokenizer, prompt.text)
            for gamma in gammas:
                decoded = SpeculativeDecoder(*pair, _Fixed(gamma), gamma_max=gamma_max).generate(tokens, max_new_tokens)
                decodes[compression].append((len(tokens), decoded.steps))
                progress(compression, done := done + 1, total)
        # The next pair is loaded into the memory of this one.
        del pair
        gc.collect()

    draft = _timings(draft_seconds, "draft", draft_counts, contexts)
    # The first prompt's steps give the overhead, the others' are held out.
    steps = [step for runs in decodes.values() for _, steps in runs[: len(gammas)] for step in steps]
    overhead = statistics.median(
        step.seconds - step.draft_seconds - step.verify_seconds - step.controller_seconds for step in steps
    )
    settings = {"repeats": repeats, "seed": seed, "held_out_gammas": gammas, "max_new_tokens": max_new_tokens}
    costs = CostModel(name, draft, verify, max(overhead, 0.0))
    held_out = {
        compression: _held_out(costs, compression, runs[len(gammas) :]) for compression, runs in decodes.items()
    }
    costs.provenance.update(
        {"source": "measured by speckv profile", "machine": machine()}
        | (provenance or {})
        | {"settings": settings, "held_out": held_out}
    )
    return costs


def _time_forwards(
    pair: ModelPair, forwards: Sequence[_Forward], order: Sequence[_Forward], rng: np.random.Generator
) -> Iterator[tuple[_Forward, float]]:
    """Run the forwards in `order`, each behind a cache of its context length, and yield what each took.

    Choosing the tokens belongs to a forward, as in the live decoder. What the tokens are makes no difference to
    the time, so they are random.
    """
    models = {"draft": pair.draft, "verify": pair.target}
    most = max(n + context for _, n, context in forwards)
    tokens = torch.from_numpy(rng.integers(pair.target.vocabulary_size, size=(1, most)))
    caches: dict[tuple[str, int], CachedModel] = {}
    for which, _, context in forwards:
        if (which, context) not in caches:
            caches[which, context] = CachedModel(models[which])
            caches[which, context].prefill(tokens[:, :context].tolist())

    def seconds_of(which: str, n: int, context: int) -> float:
        cached = caches[which, context]
        new = tokens[:, context : context + n].to(cached.device)
        start = time.perf_counter()
        logits = cached.next_logits(new) if which == "draft" else cached.forward(new)
        logits.argmax(-1).tolist()
        seconds = time.perf_counter() - start
        cached.roll_back([context])
        return seconds

    for which, n in dict.fromkeys((which, n) for which, n, _ in forwards):
        seconds_of(which, n, forwards[0][2])  # the first forward of a shape sets up its kernels
    for forward in order:
        yield forward, seconds_of(*forward)


def _timings(
    samples: dict[_Forward, list[float]], which: str, counts: Sequence[int], contexts: Sequence[int]
) -> Timings:
    """Medians and interquartile ranges of the samples, as a table of tokens by contexts."""
    quartiles = np.array(
        [[np.quantile(samples[which, n, context], (0.25, 0.5, 0.75)) for context in contexts] for n in counts]
    )
    low, median, high = np.moveaxis(quartiles, -1, 0)
    return Timings(np.array(counts), np.array(contexts), seconds=median, spread=high - low)


def _held_out(costs: CostModel, compression: str, runs: Sequence[tuple[int, list[Step]]]) -> dict[str, Any]:
    """How well the tables predict the steps of live decodes, the policy's own time left out on both sides."""
    steps = [step for _, steps in runs for step in steps]
    contexts = np.array([length + step.position for length, steps in runs for step in steps])
    lags, forwards, gammas = (np.array([getattr(s, name) for s in steps]) for name in ("lag", "forwards", "gamma"))
    tables = StepCosts(costs, np.array([compression]), int(max(lags.max(), gammas.max() + 1)), int(contexts.max()))
    predicted = tables.seconds(np.zeros(len(steps), dtype=np.int64), contexts, lags, forwards, gammas)
    measured = np.array([step.seconds - step.controller_seconds for step in steps])
    return {
        "steps": len(steps),
        "median_relative_error": float(np.median(np.abs(predicted - measured) / measured)),
        "total_ratio": float(predicted.sum() / measured.sum()),
    }
