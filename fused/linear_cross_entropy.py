"""Cross entropy of a linear layer in chunks of rows, without the full logits in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import requested
from fused.backends.tracing import differentiated, is_compiled_alone, transformed
from fused.checks import check_float, check_same_device, shape
from fused.chunked_loss import comes_with_gradients, over_units, row_gradients, sweep, unit_gradients
from fused.cross_entropy import check_class_weight, check_range, check_targets, cross_entropy
from fused.linear import linear
from fused.linear_cross_entropy_operator import losses_and_gradients
from fused.loss import Loss
from fused.loss_autograd import plain_loss, watched
from fused.sharding import localise, sharded

Tensor = torch.Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(F.linear(hidden, weight, bias), targets)`` in chunks of rows, without full logits.

    For "mean" and "sum" the gradients are computed together with the loss, while the logits of a chunk are in memory,
    and only scaled, in float32, in the backward pass: three matrix products, as many as with full logits. The gradients
    stay in memory from then on, the weight's in float32, as much as the backward pass would take in any case. For
    reduction "none", and where torch has no product of 16-bit matrices with a float32 result (the CPU), the backward
    pass recomputes the logits, a fourth product: a gradient scaled after rounding would be rounded twice.

    Args:
        hidden: ``[..., features]``; float16, bfloat16, float32 or float64. A DTensor may be sharded on any dimension
            but the last.
        weight: ``[vocab, features]`` in the dtype of `hidden`. With a DTensor sharded on the vocabulary the logits are
            computed for all rows at once, sharded on the vocabulary as well, for `cross_entropy`.
        targets: ``[...]``, integers from 0 to vocab − 1, or `ignore_index`.
        bias: ``[vocab]`` in the dtype of `hidden`, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction, class_weight: as in `cross_entropy`.
        chunk_rows: rows per chunk, by default as many as features, and at least 256: the logits of a chunk then take
            the weight's memory. The gradient of the weight is read and written once for each chunk.

    Returns:
        A number, or ``[...]`` for reduction "none"; float32 for 16-bit inputs. Saves its inputs. Double backward,
        `torch.func` and `torch.export` run the plain expression with full logits; `torch.compile` calls an operator
        that works in chunks, and has no second derivative.

    Raises:
        TypeError: if the operands are not floating point or of different dtypes, or the targets not integers.
        ValueError: for shapes that do not fit, tensors on two devices, or settings out of range.
        IndexError: as `cross_entropy`.

    Source: Liger-Kernel ``LigerFusedLinearCrossEntropyFunction``. In chunks, ``F.linear_cross_entropy`` of torch 2.13
    has no z-loss, soft cap or second derivative, smooths labels on full logits only, and took 17 times as long in
    float32 on a CPU (512 rows, 256 features, 16384 classes).
    """
    op = "linear_cross_entropy"
    loss = Loss(op, ignore_index, label_smoothing, z_loss, softcap, reduction).checked()
    if bias is not None and bias.shape == (1,):
        bias = bias.expand(weight.shape[0])
    _check_operands(op, hidden, weight, bias)
    check_targets(op, "hidden states", hidden, targets)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{op}: chunk_rows must be 1 or more, got {chunk_rows}")
    check_class_weight(op, hidden, class_weight, weight.shape[0])
    operands = (hidden, weight, targets, bias, class_weight)
    return (_sharded if sharded(hidden, weight, bias, targets) else _plain)(loss, *operands, chunk_rows)


def _plain(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> Tensor:
    check_range(loss, targets, weight.shape[0])
    hidden, weight, bias = _autocast(hidden, weight, bias)
    if is_compiled_alone():
        settings = (loss.ignore_index, loss.label_smoothing, loss.z_loss, loss.softcap, loss.reduction)
        needs = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)]
        operands = (hidden, weight, bias, targets, class_weight)
        compiled: Tensor = losses_and_gradients(*operands, *settings, chunk_rows, needs)[0]
        return compiled
    if transformed():
        return _expression(loss, hidden, weight, bias, targets, class_weight)
    inputs = (hidden, weight, bias, targets, class_weight, loss, chunk_rows)
    if not differentiated(hidden, weight, bias):
        return loss.reduce(sweep(*inputs, requested())[0], loss.count(targets, class_weight))
    result: Tensor = _LinearCrossEntropy.apply(*inputs)
    return result


