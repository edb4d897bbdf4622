"""The operator ``fused::linear_cross_entropy`` for `torch.compile`, which would otherwise trace whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused.backends import requested
from fused.backends.reference.numbers import compute_dtype
from fused.chunked_loss import comes_with_gradients, gradient_dtype, over_units, row_gradients, sweep, unit_gradients
from fused.cross_entropy import check_range
from fused.loss import Loss
from fused.loss_autograd import cross_entropy_of_chunks


@torch.library.custom_op("fused::linear_cross_entropy", mutates_args=())
def losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    token_scaling: bool,
    metrics: bool,
    chunk_rows: int | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss, the needed gradients of hidden, weight and bias for `unit_gradients`, and metrics of the rows.

    What is not needed is an empty tensor; so are the gradients if the backward pass computes them.
    """
    loss = _loss(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, metrics)
    check_range(loss, targets, weight.shape[0])
    g = unit_gradients(hidden) if any(needs) and comes_with_gradients(reduction, hidden) else None
    of_chunk = cross_entropy_of_chunks(loss, targets, class_weight, weight.shape[0], requested())
    (losses, *of_rows), gradients = sweep(hidden, weight, bias, of_chunk, chunk_rows, g, needs)
    z_losses, predicted = of_rows or (losses.new_empty(0), targets.new_empty(0, dtype=torch.int64))
    result = loss.reduce(losses, loss.count(targets, class_weight))
    return result, *_filled(gradients, hidden), z_losses, predicted


@torch.library.custom_op("fused::linear_cross_entropy_backward", mutates_args=())
def gradients_alone(
    g: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    token_scaling: bool,
    metrics: bool,
    chunk_rows: int | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the needed gradients of hidden, weight and bias for the gradient of the loss, else empty tensors."""
    loss = _loss(ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling)
    of_rows = row_gradients(g, hidden, loss.count(targets, class_weight))
    of_chunk = cross_entropy_of_chunks(loss, targets, class_weight, weight.shape[0], requested())
    return _filled(sweep(hidden, weight, bias, of_chunk, chunk_rows, of_rows, needs)[1], hidden)


@losses_and_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, needs = _loss(*settings[:-2]), settings[-1]
    result = hidden.new_empty(targets.shape if loss.reduction == "none" else (), dtype=compute_dtype(hidden.dtype))
    gradients = _buffers(hidden, weight, bias, needs if comes_with_gradients(loss.reduction, hidden) else ())
    of_rows = result.new_empty(targets.shape if loss.metrics else 0)
    return result, *gradients, of_rows, torch.empty_like(of_rows, dtype=torch.int64)


@gradients_alone.register_fake
def _(
    g: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _buffers(hidden, weight, bias, settings[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, class_weight, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.dtype = hidden.dtype
    ctx.now = comes_with_gradients(_loss(*ctx.settings[:-2]).reduction, hidden)
    found = output[1:4] if ctx.now else (hidden, weight, bias)
    ctx.save_for_backward(*found, targets, class_weight)


def _backward(ctx: Any, g: Tensor | None, *of_others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(one is not None for one in of_others):
        raise RuntimeError(
            "linear_cross_entropy: the compiled operator has no second derivative; leave it out of torch.compile, or "
            "use cross_entropy of the logits"
        )
    unused = (None,) * (2 + len(ctx.settings))
    if g is None:
        return None, None, None, *unused
    loss, needs = _loss(*ctx.settings[:-2]), ctx.settings[-1]
    if ctx.now:
        *found, targets, class_weight = ctx.saved_tensors
        factor = over_units(g, ctx.dtype, loss.count(targets, class_weight))
        found = [one * factor for one in found]
    else:
        found = gradients_alone(g, *ctx.saved_tensors, *ctx.settings)
    return *(one.to(ctx.dtype) if needed else None for one, needed in zip(found, needs, strict=True)), *unused


losses_and_gradients.register_autograd(_backward, setup_context=_setup)


def _loss(*settings: Any) -> Loss:
    return Loss("linear_cross_entropy", *settings)


def _buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, operands = gradient_dtype(hidden), (hidden, weight, bias)
    made = [
        each.new_empty(each.shape, dtype=dtype) if needed and each is not None else None
        for each, needed in zip(operands, (*needs, False, False, False), strict=False)
    ]
    return _filled(made, hidden)


def _filled(gradients: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace None, which an operator cannot return, by an empty tensor."""
    hidden, weight, bias = (like.new_empty(0) if one is None else one for one in gradients)
    return hidden, weight, bias
