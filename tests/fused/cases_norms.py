"""RMS and layer norms, with and without a residual sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor
EPS = 1e-5


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def eager_rms_norm(x: Tensor, weight: Tensor | None, eps: float = EPS, casting: str = "llama") -> Tensor:
    """As modeling code writes it, but float64 stays float64."""
    normed = x.to(statistics_dtype(x))
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "llama":
        return weight * normed.to(x.dtype)
    factor = weight.to(normed.dtype)
    return (normed * (1.0 + factor if casting == "gemma" else factor)).type_as(x)


def eager_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _statistics(x: Tensor, numbers: int) -> int:
    return numbers * x.numel() // max(x.shape[-1], 1) * statistics_dtype(x).itemsize


def _rms(casting: str) -> Case:
    return Case(
        f"rms_norm {casting}",
        op=lambda x, weight: fused.rms_norm(x, weight, EPS, casting=casting),
        eager=lambda x, weight: eager_rms_norm(x, weight, EPS, casting),
        inputs=lambda rows, columns: (normal(2, rows, columns), normal(columns)),
        saved=lambda x, weight: nbytes(x, weight) + _statistics(x, 1),
        sums=(0, 1),
    )


CASES = [
    *map(_rms, ("llama", "gemma", "torch")),
    Case(
        "rms_norm without weight",
        op=lambda x: fused.rms_norm(x, None, EPS),
        eager=lambda x: eager_rms_norm(x, None),
        inputs=lambda rows, columns: (normal(rows, columns),),
        saved=lambda x: nbytes(x) + _statistics(x, 1),
        sums=(0,),
    ),
    Case(
        "add_rms_norm",
        op=lambda x, residual, weight: fused.add_rms_norm(x, residual, weight, EPS),
        eager=lambda x, residual, weight: (eager_rms_norm(x + residual, weight), x + residual),
        inputs=lambda rows, columns: (normal(rows, columns), normal(rows, columns), normal(columns)),
        saved=lambda x, residual, weight: nbytes(x, weight) + _statistics(x, 1),
        sums=(0, 1, 2),
    ),
    Case(
        "layer_norm",
        op=lambda x, weight, bias: fused.layer_norm(x, weight, bias, EPS),
        eager=eager_layer_norm,
        inputs=lambda rows, columns: (normal(2, rows, columns), normal(columns), normal(columns)),
        saved=lambda x, weight, bias: nbytes(x, weight) + _statistics(x, 2),
        sums=(0, 1, 2),
    ),
    Case(
        "layer_norm without weight",
        op=lambda x, bias: fused.layer_norm(x, None, bias, EPS),
        eager=lambda x, bias: eager_layer_norm(x, torch.ones_like(bias), bias),
        inputs=lambda rows, columns: (normal(rows, columns), normal(columns)),
        saved=lambda x, bias: nbytes(x) + _statistics(x, 2),
        sums=(0, 1),
    ),
    Case(
        "add_layer_norm",
        op=lambda x, residual, weight, bias: fused.add_layer_norm(x, residual, weight, bias, EPS),
        eager=lambda x, residual, weight, bias: (eager_layer_norm(x + residual, weight, bias), x + residual),
        inputs=lambda rows, columns: (normal(rows, columns), normal(rows, columns), normal(columns), normal(columns)),
        saved=lambda x, residual, weight, bias: nbytes(x, weight) + _statistics(x, 2),
        sums=(0, 1, 2, 3),
    ),
]
