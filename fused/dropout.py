"""Random masks of dropout, drawn as in eager torch."""

from __future__ import annotations

import torch


def check_probability(op: str, p: float) -> None:
    """Raise ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout probability must be between 0 and 1, got {p}")


def keep_mask(like: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Draw the keep mask of ``F.dropout`` for a contiguous tensor, bit for bit.

    Args:
        like: gives shape and device.
        p: probability of being dropped.
        dtype: of the tensor that eager torch would apply dropout to.

    Returns:
        Bool tensor of the shape of `like`, True = kept. The generator advances as far as in ``F.dropout``.
    """
    if p == 1.0:
        return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    if like.device.type == "cpu":
        return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1.0 - p)
    # The fused kernel of the device has a separate random stream, which depends on the dtype.
    ones = torch.ones(like.shape, dtype=dtype, device=like.device)
    return torch.native_dropout(ones, p, True)[1]


def keep_scale(p: float) -> float:
    """Return the factor of kept elements."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)
