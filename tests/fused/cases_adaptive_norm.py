"""Adaptive layer norms: the scale and shift of each sample, of each token, and beside a weight and bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor
EPS = 1e-6


def eager_adaptive(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """As the blocks of a diffusion transformer write it."""
    y = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    y = y if scale is None else y * (1 + scale)
    return y if shift is None else y + shift


def adaptive(x: Tensor, scale: Tensor, shift: Tensor, *rows: Tensor) -> Tensor:
    return fused.adaptive_layer_norm(x, scale, shift, *rows, eps=EPS)


def _saved(*tensors: Tensor) -> int:
    x = tensors[0]
    rows = x.numel() // max(x.shape[-1], 1)
    return nbytes(*tensors) + 2 * rows * torch.promote_types(x.dtype, torch.float32).itemsize


def _factor(*shape: int) -> Tensor:
    return normal(*shape, spread=0.5)


CASES = [
    Case(
        "adaptive_layer_norm",
        op=adaptive,
        eager=eager_adaptive,
        inputs=lambda rows, columns: (
            normal(2, rows, columns),
            _factor(2, 1, columns),
            _factor(2, 1, columns),
        ),
        saved=_saved,
        sums=(0, 1, 2),
        triton=False,
    ),
    Case(
        "adaptive_layer_norm of tokens, with weight",
        op=adaptive,
        eager=eager_adaptive,
        inputs=lambda rows, columns: (
            normal(rows, columns),
            _factor(rows, columns),
            _factor(columns),
            normal(columns),
            normal(columns),
        ),
        saved=_saved,
        sums=(0, 2, 3, 4),
        triton=False,
        long=True,
    ),
]
