"""Signals of a next-token distribution, computed where the logits are. Nothing here waits for the device."""

import torch

from speckv.traces import DRAFT_SIGNALS, TARGET_SIGNALS

#: Signals of a drawn token: those of its distribution, and the probability of the token itself.
DRAWN_SIGNALS = (*DRAFT_SIGNALS, "draft_probability")


def draft_signals(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Entropy in nats, the two largest probabilities, and the mass of the ten largest.

    Args:
        logits: (..., vocabulary) float32; -inf marks an impossible token.

    Returns:
        (...) each, by the names in `speckv.traces.DRAFT_SIGNALS`; NaN where logits hold NaN.
    """
    return _draft_signals(torch.log_softmax(logits, dim=-1))


def drawn_signals(logits: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `draft_signals`, with the probability of the tokens, (...), that were drawn."""
    log_p = torch.log_softmax(logits, dim=-1)
    signals = _draft_signals(log_p)
    log_drawn = log_p.gather(-1, tokens[..., None])[..., 0]
    # Of the likeliest token it is the very number that a recording keeps: exp() of another shape may round otherwise.
    likeliest = log_drawn == log_p.amax(-1)
    return signals | {"draft_probability": torch.where(likeliest, signals["draft_top1"], log_drawn.exp())}


def _draft_signals(log_p: torch.Tensor) -> dict[str, torch.Tensor]:
    top = log_p.topk(min(10, log_p.shape[-1]), dim=-1).values.exp()
    second = top[..., 1] if top.shape[-1] > 1 else torch.zeros_like(top[..., 0])
    columns = (entropy(log_p), top[..., 0], second, top.sum(-1).clamp(max=1))
    return dict(zip(DRAFT_SIGNALS, columns, strict=True))


def target_signals(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Entropy in nats, and the margin between the two largest logits.

    Args:
        logits: (..., vocabulary) float32; -inf marks an impossible token.

    Returns:
        (...) each, by the names in `speckv.traces.TARGET_SIGNALS`; NaN where logits hold NaN.
    """
    top = logits.topk(2, dim=-1).values
    columns = (entropy(torch.log_softmax(logits, dim=-1)), top[..., 0] - top[..., 1])
    return dict(zip(TARGET_SIGNALS, columns, strict=True))


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of the last dimension in nats, with 0 log 0 = 0."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1).clamp(max=0.0)
