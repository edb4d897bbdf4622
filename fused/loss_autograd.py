"""Row statistics of the logits as an op, and the loss as an autograd function, for checked plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fused.backends import Op, requested
from fused.backends.reference import losses as formulas
from fused.backends.reference.losses import RowSettings, row_losses, z_losses
from fused.backends.tracing import differentiated, transformed
from fused.chunked_loss import OfChunk
from fused.loss import Loss, Statistics
from fused.torch_internals.modes import is_batched_by_autograd

Tensor = torch.Tensor


def _rows(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Reshape logits to [rows, vocab] and the rest to [rows], so one compilation serves every rank."""
    logits, *others = args
    leading = logits.shape[:-1]

    def one(tensor: Any) -> Any:
        return tensor if tensor is None else tensor.reshape(*leading, *tensor.shape[1:])

    def finish(result: Any) -> Any:
        return tuple(map(one, result)) if isinstance(result, tuple) else one(result)

    flat = [other.reshape(-1) if isinstance(other, Tensor) else other for other in others]
    return [logits.reshape(-1, logits.shape[-1]), *flat], finish


LOGIT_STATISTICS = Op(
    "cross_entropy",
    forward=formulas.logit_statistics,
    backward=formulas.logit_statistics_backward,
    canonical=_rows,
    kernels="fused.backends.triton.losses",
)


def plain_loss(
    loss: Loss,
    logits: Tensor,
    targets: Tensor,
    classes: int,
    *,
    class_weight: Tensor | None = None,
    start: int = 0,
    group: Any = None,
    inplace: bool = False,
) -> tuple[Tensor, ...]:
    """Compute the loss of plain logits, reduced as its settings say, and the metrics of its rows if they ask for them.

    With a group, the logits are the columns from `start` on, and the other ranks of the group have the rest.
    """
    if transformed(logits) and group is None:
        return _expression(loss, logits, targets, classes, class_weight)
    if not differentiated(logits):
        statistics = _statistics(loss, logits, targets, classes, start, group, class_weight)
        return loss.reduce(statistics[2], loss.count(targets, class_weight)), *_metrics(loss, statistics, targets)
    results: tuple[Tensor, ...] = _CrossEntropy.apply(
        logits, targets, class_weight, loss, classes, start, group, inplace
    )
    return results


