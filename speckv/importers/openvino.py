"""What OpenVINO GenAI tells of the steps of a request."""

from collections.abc import Iterator
from typing import Any


def steps_of(metrics: Any, num_assistant_tokens: int, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """The steps of one greedy request with a draft model, as `StepLogWriter.write` takes them.

    The first forward reads the prompt and drafts nothing. The last step of a text that ended by itself is left out:
    how much of its draft stood behind the end is not known.

    Args:
        metrics: `extended_perf_metrics` of what `LLMPipeline.generate` returned for a single prompt.
        num_assistant_tokens: of the request; how long drafts were that a threshold ended is not told.
        max_new_tokens: of the request.

    Yields:
        `step`, from 0; `gamma` and `accepted`, tokens; `seconds`, None of the prompt's step.
    """
    raw, committed = metrics.raw_metrics, 0
    tokens = [int(count) for count in raw.m_batch_sizes]
    whole = sum(tokens) >= max_new_tokens
    for step, (count, microseconds) in enumerate(zip(tokens, raw.token_infer_durations, strict=True)):
        gamma = min(num_assistant_tokens, max_new_tokens - committed - 1) if step else 0
        committed += count
        if whole or committed < sum(tokens):
            yield {"step": step, "gamma": gamma, "accepted": count - 1,
                   "seconds": microseconds / 1e6 if step else None}  # fmt: skip
