"""Run by two processes of test_vocab_parallel.py: losses of sharded logits against those of whole ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import fused
from tests.fused.processes import leave

Tensor = torch.Tensor
CLASSES = 12


def megatron(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Megatron's loss on one process, after its `VocabParallelCrossEntropy`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    if label_smoothing == 0.0:
        return losses
    smoothing = label_smoothing * logits.shape[-1] / (logits.shape[-1] - 1)
    mean = torch.log_softmax(wide, -1).mean(-1)
    return torch.where(targets == -100, 0.0, (1.0 - smoothing) * losses - smoothing * mean)


def sample(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(4, 3, CLASSES, dtype=torch.float64, generator=generator)).to(dtype)
    targets = torch.randint(CLASSES, (4, 3), generator=generator)
    targets[1, 1] = -100
    return logits, targets, torch.randn(4, 3, dtype=torch.float64, generator=generator)


def check_plain(expected: Callable[..., Tensor], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Megatron's way: each process has its columns as a plain tensor, of a computed (not a leaf) one."""
    logits, targets, g = sample(dtype)
    whole = logits.clone().requires_grad_()
    losses = expected(whole, targets)
    (gradient,) = torch.autograd.grad(losses, whole, g.to(losses))
    mine = logits.chunk(2, -1)[RANK].clone().requires_grad_()
    with CommDebugMode() as traffic:
        result = fused.vocab_parallel_cross_entropy(mine * 1, targets, **options)
        (local,) = torch.autograd.grad(result, mine, g.to(result))
    assert traffic.get_total_counts() == 2, traffic.get_comm_counts()
    assert result.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(result, losses, **tolerance)
    torch.testing.assert_close(local, gradient.chunk(2, -1)[RANK], **tolerance)


