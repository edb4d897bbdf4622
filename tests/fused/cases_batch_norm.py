"""Batch norms with an activation and a residual sum, by the statistics of the batch and by given ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor
CHANNELS = 6


def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
    # Two samples more than rows: one value for each channel is an error.
    return normal(rows + 2, CHANNELS, columns), normal(CHANNELS), normal(CHANNELS)


def with_residual(rows: int, columns: int) -> tuple[Tensor, ...]:
    return *inputs(rows, columns), normal(rows + 2, CHANNELS, columns)


def with_statistics(rows: int, columns: int) -> tuple[Tensor, ...]:
    return *inputs(rows, columns), normal(CHANNELS), normal(CHANNELS).square() + 0.5


def _saved(*tensors: Tensor) -> int:
    """The tensors and the statistics of each channel."""
    return nbytes(*tensors) + 2 * CHANNELS * torch.promote_types(tensors[0].dtype, torch.float32).itemsize


CASES = [
    Case(
        "batch_norm silu",
        op=lambda x, weight, bias: fused.batch_norm(x, None, None, weight, bias, True, activation="silu"),
        eager=lambda x, weight, bias: F.silu(F.batch_norm(x, None, None, weight, bias, True)),
        inputs=inputs,
        saved=_saved,
        sums=(0, 1, 2),
        special=False,
        triton=False,
    ),
    Case(
        "batch_norm relu, residual",
        op=lambda x, weight, bias, residual: fused.batch_norm(
            x, None, None, weight, bias, True, activation="relu", residual=residual
        ),
        eager=lambda x, weight, bias, residual: F.relu(F.batch_norm(x, None, None, weight, bias, True) + residual),
        inputs=with_residual,
        saved=_saved,
        sums=(0, 1, 2),
        special=False,
        triton=False,
        long=True,
    ),
    Case(
        "batch_norm relu, given statistics",
        op=lambda x, weight, bias, mean, var: fused.batch_norm(x, mean, var, weight, bias, activation="relu"),
        eager=lambda x, weight, bias, mean, var: F.relu(F.batch_norm(x, mean, var, weight, bias)),
        inputs=with_statistics,
        saved=lambda x, weight, bias, mean, var: _saved(x, x, weight, bias),
        frozen=(3, 4),
        sums=(1, 2),
        triton=False,
        long=True,
    ),
    Case(
        "batch_norm gelu, residual, given statistics",
        op=lambda x, weight, bias, residual, mean, var: fused.batch_norm(
            x, mean, var, weight, bias, activation="gelu", residual=residual
        ),
        eager=lambda x, weight, bias, residual, mean, var: F.gelu(F.batch_norm(x, mean, var, weight, bias) + residual),
        inputs=lambda rows, columns: (*with_residual(rows, columns), *with_statistics(rows, columns)[3:]),
        saved=lambda x, weight, bias, residual, mean, var: _saved(x, weight, bias, residual),
        frozen=(4, 5),
        sums=(1, 2),
        triton=False,
        long=True,
    ),
]
