"""Masked softmax for the compiler, with bool masks given as integers.

The compiler's loops load bools one by one: on the CPU, a softmax takes up to three times as long with a bool mask as
with integers of the scores' width.
"""

from __future__ import annotations

from typing import Any

import torch

from fused.backends.reference import softmax as formulas

Tensor = torch.Tensor


def widened(mask: Tensor, scores: Tensor) -> Tensor:
    """Convert a bool mask on the CPU to int32 where several rows of the scores share its elements.

    A mask of as many elements as the scores stays as it is: it would take as much memory as they do.
    """
    shared = mask.is_cpu and 2 * mask.numel() <= scores.numel()
    return mask.int() if shared and mask.dtype == torch.bool else mask


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return mask != 0 if mask is not None and mask.dtype == torch.int32 else mask


def masked_softmax(x: Tensor, mask: Tensor | None, *others: Any, **settings: Any) -> Any:
    """Compute the reference formula of this name."""
    return formulas.masked_softmax(x, _as_bool(mask), *others, **settings)


def masked_softmax_backward(*args: Any, **settings: Any) -> Any:
    """Compute the reference formula of this name."""
    *probabilities_and_gradients, filled, scale, keep_scale = args
    given = (*probabilities_and_gradients, _as_bool(filled), scale, keep_scale)
    return formulas.masked_softmax_backward(*given, **settings)