def plain_cases() -> None:
    check_plain(megatron)
    check_plain(megatron, torch.bfloat16)
    check_plain(megatron, inplace_backward=True)
    check_plain(lambda x, t: megatron(x, t, 0.1), label_smoothing=0.1)
    check_plain(lambda x, t: megatron(5 * torch.tanh(x / 5), t), softcap=5.0)

    def squared(x: Tensor, t: Tensor) -> Tensor:
        return megatron(x, t) + torch.where(t == -100, 0, 0.01 * torch.logsumexp(x, -1).square())

    check_plain(squared, z_loss=0.01)

    _, targets, _ = sample()
    ignored = int(targets[0, 0])
    both = targets.masked_fill(targets == -100, ignored)
    logits = sample()[0]
    result = fused.vocab_parallel_cross_entropy(logits.chunk(2, -1)[RANK], both, ignore_index=ignored)
    torch.testing.assert_close(result, megatron(logits, both.masked_fill(both == ignored, -100)))

    # A padded vocabulary: all that the second process has is −inf.
    padded = logits.clone()
    padded[..., CLASSES // 2 :] = -torch.inf
    inside = targets.clamp(max=CLASSES // 2 - 1)
    mine = padded.chunk(2, -1)[RANK].clone().requires_grad_()
    result = fused.vocab_parallel_cross_entropy(mine, inside)
    torch.testing.assert_close(result, megatron(padded, inside))
    (gradient,) = torch.autograd.grad(result.sum(), mine)
    assert gradient.isfinite().all()
    assert RANK == 0 or not gradient.any()

    try:
        torch.autograd.grad(fused.vocab_parallel_cross_entropy(mine, inside).sum(), mine, create_graph=True)
    except NotImplementedError as error:
        assert "second derivative" in str(error)
    else:
        raise AssertionError("a second derivative without an all-reduce is wrong")


def compiled_case() -> None:
    logits, targets, _ = sample()
    mine = logits.chunk(2, -1)[RANK].clone().requires_grad_()
    op = torch.compile(fused.vocab_parallel_cross_entropy, backend="aot_eager", fullgraph=True)
    result = op(mine, targets)
    torch.testing.assert_close(result, megatron(logits, targets))
    whole = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(megatron(whole, targets).sum(), whole)
    (local,) = torch.autograd.grad(result.sum(), mine)
    torch.testing.assert_close(local, gradient.chunk(2, -1)[RANK])


def check_dtensor(
    op: Callable[..., Tensor], placement: Any, targets_placement: Any, out: Any, messages: int, odd: int = 0
) -> None:
    """Losses and gradients of a DTensor, where they lie, and how often the processes spoke to each other."""
    logits, targets, _ = sample()
    logits, targets = logits[..., : CLASSES - odd].contiguous(), targets.clamp(max=CLASSES - odd - 1)
    whole = logits.clone().requires_grad_()
    expected = op(whole, targets)
    (gradient,) = torch.autograd.grad(expected.sum(), whole)
    mine = distribute_tensor(logits, MESH, [placement]).requires_grad_()
    spread = targets if targets_placement is None else distribute_tensor(targets, MESH, [targets_placement])
    with CommDebugMode() as traffic:
        result = op(mine, spread)
        assert isinstance(result, DTensor)
        assert result.placements == (out,) or out is None, result.placements
        (local,) = torch.autograd.grad(result.sum(), mine)
    assert traffic.get_total_counts() <= messages, traffic.get_comm_counts()
    assert local.placements == (placement,), local.placements
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(local.full_tensor(), gradient)


def dtensor_cases() -> None:
    def rows(x: Tensor, t: Tensor) -> Tensor:
        return fused.cross_entropy(x, t, reduction="none", label_smoothing=0.1)

    whole, vocabulary, batch = Replicate(), Shard(2), Shard(0)
    check_dtensor(rows, vocabulary, whole, whole, 2)
    check_dtensor(rows, vocabulary, None, whole, 2)
    check_dtensor(rows, vocabulary, whole, whole, 2, odd=1)
    check_dtensor(rows, batch, batch, batch, 0)
    check_dtensor(rows, whole, whole, whole, 0)
    check_dtensor(fused.cross_entropy, vocabulary, whole, None, 2)
    check_dtensor(fused.cross_entropy, batch, batch, None, 4)
    of_classes = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for reduction in ("none", "sum", "mean"):

        def weighted(x: Tensor, t: Tensor, reduction: str = reduction) -> Tensor:
            return fused.cross_entropy(x, t, class_weight=of_classes, label_smoothing=0.1, reduction=reduction)

        check_dtensor(weighted, batch, batch, None, 4)
    logits, targets, _ = sample()
    sharded = distribute_tensor(logits, MESH, [vocabulary])
    try:
        fused.cross_entropy(sharded, targets, class_weight=of_classes)
    except ValueError as error:
        assert "sharded on the vocabulary; gather them first" in str(error)
    else:
        raise AssertionError("weights of the classes with a sharded vocabulary are not computed")
    result = fused.vocab_parallel_cross_entropy(sharded, targets, 0.1)
    assert isinstance(result, DTensor)
    torch.testing.assert_close(result.full_tensor(), megatron(logits, targets, 0.1))


def linear_cases() -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(size, dtype=torch.float64, generator=generator) for size in ((4, 3, 6), (CLASSES, 6))]
    targets = sample()[1]
    whole = Replicate()
    for placements in ((Shard(0), whole), (whole, whole), (whole, Shard(0)), (Shard(0), None)):
        for reduction in ("mean", "sum", "none"):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            expected = fused.linear_cross_entropy(*leaves, targets, reduction=reduction, chunk_rows=2)
            gradients = torch.autograd.grad(expected.sum(), leaves)
            mine = [
                (t.clone() if where is None else distribute_tensor(t, MESH, [where])).requires_grad_()
                for t, where in zip(tensors, placements, strict=True)
            ]
            spread = distribute_tensor(targets, MESH, [placements[0]])
            result = fused.linear_cross_entropy(*mine, spread, reduction=reduction, chunk_rows=2)
            assert isinstance(result, DTensor)
            torch.testing.assert_close(result.full_tensor(), expected)
            for one, exact in zip(torch.autograd.grad(result.sum(), mine), gradients, strict=True):
                full = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(full, exact, msg=lambda m, p=placements, r=reduction: f"{p} {r}: {m}")


def metric_cases() -> None:
    logits, targets, _ = sample()
    logits = logits.round()  # rows have several highest logits, in both shards of the vocabulary
    hidden, weight = logits, torch.eye(CLASSES, dtype=logits.dtype)
    options: dict[str, Any] = {"z_loss": 0.1, "softcap": 5.0, "token_scaling": True}
    for reduction in ("mean", "none"):
        options["reduction"] = reduction
        leaf = logits.clone().requires_grad_()
        expected = fused.cross_entropy_with_metrics(leaf, targets, **options)
        (gradient,) = torch.autograd.grad(expected.loss.sum(), leaf)
        for placement in (Shard(0), Shard(2)):
            mine = distribute_tensor(logits, MESH, [placement]).requires_grad_()
            weights = distribute_tensor(weight, MESH, [Shard(0) if placement == Shard(2) else Replicate()])
            spread = targets if placement == Shard(2) else distribute_tensor(targets, MESH, [placement])
            rows = mine if placement != Shard(2) else distribute_tensor(hidden, MESH, [Replicate()]).requires_grad_()
            for given, output in (
                (mine, fused.cross_entropy_with_metrics(mine, spread, **options)),
                (rows, fused.linear_cross_entropy_with_metrics(rows, weights, spread, **options)),
            ):
                for one, exact in zip(output, expected, strict=True):
                    torch.testing.assert_close(one.full_tensor(), exact)
                (local,) = torch.autograd.grad(output.loss.sum(), given)
                torch.testing.assert_close(local.full_tensor(), gradient)


if __name__ == "__main__":
    RANK, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=RANK, world_size=2)
    MESH = init_device_mesh("cpu", (2,))
    for backend in ("reference", "inductor"):
        with fused.backend(backend):
            plain_cases()
    compiled_case()
    dtensor_cases()
    linear_cases()
    metric_cases()
    leave()
