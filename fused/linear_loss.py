"""Losses of the logits of a linear layer, as autograd functions that compute the logits in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fused.backends import requested
from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import differentiated
from fused.checks import MismatchError, check_float, check_same_device, shape
from fused.chunked_loss import (
    OfChunk,
    comes_with_gradients,
    expects_one,
    is_exact_factor,
    over_units,
    row_gradients,
    sweep,
    unit_gradients,
)
from fused.loss import reduced
from fused.loss_autograd import gradients_by_autograd, watched
from fused.torch_internals.modes import is_autocasting

Others = Sequence[Tensor | None]
"""Further tensors of a loss, such as targets, without gradients."""


class LinearLoss(Protocol):
    """Settings of a loss of logits."""

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"sum"`` or ``"none"``."""

    def of_chunks(self, classes: int, others: Others, backend: str | None) -> OfChunk:
        """Return the function for the losses of a chunk of rows, with their metrics."""

    def count(self, others: Others) -> Tensor | None:
        """Return what a mean is over, or None for other reductions."""

    def expression(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, others: Others) -> tuple[Tensor, ...]:
        """Compute the loss and the metrics by their definition, in plain differentiable operations."""


def linear_loss(
    loss: LinearLoss, hidden: Tensor, weight: Tensor, bias: Tensor | None, others: Others, chunk_rows: int | None
) -> tuple[Tensor, ...]:
    """Compute the loss of ``F.linear(hidden, weight, bias)``, and the metrics of rows, for checked plain tensors."""
    if differentiated(hidden, weight, bias):
        results: tuple[Tensor, ...] = _LinearLoss.apply(hidden, weight, bias, loss, chunk_rows, *others)
        return results
    of_chunk = loss.of_chunks(weight.shape[0], others, requested())
    (losses, *metrics), _ = sweep(hidden, weight, bias, of_chunk, chunk_rows)
    return reduced(losses, loss.reduction, loss.count(others)), *metrics


class _LinearLoss(torch.autograd.Function):
    """Autograd function of the loss.

    The forward pass also computes the gradients for a loss gradient of 1, if they can be scaled later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: LinearLoss,
        chunk_rows: int | None,
        *others: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias, *others)
        ctx.loss, ctx.chunk_rows, ctx.backend = loss, chunk_rows, requested()
        count, g = loss.count(others), None
        if expects_one(loss.reduction, hidden):
            g = row_gradients(hidden.new_ones((), dtype=compute_dtype(hidden.dtype)), hidden, count)
        elif comes_with_gradients(loss.reduction, hidden):
            g = unit_gradients(hidden)
        of_chunk = loss.of_chunks(weight.shape[0], others, ctx.backend)
        (losses, *metrics), gradients = sweep(hidden, weight, bias, of_chunk, chunk_rows, g, ctx.needs_input_grad)
        ctx.mark_non_differentiable(*metrics)
        # Not in save_for_backward: backward scales them in place and drops them. A second one recomputes them.
        ctx.gradients = None if g is None else gradients
        return reduced(losses, loss.reduction, count), *metrics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]
        hidden, weight, bias, *others = ctx.saved_tensors
        unused = (None,) * (2 + len(others))
        if watched(g):

            def expression(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return ctx.loss.expression(hidden, weight, bias, others)[0]

            return *gradients_by_autograd(expression, (hidden, weight, bias), ctx.needs_input_grad[:3], g), *unused
        kept, ctx.gradients = ctx.gradients, None
        count, factor = ctx.loss.count(others), None
        if comes_with_gradients(ctx.loss.reduction, hidden) and not expects_one(ctx.loss.reduction, hidden):
            found = kept or _gradients(ctx, unit_gradients(hidden), hidden, weight, bias, others)
            factor = over_units(g, hidden.dtype, count)
        elif kept is not None and is_exact_factor(g, hidden.dtype):
            found, factor = kept, g
        else:
            found = _gradients(ctx, row_gradients(g, hidden, count), hidden, weight, bias, others)
        if factor is not None and not (factor.is_cpu and factor == 1):
            found = tuple(None if one is None else one.mul_(factor) for one in found)
        return *(None if one is None else one.to(hidden.dtype) for one in found), *unused


def _gradients(
    ctx: Any, of_rows: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, others: Others
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the operands, the logits anew, from those of the losses of the rows."""
    of_chunk = ctx.loss.of_chunks(weight.shape[0], others, ctx.backend)
    return sweep(hidden, weight, bias, of_chunk, ctx.chunk_rows, of_rows, ctx.needs_input_grad)[1]


# -- operands -------------------------------------------------------------------------------------------------


def as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the operands as autocast does for F.linear."""
    if not is_autocasting(hidden) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_operands(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise unless these are operands of a linear layer, of one dtype and device, with at least one class.

    Args:
        prefix: of the names in errors.
    """
    check_float(op, f"{prefix}hidden", hidden, min_ndim=1)
    check_float(op, f"{prefix}weight", weight)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise MismatchError(
            f"{op}: {prefix}weight must be [vocab, {hidden.shape[-1]}] for hidden states {shape(hidden)}, "
            f"got {shape(weight)}"
        )
    if bias is not None:
        check_float(op, f"{prefix}bias", bias)
        if bias.shape != weight.shape[:1]:
            raise MismatchError(
                f"{op}: {prefix}bias must be [{weight.shape[0]}] for a weight {shape(weight)}, got {shape(bias)}"
            )
    for name, other in (("weight", weight), ("bias", bias)):
        if other is None:
            continue
        check_same_device(op, hidden, f"{prefix}{name}", other)
        if other.dtype != hidden.dtype and not is_autocasting(hidden):
            raise TypeError(
                f"{op}: {prefix}hidden is {hidden.dtype} and {prefix}{name} {other.dtype}; cast one of them"
            )


def check_chunk_rows(op: str, chunk_rows: int | None) -> None:
    """Raise ValueError for a number of rows below 1."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{op}: chunk_rows must be 1 or more, got {chunk_rows}")
