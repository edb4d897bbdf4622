"""Row statistics of the logits as an op and as an autograd function, for checked plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fused.backends import Op, requested
from fused.backends.reference import losses as formulas
from fused.backends.tracing import differentiated, transformed
from fused.torch_internals.modes import is_batched_by_autograd

Tensor = torch.Tensor
Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The highest logit of each row, which is a constant for derivatives, and three numbers relative to it."""


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


def logit_statistics(
    logits: Tensor, index: Tensor, softcap: float | None, total: bool, inplace: bool = False, group: Any = None
) -> Statistics:
    """Compute the statistics of each row, over all shards of the vocabulary in a group."""
    if transformed() and group is None:
        return formulas.logit_statistics(logits, index, softcap, total=total, elsewhere=torch.nan)
    if not differentiated(logits):
        return _forward(logits, index, softcap, total, group)
    statistics: Statistics = _LogitStatistics.apply(logits, index, softcap, total, inplace, group)
    return statistics


def _forward(logits: Tensor, index: Tensor, softcap: float | None, total: bool, group: Any) -> Statistics:
    elsewhere = torch.nan if group is None else 0.0
    statistics: Statistics = LOGIT_STATISTICS.run(
        "forward", (logits, index, softcap), requested(), total=total, elsewhere=elsewhere
    )
    if group is None:
        return statistics
    columns = logits.shape[-1]
    return _over_shards(statistics, (index >= 0) & (index < columns), columns, group)


def _over_shards(statistics: Statistics, here: Tensor, columns: int, group: Any) -> Statistics:
    """Combine the statistics of all shards by two all-reduces.

    Args:
        here: whether the picked logit of a row is in this shard of this number of columns.
    """
    own, lse, picked, total = statistics
    highest = own.masked_fill(lse == -torch.inf, -torch.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    lower = own - highest
    parts = [torch.exp(lse + lower), torch.where(here, picked + lower, 0)]
    sums = torch.stack(parts if total is None else [*parts, total + columns * lower])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return highest, sums[0].log(), sums[1].clone(), None if total is None else sums[2].clone()


class _LogitStatistics(torch.autograd.Function):
    """Autograd function of the statistics of each row, saving the logits, the index, the highest and the logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, softcap: float | None, total: bool, inplace: bool, group: Any
    ) -> Statistics:
        statistics = _forward(logits, index, softcap, total, group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, index, *statistics[:2])
        ctx.mark_non_differentiable(statistics[0])
        ctx.softcap, ctx.inplace, ctx.group = softcap, inplace, group
        ctx.backend = requested()
        return statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, g_lse, g_picked, g_total = grads
        if g_lse is None and g_picked is None and g_total is None:
            return (None,) * 6
        logits, index, highest, lse = ctx.saved_tensors
        if ctx.group is not None and torch.is_grad_enabled() and not transformed():
            raise NotImplementedError(
                "cross_entropy: logits sharded on the vocabulary have no second derivative; gather them first"
            )
        given = next(g for g in grads if g is not None)
        inplace = ctx.inplace and logits.is_contiguous() and not watched(given)
        dx = gradient(logits, (g_lse, g_picked, g_total), index, (highest, lse), ctx.softcap, inplace, ctx.backend)
        return dx, *(None,) * 5


def watched(g: Tensor) -> bool:
    """Check whether the backward pass for g must use plain operations.

    It must if it is recorded, transformed, or computes a batch of gradients.
    """
    batched: bool = is_batched_by_autograd(g)
    return batched or torch.is_grad_enabled() or transformed()


def gradient(
    logits: Tensor,
    grads: Sequence[Tensor | None],
    index: Tensor,
    normalizer: tuple[Tensor, Tensor],
    softcap: float | None,
    inplace: bool,
    backend: str | None,
) -> Tensor:
    """Compute the gradient of the logits from those of the statistics, over the logits if `inplace`.

    Args:
        grads: of the logsumexp, the picked logit and the sum.
        normalizer: the highest and the logsumexp of each row.
    """
    g_lse = torch.zeros_like(normalizer[1]) if grads[0] is None else grads[0]
    args = (logits, g_lse, grads[1], grads[2], index, *normalizer, softcap)
    dx: Tensor = LOGIT_STATISTICS.run("backward", args, backend, inplace=inplace)
    if inplace:
        # Compiled code and kernels write past autograd, which is to refuse the old logits to others that saved them.
        torch.autograd.graph.increment_version(logits)
    return dx
