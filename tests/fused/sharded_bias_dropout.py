"""Run from sharded_cases.py: bias + dropout + residual on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fused

Tensor = torch.Tensor


def bias_dropout_cases(check: Callable[..., None], mesh: Any) -> None:
    """Nothing is sent, with dropout or without; what is kept is kept in the gradient too."""
    x, residual = torch.randn(2, 4, 6, 10, dtype=torch.float64)
    bias = torch.randn(10, dtype=torch.float64)
    column, batch, sequence, whole = Shard(2), Shard(0), Shard(1), Replicate()
    for p in (0.0, 1.0):  # what does not depend on random numbers

        def op(x: Tensor, bias: Tensor, residual: Tensor, p: float = p) -> Tensor:
            return fused.bias_dropout_add(x, bias, residual, p)

        inputs = [x, bias, residual]
        check("column", op, inputs, [column, Shard(0), column], column, [column, Shard(0), column])
        check("batch", op, inputs, [batch, whole, batch], batch, [batch, Partial(), batch])
        check("sequence", op, inputs, [sequence, None, sequence], sequence, [sequence, None, sequence], True)
        check("residual cut", op, inputs, [whole, whole, column], column, [None, None, column], True)
    _random(x, bias, residual, mesh)


def _random(x: Tensor, bias: Tensor, residual: Tensor, mesh: Any) -> None:
    for placement, bias_placement in ((Shard(2), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())):
        spread = distribute_tensor(x, mesh, [placement]).requires_grad_()
        other = distribute_tensor(residual, mesh, [placement])
        out = fused.bias_dropout_add(spread, distribute_tensor(bias, mesh, [bias_placement]), other, 0.5)
        assert isinstance(out, DTensor) and out.placements == (placement,)
        added = out.full_tensor() - residual
        kept = added.abs() > 1e-9
        assert 0.3 < kept.double().mean() < 0.7
        torch.testing.assert_close(added, torch.where(kept, 2 * (x + bias), 0))
        (gradient,) = torch.autograd.grad(out.sum(), spread)
        torch.testing.assert_close(gradient.full_tensor(), 2 * kept.double())
