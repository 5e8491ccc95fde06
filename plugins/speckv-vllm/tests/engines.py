"""Engines of vLLM in this process, of which it can hold one at a time, and what they write and count."""

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from pair import MOST, Pair
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TOKENS = 40
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@contextlib.contextmanager
def engine(pair: Pair, **options) -> Iterator[LLM]:
    made = LLM(
        str(pair.folder / "target"),
        enforce_eager=True,
        dtype="float32",
        disable_log_stats=False,
        seed=0,
        **(
            {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 32, "kv_cache_memory_bytes": 2**26}
            | options
        ),
    )
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()
        del made
        cleanup_dist_env_and_memory()
        gc.collect()


def speculative(pair: Pair, ranges: list[list[int]], **options) -> dict:
    return {
        "method": "draft_model",
        "model": str(pair.folder / "draft"),
        "num_speculative_tokens": MOST,
        "num_speculative_tokens_per_batch_size": ranges,
    } | options


def greedy(tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **({"temperature": 0} | options))


def generate(llm: LLM, texts: list[list[int]], tokens: int = TOKENS, **options) -> list[list[int]]:
    sampling = greedy(tokens, **options)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def by_hand(
    llm: LLM,
    texts: list[list[int]],
    tokens: int = TOKENS,
    *,
    between: Callable[[LLM, int], None],
) -> dict[str, list[int]]:
    """The texts that come to an end, by number; `between` is called before each step of the engine, from 0."""
    for number, text in enumerate(texts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": text}, greedy(tokens))
    found = {}
    for step in itertools.count():
        between(llm, step)
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        if not llm.llm_engine.has_unfinished_requests():
            return found


def metric(llm: LLM, name: str) -> int:
    return next(of.value for of in llm.get_metrics() if of.name == f"vllm:{name}")


def counted(llm: LLM) -> Counter:
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return Counter({name: found.get(f"vllm:spec_decode_{name}", 0) for name in COUNTERS})
