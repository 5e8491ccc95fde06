"""The profiler: how long forwards take on this machine, and how well that predicts real steps (rule R4)."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from speckv.live.results import Decoded, Step
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


#: A forward to be timed: ("draft" or "verify", its tokens, tokens in the cache, sequences that share it).
_Forward = tuple[str, int, int, int]
#: Steps of decodes, each with the tokens in front of it.
_Steps = list[tuple[int, Step]]


def profile(
    load: Callable[[str], ModelPair],
    compressions: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    name: str,
    gamma_max: int = 16,
    verify_tokens: Sequence[int] | None = None,
    contexts: Sequence[int] = (128, 384),
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 9,
    max_new_tokens: int = 32,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CostModel:
    """Measure a cost model on this machine.

    Timed are forwards of the draft over 1, 2, 4, 8, … tokens and forwards of the target over every number of
    tokens up to gamma_max + 1, each over every batch size, in shuffled order, so that a drift of the machine's speed
    does not look like a staircase. Then real prompts are decoded at fixed gammas, in batches of every size, and each
    step is predicted from the tables.

    Args:
        load: gives the pair with the target at a compression. One pair is in memory at a time.
        compressions: of the target. The draft is timed beside each of them.
        prompts: decoded for the held-out steps.
        name: of the cost model.
        gamma_max: tokens drafted at most.
        verify_tokens: tokens of the target's forwards, increasing from 1, if not every number is to be timed.
        contexts: tokens in the cache, increasing; in a batch those of its longest sequence.
        batch_sizes: sequences that share a forward, increasing.
        repeats: timed forwards of each kind; the table holds their medians and interquartile ranges.
        max_new_tokens: of each held-out decode.
        seed: of the order of the measurements.
        provenance: kept in the model, beside machine, settings and held-out errors.
        progress: called with a compression, the measurements and decodes done there, and how many there are.

    Raises:
        SpecKVError: contexts, batch sizes or tokens do not increase from 1 or more, there is no compression or no
            prompt, a model cannot be loaded, or it has fewer positions than a context needs.
    """
    if not compressions or len(prompts) < 2:
        raise SpecKVError("a profile needs a compression, and two prompts: one for the overhead, one to be held out")
    counts = {
        "draft": [2**power for power in range((gamma_max + 1).bit_length())],
        "verify": list(verify_tokens or range(1, gamma_max + 2)),
    }
    for what, values in (("contexts", contexts), ("batch sizes", batch_sizes), ("tokens", counts["verify"])):
        if not values or values[0] < 1 or list(values) != sorted(set(values)):
            raise SpecKVError(f"{what} must increase from 1 or more, and are {', '.join(map(str, values))}")
    if counts["verify"][0] != 1:
        raise SpecKVError(f"tokens must start with 1, and are {', '.join(map(str, counts['verify']))}")
    forwards: list[_Forward] = [
        (which, n, context, size)
        for which, numbers in counts.items()
        for n in numbers
        for context in contexts
        for size in batch_sizes
    ]
    gammas = [gamma for gamma in HELD_OUT_GAMMAS if gamma <= gamma_max]
    texts = {size: _texts(prompts, size) for size in batch_sizes}
    total = len(forwards) * repeats + len(gammas) * sum(map(len, texts.values()))
    rng = np.random.default_rng(seed)

    draft_seconds: dict[_Forward, list[float]] = {}
    verify: dict[tuple[str, int], Timings] = {}
    first: dict[int, _Steps] = {size: [] for size in batch_sizes}
    others: dict[tuple[str, int], _Steps] = {}
    for compression in compressions:
        pair = load(compression)
        _check_room(pair, contexts[-1], max(counts["draft"][-1], counts["verify"][-1]))
        done = 0
        progress(compression, done, total)
        verify_seconds: dict[_Forward, list[float]] = {}
        order = [forwards[i] for i in rng.permutation(np.repeat(np.arange(len(forwards)), repeats))]
        for forward, seconds in _time_forwards(pair, forwards, order, rng):
            (draft_seconds if forward[0] == "draft" else verify_seconds).setdefault(forward, []).append(seconds)
            progress(compression, done := done + 1, total)
        for size in batch_sizes:
            verify[compression, size] = _timings(verify_seconds, "verify", counts["verify"], contexts, size)
            others[compression, size] = []
            for number, batch in enumerate(texts[size]):
                tokens = [chat_tokens(pair.target.tokenizer, prompt.text) for prompt in batch]
                for gamma in gammas:
                    decoder = SpeculativeDecoder(*pair, _Fixed(gamma), gamma_max=gamma_max)
                    steps = _shared_steps(tokens, decoder.generate_batch(tokens, max_new_tokens))
                    (others[compression, size] if number else first[size]).extend(steps)
                    progress(compression, done := done + 1, total)
        # The next pair is loaded into the memory of this one.
        del pair
        gc.collect()

    models: list[CostModel] = []
    for size in batch_sizes:
        # The first prompt's steps give the overhead, the others' are held out.
        overhead = statistics.median(
            step.seconds - step.draft_seconds - step.verify_seconds - step.controller_seconds for _, step in first[size]
        )
        draft = _timings(draft_seconds, "draft", counts["draft"], contexts, size)
        of_size = {compression: verify[compression, size] for compression in compressions}
        models.append(CostModel(name, draft, of_size, max(overhead, 0.0), batch_size=size))
    held_out = {
        model.batch_size: {name: _held_out(model, name, others[name, model.batch_size]) for name in compressions}
        for model in models
    }
    settings = {"repeats": repeats, "seed": seed, "held_out_gammas": gammas, "max_new_tokens": max_new_tokens}
    whole = {"source": "measured by speckv profile", "machine": machine()} | (provenance or {})
    whole |= {"settings": settings, "held_out": held_out.pop(batch_sizes[0])}
    if held_out:
        whole["held_out_batches"] = {str(size): check for size, check in held_out.items()}
    return replace(models[0], provenance=whole, batches={model.batch_size: model for model in models[1:]})


def _check_room(pair: ModelPair, context: int, tokens: int) -> None:
    """Refuse what a model would take for an index out of range."""
    for model in pair:
        most = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
        if most and context + tokens > most:
            raise SpecKVError(
                f"{context} tokens in the cache and {tokens} in the forward are more than the {most} positions of "
                f"{model.name}; profile shorter contexts"
            )


def _texts(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches to decode: one of the first prompt alone, then all others in turn."""
    first, *others = prompts
    rounds = range(0, max(len(others), size), size)
    return [[first] * size, *([others[(start + n) % len(others)] for n in range(size)] for start in rounds)]