def _expression(
    loss: Loss, logits: Tensor, targets: Tensor, classes: int, class_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the results of :func:`plain_loss` in plain differentiable operations."""
    args = (logits, loss.index(targets), loss.softcap, class_weight)
    statistics = formulas.logit_statistics(*args, **_statics(loss, classes))
    return loss.reduce(statistics[2], loss.count(targets, class_weight)), *_metrics(loss, statistics, targets)


def _statics(loss: Loss, classes: int, start: int = 0, whole: bool = True) -> dict[str, Any]:
    """Return the keywords of ``logit_statistics``."""
    settings = loss.of_rows(classes, start)
    return {"settings": settings, "whole": whole, "token_scaling": loss.token_scaling, "predicts": loss.metrics}


def _metrics(loss: Loss, statistics: Statistics, targets: Tensor) -> tuple[Tensor, ...]:
    """Return the z-losses and the predicted classes of rows, or nothing if they are not asked for."""
    highest, lse, _, scale, predicted = statistics
    if predicted is None:
        return ()
    parts = z_losses(highest, lse.detach(), scale, targets, loss.of_rows(0))
    return parts, predicted.masked_fill(targets == loss.ignore_index, -1)


def _statistics(
    loss: Loss, logits: Tensor, targets: Tensor, classes: int, start: int, group: Any, class_weight: Tensor | None
) -> Statistics:
    """Compute the statistics of whole rows, of which the third is their loss, over all shards of the vocabulary."""
    index = loss.index(targets, start)
    statics = _statics(loss, classes, start, whole=group is None)
    statistics: Statistics = LOGIT_STATISTICS.run(
        "forward", (logits, index, loss.softcap, class_weight), requested(), **statics
    )
    if group is None:
        return statistics
    columns = logits.shape[-1]
    here = (index >= 0) & (index < columns)
    highest, lse, picked, total, predicted = _over_shards(statistics, here, columns, start, group)
    args = highest, lse, picked, total, index, statics["settings"]
    return highest, lse, *row_losses(*args, token_scaling=loss.token_scaling), predicted


def _over_shards(statistics: Statistics, here: Tensor, columns: int, start: int, group: Any) -> Statistics:
    """Combine the statistics of all shards by two all-reduces, and a third for the predicted column.

    Args:
        here: whether the picked logit of a row is in this shard of this number of columns, from `start` on.
    """
    own, lse, picked, total, predicted = statistics
    own_highest = own.masked_fill(lse == -torch.inf, -torch.inf)
    highest = own_highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    if predicted is not None:
        # The first of the columns with the highest logit.
        predicted = torch.where(own_highest == highest, predicted + start, torch.iinfo(predicted.dtype).max)
        dist.all_reduce(predicted, dist.ReduceOp.MIN, group)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    lower = own - highest
    parts = [torch.exp(lse + lower), torch.where(here, picked + lower, 0)]
    sums = torch.stack(parts if total is None else [*parts, total + columns * lower])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return highest, sums[0].log(), sums[1].clone(), None if total is None else sums[2].clone(), predicted


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the loss, saving logits and targets, and the highest logit and logsumexp of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        class_weight: Tensor | None,
        loss: Loss,
        classes: int,
        start: int,
        group: Any,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        statistics = _statistics(loss, logits, targets, classes, start, group, class_weight)
        highest, lse, losses, scale, _ = statistics
        count, metrics = loss.count(targets, class_weight), _metrics(loss, statistics, targets)
        ctx.save_for_backward(logits, targets, highest, lse, scale, count, class_weight)
        ctx.mark_non_differentiable(*metrics)
        ctx.loss, ctx.classes, ctx.start, ctx.group, ctx.inplace = loss, classes, start, group, inplace
        ctx.backend = requested()
        return loss.reduce(losses, count), *metrics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, loss = grads[0], ctx.loss
        logits, targets, highest, lse, scale, count, class_weight = ctx.saved_tensors
        recorded = watched(g)
        if recorded and ctx.group is None:

            def expression(logits: Tensor) -> Tensor:
                return _expression(loss, logits, targets, ctx.classes, class_weight)[0]

            return *gradients_by_autograd(expression, (logits,), (True,), g), *(None,) * 7
        if torch.is_grad_enabled() and not transformed():
            raise NotImplementedError(
                "cross_entropy: logits sharded on the vocabulary have no second derivative; gather them first"
            )
        inplace = ctx.inplace and logits.is_contiguous() and not recorded
        g = g if scale is None else g * scale
        args = (logits, g, count, loss.index(targets, ctx.start), highest, lse, loss.softcap, class_weight)
        dx = gradient(args, loss.of_rows(ctx.classes, ctx.start), inplace, ctx.backend)
        return dx, *(None,) * 7


def gradients_by_autograd(
    expression: Callable[..., Tensor], operands: Sequence[Tensor | None], needed: Sequence[bool], g: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate ``expression(*operands)``, for tracers and double backward.

    The gradients are those of the operands alone: each is a view of its own in the expression, since an operand may be
    computed from another one, or be the same tensor.

    Args:
        expression: the result in plain differentiable operations.
        operands: its arguments.
        needed: which operands get a gradient.
        g: the gradient of the result.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [None if each is None else each.view_as(each) for each in operands]
        result = expression(*own)
    wanted = [each for each, one in zip(own, needed, strict=True) if each is not None and one]
    found = iter(torch.autograd.grad(result, wanted, g, create_graph=recorded))
    return tuple(next(found) if one and each is not None else None for each, one in zip(own, needed, strict=True))


def watched(g: Tensor) -> bool:
    """Check whether the backward pass for g must use plain operations.

    It must if it is recorded, transformed, or computes a batch of gradients.
    """
    # In this order: compilers cannot trace the last one.
    return torch.is_grad_enabled() or transformed() or is_batched_by_autograd(g)


def gradient(args: Sequence[Any], settings: RowSettings, inplace: bool, backend: str | None) -> Tensor:
    """Compute the gradient of the logits from that of the rows' losses, over the logits if `inplace`.

    Args:
        args: those of ``logit_statistics_backward``, the logits first.
    """
    dx: Tensor = LOGIT_STATISTICS.run("backward", args, backend, settings=settings, inplace=inplace)
    if inplace:
        # Compiled code and kernels write past autograd, which is to refuse the old logits to others that saved them.
        torch.autograd.graph.increment_version(args[0])
    return dx


def cross_entropy_of_chunks(
    loss: Loss, targets: Tensor, class_weight: Tensor | None, classes: int, backend: str | None
) -> OfChunk:
    """Return the function for the results of a chunk of rows, and the gradient of its logits, written over them."""
    flat, statics = targets.reshape(-1), _statics(loss, classes)

    def of_chunk(chunk: slice, logits: Tensor, g: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        index = loss.index(flat[chunk])
        statistics = LOGIT_STATISTICS.run("forward", (logits, index, loss.softcap, class_weight), backend, **statics)
        highest, lse, losses, scale, _ = statistics
        results = losses, *_metrics(loss, statistics, index)
        if g is None:
            return results, None
        g = g if scale is None else g * scale
        args = (logits, g, None, index, highest, lse, loss.softcap, class_weight)
        return results, gradient(args, statics["settings"], True, backend)

    return of_chunk
