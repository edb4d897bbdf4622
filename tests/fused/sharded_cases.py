"""Run by two processes of test_sharding.py: the ops on DTensors against the ops on whole tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import fused
from tests.fused.processes import leave
from tests.fused.sharded_bias_dropout import bias_dropout_cases
from tests.fused.sharded_gated import gated_cases
from tests.fused.sharded_norms import norm_cases, rotary_cases

Tensor = torch.Tensor


def check(
    name: str,
    op: Callable[..., Tensor],
    tensors: list[Tensor],
    placements: list[object],
    out_placement: object,
    gradient_placements: list[object],
    communicates: bool = False,
) -> None:
    """Outputs, gradients and placements of an op on sharded inputs, and that it sends nothing."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    expected = op(*leaves)
    g = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(expected, wanted, g)

    inputs = []
    for tensor, placement in zip(tensors, placements, strict=True):
        part = tensor if placement is None else distribute_tensor(tensor, MESH, [placement])
        inputs.append(part.detach().requires_grad_(tensor.is_floating_point()))
    g_sharded = distribute_tensor(g, MESH, [out_placement])
    with CommDebugMode() as traffic:
        out = op(*inputs)
        assert isinstance(out, DTensor), name
        mine = torch.autograd.grad(out, [t for t in inputs if t.requires_grad], g_sharded)
    assert communicates or traffic.get_total_counts() == 0, (name, traffic.get_comm_counts())
    assert out.placements == (out_placement,), (name, out.placements)
    torch.testing.assert_close(out.full_tensor(), expected, msg=lambda m: f"{name}: {m}")
    for one, exact, placement in zip(mine, gradients, gradient_placements, strict=True):
        if placement is not None:
            assert one.placements == (placement,), (name, one.placements)
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(whole, exact, msg=lambda m: f"{name}: {m}")


def bias_cases() -> None:
    x, bias = torch.randn(4, 6, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    column, batch, whole = Shard(2), Shard(0), Replicate()
    for op in (fused.bias_gelu, fused.BiasGeLUFunction.apply):
        check("column", op, [x, bias], [column, Shard(0)], column, [column, Shard(0)])
        check("batch", op, [x, bias], [batch, whole], batch, [batch, Partial()])
        check("replicated", op, [x, bias], [whole, whole], whole, [whole, whole])
    check("cut bias", fused.bias_gelu, [x, bias], [column, whole], column, [column, None], True)
    check("plain bias", fused.bias_gelu, [x, bias], [batch, None], batch, [batch, None], True)
    odd = torch.randn(5, 10, dtype=torch.float64)
    check("uneven", fused.bias_gelu, [odd, bias], [batch, whole], batch, [batch, Partial()])
    weights = torch.rand(4, 6, 1, dtype=torch.float64)
    check("weights", fused.weighted_squared_relu, [x, weights], [batch, batch], batch, [batch, batch])

    rank = dist.get_rank()
    local = x.chunk(2, -1)[rank].contiguous()
    out = fused.bias_gelu(local, distribute_tensor(bias, MESH, [Shard(0)]))
    assert not isinstance(out, DTensor)
    torch.testing.assert_close(out, fused.bias_gelu(local, bias.chunk(2)[rank]))

    parts = DTensor.from_local(x / 2, MESH, [Partial()])
    reduced = fused.bias_gelu(parts, distribute_tensor(bias, MESH, [whole]))
    torch.testing.assert_close(reduced.full_tensor(), fused.bias_gelu(x, bias))


def softmax_cases() -> None:
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    mask = torch.randn(1, 4, 6, 8, dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64)
    heads, rows, whole = Shard(1), Shard(2), Replicate()

    def op(x: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
        return fused.scaled_masked_softmax(x, mask, 0.5, sink=sink, causal=True, window=(3, 0))

    inputs = [x, mask, sink]
    check("heads", op, inputs, [heads, heads, Shard(0)], heads, [heads, heads, Shard(0)])
    check("queries", op, inputs, [rows, rows, whole], rows, [rows, rows, Partial()])
    check("batch", op, inputs, [Shard(0), whole, whole], Shard(0), [Shard(0), Partial(), Partial()])
    check("keys", op, inputs, [Shard(3), whole, whole], whole, [Shard(3), whole, whole], True)
    hidden = torch.rand(2, 1, 6, 8) < 0.3
    check(
        "plain mask",
        lambda x, m: fused.scaled_masked_softmax(x, m, 0.5),
        [x, hidden],
        [heads, None],
        heads,
        [heads],
    )
    causal = fused.ScaledUpperTriangMaskedSoftmax.apply
    check("function", lambda x: causal(x, 0.5), [x], [rows], rows, [rows])


if __name__ == "__main__":
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    MESH = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    bias_cases()
    softmax_cases()
    gated_cases(check, MESH)
    bias_dropout_cases(check, MESH)
    norm_cases(check, MESH)
    rotary_cases(check, MESH)
    leave()