def _shared_steps(prompts: Sequence[Sequence[int]], texts: Sequence[Decoded]) -> _Steps:
    """The steps of a batch while all of its sequences were going. They share each forward, so that what is most among
    them decides how long it takes."""
    shared: _Steps = []
    for steps in zip(*(text.steps for text in texts), strict=False):
        context = max(len(tokens) + step.position for tokens, step in zip(prompts, steps, strict=True))
        gamma, lag, forwards = (max(getattr(step, name) for step in steps) for name in ("gamma", "lag", "forwards"))
        shared.append((context, replace(steps[0], gamma=gamma, lag=lag, forwards=forwards)))
    return shared


def _time_forwards(
    pair: ModelPair, forwards: Sequence[_Forward], order: Sequence[_Forward], rng: np.random.Generator
) -> Iterator[tuple[_Forward, float]]:
    """Run the forwards in `order`, each behind a cache of its context length, and yield what each took.

    Choosing the tokens belongs to a forward, as in the live decoder, and so does taking back those of a batch: its
    sequences have different lengths and accept different numbers. What the tokens are makes no difference to the time,
    so they are random.
    """
    models = {"draft": pair.draft, "verify": pair.target}
    most = max(n + context for _, n, context, _ in forwards)
    widest = max(size for *_, size in forwards)
    tokens = torch.from_numpy(rng.integers(pair.target.vocabulary_size, size=(widest, most)))
    caches: dict[tuple[str, int, int], CachedModel] = {}
    for which, _, context, size in forwards:
        if (which, context, size) not in caches:
            CachedModel(models[which], size)  # refuses a model whose cache can't hold so many
            # One text for all sequences: it is computed once, and cut to different lengths.
            cached = caches[which, context, size] = CachedModel(models[which])
            cached.prefill(tokens[:1, :context].tolist())
            cached.select([0] * size)
            cached.roll_back([max(context - row, 1) for row in range(size)])

    def seconds_of(which: str, n: int, context: int, size: int) -> float:
        cached = caches[which, context, size]
        before = list(cached.lengths)
        new = tokens[:size, context : context + n].to(cached.device)
        start = time.perf_counter()
        logits = cached.next_logits(new) if which == "draft" else cached.forward(new)
        logits.argmax(-1).tolist()
        if which == "verify":
            cached.roll_back([length + 1 + row % n for row, length in enumerate(before)])
        seconds = time.perf_counter() - start
        cached.roll_back(before)
        return seconds

    for which, n, size in dict.fromkeys((which, n, size) for which, n, _, size in forwards):
        seconds_of(which, n, forwards[0][2], size)  # the first forward of a shape sets up its kernels
    for forward in order:
        yield forward, seconds_of(*forward)


def _timings(
    samples: dict[_Forward, list[float]], which: str, counts: Sequence[int], contexts: Sequence[int], size: int
) -> Timings:
    """Medians and interquartile ranges of the samples of a batch size, as a table of tokens by contexts."""
    quartiles = np.array(
        [[np.quantile(samples[which, n, context, size], (0.25, 0.5, 0.75)) for context in contexts] for n in counts]
    )
    low, median, high = np.moveaxis(quartiles, -1, 0)
    return Timings(np.array(counts), np.array(contexts), seconds=median, spread=high - low)


def _held_out(costs: CostModel, compression: str, played: _Steps) -> dict[str, Any]:
    """How well the tables predict the steps of live decodes, the policy's own time left out on both sides."""
    contexts, steps = np.array([context for context, _ in played]), [step for _, step in played]
    lags, forwards, gammas = (np.array([getattr(s, name) for s in steps]) for name in ("lag", "forwards", "gamma"))
    tables = StepCosts(costs, np.array([compression]), int(max(lags.max(), gammas.max() + 1)), int(contexts.max()))
    predicted = tables.seconds(np.zeros(len(steps), dtype=np.int64), contexts, lags, forwards, gammas)
    measured = np.array([step.seconds - step.controller_seconds for step in steps])
    return {
        "steps": len(steps),
        "median_relative_error": float(np.median(np.abs(predicted - measured) / measured)),
        "total_ratio": float(predicted.sum() / measured.sum()),
    }
