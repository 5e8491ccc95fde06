"""Signals of a next-token distribution, computed where the logits are."""

import torch

from speckv.errors import SpecKVError


def draft_signals(logits: torch.Tensor) -> dict[str, list[float]]:
    """Entropy in nats, the two largest probabilities, and the mass of the ten largest.

    Args:
        logits: (n, vocabulary) float32; -inf marks an impossible token.

    Returns:
        Lists of n floats by the names in `speckv.traces.DRAFT_SIGNALS`.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    p = log_p.exp()
    top = p.topk(min(10, p.shape[-1]), dim=-1).values
    columns = torch.stack([entropy(p, log_p), top[:, 0], top[:, 1], top.sum(-1).clamp(max=1)]).tolist()
    return _checked(dict(zip(("draft_entropy", "draft_top1", "draft_top2", "draft_top10"), columns, strict=True)))


def target_signals(logits: torch.Tensor) -> dict[str, list[float]]:
    """Entropy in nats, and the margin between the two largest logits.

    Args:
        logits: (n, vocabulary) float32; -inf marks an impossible token.

    Returns:
        Lists of n floats by the names in `speckv.traces.TARGET_SIGNALS`.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    top = logits.topk(2, dim=-1).values
    columns = torch.stack([entropy(log_p.exp(), log_p), top[:, 0] - top[:, 1]]).tolist()
    return _checked(dict(zip(("target_entropy", "target_margin"), columns, strict=True)))


def entropy(p: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Entropy of the last dimension in nats, with 0 log 0 = 0."""
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1).clamp(max=0.0)


def _checked(signals: dict[str, list[float]]) -> dict[str, list[float]]:
    for name, values in signals.items():
        for index, value in enumerate(values):
            if value != value:
                raise SpecKVError(f"{name} is not a number at row {index}: the model's logits hold NaN")
    return signals
