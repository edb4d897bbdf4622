"""Run from sharded_cases.py: norms and rotary position embedding on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fused

Tensor = torch.Tensor


def norm_cases(check: Callable[..., None], mesh: Any) -> None:
    """Rows stay where they are, and parameters get partial gradients; cut rows are gathered."""
    x, residual = torch.randn(2, 4, 6, 10, dtype=torch.float64)
    weight, bias = torch.randn(2, 10, dtype=torch.float64)
    hidden, batch, sequence, whole = Shard(2), Shard(0), Shard(1), Replicate()

    def added(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        normed, total = fused.add_rms_norm(x, residual, weight)
        return normed + 2 * total

    def added_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed, total = fused.add_layer_norm(x, residual, weight, bias)
        return normed + 2 * total

    for op, tensors, parameters in (
        (fused.rms_norm, [x], [weight]),
        (added, [x, residual], [weight]),
        (fused.layer_norm, [x], [weight, bias]),
        (added_layer, [x, residual], [weight, bias]),
    ):
        inputs = [*tensors, *parameters]
        for rows in (batch, sequence):
            spread, partial = [rows] * len(tensors), [Partial()] * len(parameters)
            check("rows", op, inputs, [*spread, *[whole] * len(parameters)], rows, [*spread, *partial])
        gathered = [hidden] * len(tensors)
        check("hidden", op, inputs, [*gathered, *[whole] * len(parameters)], whole, [None] * len(inputs), True)
        check("cut parameters", op, inputs, [*spread, *[Shard(0)] * len(parameters)], rows, [None] * len(inputs), True)
        check("replicated", op, inputs, [whole] * len(inputs), whole, [whole] * len(inputs))
        check("plain parameters", op, inputs, [*spread, *[None] * len(parameters)], rows, [None] * len(inputs), True)
    check("uneven", fused.rms_norm, [x[:3], weight], [batch, whole], batch, [batch, Partial()])
    check("residual cut", added, [x, residual, weight], [whole, batch, whole], batch, [None, batch, Partial()], True)
    check("no weight", lambda x: fused.rms_norm(x, None), [x], [batch], batch, [batch])

    scale, shift = torch.randn(2, 4, 1, 10, dtype=torch.float64)
    check("adaptive", fused.adaptive_layer_norm, [x, scale, shift], [batch] * 3, batch, [batch] * 3)
    given = [sequence, whole, whole]
    check("adaptive", fused.adaptive_layer_norm, [x, scale, shift], given, sequence, [sequence, Partial(), Partial()])

    gated = [residual, x, scale]
    check("gated", fused.gated_residual, gated, [batch] * 3, batch, [batch] * 3)
    given = [sequence, sequence, whole]
    check("gated", fused.gated_residual, gated, given, sequence, [sequence, sequence, Partial()])

    numbers = [x, *torch.randn(2, 1, dtype=torch.float64)]
    check("star", fused.star_relu, numbers, [batch, whole, whole], batch, [batch, Partial(), Partial()])

    image, (weight_c, bias_c) = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    scale, shift = torch.randn(2, 4, 6, 1, dtype=torch.float64)

    def grouped(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return fused.group_norm(x, 2, weight, bias, activation="silu", scale=scale, shift=shift)

    inputs = [image, weight_c, bias_c, scale, shift]
    partial = [batch, Partial(), Partial(), batch, batch]
    check("samples", grouped, inputs, [batch, whole, whole, batch, batch], batch, partial)
    check("channels", grouped, inputs, [Shard(1), whole, whole, whole, whole], whole, [None] * 5, True)

    parts = DTensor.from_local(x / 2, mesh, [Partial()])
    torch.testing.assert_close(fused.layer_norm(parts, weight, bias).full_tensor(), fused.layer_norm(x, weight, bias))


def rotary_cases(check: Callable[..., None], mesh: Any) -> None:
    """Heads, batch and sequence stay where they are; cos and sin are cut as q is."""
    q, k = torch.randn(2, 4, 6, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    # A partial one.
    angles = torch.rand(2, 6, 6, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    batch, heads, sequence, width, whole = Shard(0), Shard(1), Shard(2), Shard(3), Replicate()
    for which in (0, 1):

        def op(q: Tensor, k: Tensor, cos: Tensor = cos, sin: Tensor = sin, which: int = which) -> Tensor:
            # The other one is in, so that both get gradients.
            pair = fused.rotary_embedding(q, k, cos, sin)
            return pair[which] + 0 * pair[1 - which].sum((1, 3), keepdim=True)

        check("batch", op, [q, k], [batch, batch], batch, [batch, batch])
    for interleaved in (False, True):

        def one(q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = interleaved) -> Tensor:
            return fused.apply_rotary(q, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=interleaved)

        inputs = [q, cos, sin]
        check("heads", one, inputs, [heads, whole, whole], heads, [heads, Partial(), Partial()])
        check("batch", one, inputs, [batch, batch, batch], batch, [batch, batch, batch])
        check("batch, whole angles", one, inputs, [batch, whole, whole], batch, [batch, None, None], True)
        check("sequence", one, inputs, [sequence, Shard(1), Shard(1)], sequence, [sequence, Shard(1), Shard(1)])
        check("angles cut", one, inputs, [whole, batch, batch], batch, [None, batch, batch], True)
        check("width", one, inputs, [width, whole, whole], whole, [None, whole, whole], True)

    # q of two heads a rank, k with fewer heads than ranks: replicated.
    rank = dist.get_rank()
    spread = distribute_tensor(q, mesh, [heads])
    turned_q, turned_k = fused.rotary_embedding(spread, k[:, :1], cos, sin)
    whole_q, whole_k = fused.rotary_embedding(q, k[:, :1], cos, sin)
    assert isinstance(turned_q, DTensor) and turned_q.placements == (heads,)
    torch.testing.assert_close(turned_q.to_local(), whole_q.chunk(2, 1)[rank])
    torch.testing.assert_close(turned_k, whole_k)
