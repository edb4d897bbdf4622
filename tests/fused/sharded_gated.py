"""Run from sharded_cases.py: the gated activations on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fused


def gated_cases(check: Callable[..., None], mesh: Any) -> None:
    """Two tensors stay on their shards, hidden ones too; one tensor is gathered where its halves are cut."""
    y, bias = torch.randn(4, 6, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    weights = torch.rand(4, 6, 1, dtype=torch.float64)
    gate, up = y.chunk(2, -1)
    column, batch, whole = Shard(2), Shard(0), Replicate()

    def two(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return fused.gated_activation(gate, up, "silu", linear_offset=1.0, clamp_value=1.0)

    def weighted(gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused.gated_activation(gate, up, "gelu", weights=weights)

    check("columns of two", two, [gate, up], [column, column], column, [column, column])
    check("batch of two", two, [gate, up], [batch, batch], batch, [batch, batch])
    check("up is cut", two, [gate, up], [whole, column], column, [None, column], True)
    placements = [column, column, whole]
    check("weights", weighted, [gate, up, weights], placements, column, [column, column, Partial()])
    check("batch of one", fused.bias_swiglu, [y, bias], [batch, whole], batch, [batch, Partial()])
    check("uneven", fused.bias_swiglu, [y[:3], bias], [batch, whole], batch, [batch, Partial()])
    three, sequence = [y, bias, weights], Shard(1)
    placements = [sequence, whole, sequence]
    check("all of it", fused.weighted_bias_geglu, three, placements, sequence, [sequence, Partial(), sequence])
    check("halves cut", fused.swiglu, [y], [column], whole, [column], True)
    function = fused.BiasGeGLUFunction.apply
    check("function", function, [y, bias], [batch, whole], batch, [batch, Partial()])

    # A column-parallel linear layer of Megatron's gives plain shards, each with a gate and an up of its own.
    rank = dist.get_rank()
    out = fused.bias_swiglu(y.chunk(2, -1)[rank], distribute_tensor(bias, mesh, [Shard(0)]))
    assert not isinstance(out, DTensor)
    torch.testing.assert_close(out, fused.bias_swiglu(y.chunk(2, -1)[rank], bias.chunk(2)[rank]))

    parts = DTensor.from_local(y / 2, mesh, [Partial()])
    torch.testing.assert_close(fused.swiglu(parts).full_tensor(), fused.swiglu(y))
    spread = distribute_tensor(gate.float(), mesh, [column]).requires_grad_()
    small = fused.gated_activation(spread, spread, "silu", fp8_input_store=True)
    (gradient,) = torch.autograd.grad(small.sum(), spread)
    assert gradient.placements == (column,) and small.placements == (column,)