def _expression(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
) -> Tensor:
    """Compute the loss by its definition, in plain differentiable operations."""
    logits = linear(hidden, weight, bias)
    return plain_loss(loss, logits, targets, weight.shape[0], class_weight=class_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the loss.

    The forward pass also computes the gradients for a loss gradient of 1, if they can be scaled later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        loss: Loss,
        chunk_rows: int | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets, class_weight)
        ctx.loss, ctx.chunk_rows, ctx.backend = loss, chunk_rows, requested()
        inputs = (hidden, weight, bias, targets, class_weight, loss, chunk_rows)
        now = comes_with_gradients(loss, hidden)
        g = unit_gradients(hidden, targets) if now else None
        losses, gradients = sweep(*inputs, ctx.backend, g, ctx.needs_input_grad)
        # Not in save_for_backward: backward scales them in place and drops them. A second one recomputes them.
        ctx.gradients = gradients if now else None
        return loss.reduce(losses, loss.count(targets, class_weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        hidden, weight, bias, targets, class_weight = ctx.saved_tensors
        if watched(g):
            return *_by_autograd(ctx, g, *ctx.saved_tensors), *(None,) * 4
        found, ctx.gradients = ctx.gradients, None
        units = comes_with_gradients(ctx.loss, hidden)
        if found is None:
            of_rows = unit_gradients(hidden, targets) if units else row_gradients(ctx.loss, g, targets, class_weight)
            inputs = (hidden, weight, bias, targets, class_weight, ctx.loss, ctx.chunk_rows)
            _, found = sweep(*inputs, ctx.backend, of_rows, ctx.needs_input_grad)
        if units:
            factor = over_units(ctx.loss, g, hidden.dtype, targets, class_weight)
            found = tuple(None if one is None else one.mul_(factor) for one in found)
        dtype = hidden.dtype
        return *(None if one is None else one.to(dtype) for one in found), *(None,) * 4


def _by_autograd(
    ctx: Any,
    g: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients by autograd of the plain expression, for tracers and double backward."""
    recorded = torch.is_grad_enabled()
    inputs = (hidden, weight, bias)
    wanted = [one for one, needed in zip(inputs, ctx.needs_input_grad, strict=False) if one is not None and needed]
    with torch.enable_grad():
        result = _expression(ctx.loss, *inputs, targets, class_weight)
    found = iter(torch.autograd.grad(result, wanted, g, create_graph=recorded))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:3])


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the operands as autocast does for F.linear."""
    if not _autocasting(hidden) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _autocasting(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check_operands(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_float(op, "hidden", hidden, min_ndim=1)
    check_float(op, "weight", weight)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: weight must be [vocab, {hidden.shape[-1]}] for hidden states {shape(hidden)}, got {shape(weight)}"
        )
    if bias is not None:
        check_float(op, "bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{op}: bias must be [{weight.shape[0]}] for a weight {shape(weight)}, got {shape(bias)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is None:
            continue
        check_same_device(op, hidden, name, other)
        if other.dtype != hidden.dtype and not _autocasting(hidden):
            raise TypeError(f"{op}: hidden is {hidden.dtype} and {name} {other.dtype}; cast one of them")


def _sharded(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if isinstance(weight, DTensor) and any(one.is_shard(0) for one in weight.placements):
        options = {key: value for key, value in dataclasses.asdict(loss).items() if key != "op"}
        return cross_entropy(F.linear(hidden, weight, bias), targets, class_weight=class_weight, **options)
    local = localise(loss.op, hidden, [targets.unsqueeze(-1)], whole=[-1])
    partial = [Partial() if one.is_shard() else Replicate() for one in local.placements]

    def whole(tensor: Tensor) -> Tensor:
        if local.mesh is None:
            return tensor
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, local.mesh, [Replicate()] * local.mesh.ndim, run_check=False)
        everywhere = [Replicate()] * local.mesh.ndim
        result: Tensor = tensor.redistribute(placements=everywhere).to_local(grad_placements=partial)
        return result

    own_bias, own_targets = None if bias is None else whole(bias), local.given(0).squeeze(-1)
    part = dataclasses.replace(loss, reduction="none" if loss.reduction == "none" else "sum")
    result = _plain(part, local.x, whole(weight), own_targets, own_bias, class_weight, chunk_rows)
    if local.mesh is None:
        count = loss.count(own_targets, class_weight)
        return result if count is None else result / count
    if loss.reduction == "none":
        return dataclasses.replace(local, shape=local.shape[:-1]).wrap(result)
    total = DTensor.from_local(result, local.mesh, partial, run_check=False)
    count = loss.count(targets, class_weight)
    return total if count is None else total / count
