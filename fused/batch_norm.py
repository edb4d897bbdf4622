"""Batch norm with an optional residual sum and an activation, in one pass over the normalized values.

It saves the input and the statistics of the channels, and the result for a ReLU of the residual sum, which the next
layer saves as well; eager saves the input of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import Op, requested
from fused.backends.reference import batch_norm as formulas
from fused.backends.reference.activations import ACTIVATIONS
from fused.backends.reference.numbers import compute_dtype
from fused.backends.strides import channels_last_of, owned
from fused.backends.tracing import differentiated, transformed
from fused.checks import check_activation, check_eps, check_float, check_row, shape
from fused.recomputation import Recomputation, saved_tensors
from fused.sharding import localise, sharded

Tensor = torch.Tensor

Running = tuple[Tensor | None, Tensor | None]
"""The running mean and variance."""


def _as_rows(args: Sequence[Any]) -> tuple[Sequence[Any], Callable[[Any], Any]]:
    """Reshape to ``[samples, channels, size]``, or to ``[samples · size, channels]`` if x has the channels last."""
    x = args[0]
    last = channels_last_of(x) is not None

    def as_rows(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or arg.ndim < 2:
            return arg
        return arg.movedim(1, -1).reshape(-1, x.shape[1]) if last else arg.flatten(2) if arg.ndim > 2 else arg

    def back(result: Any) -> Any:
        if result is None or result.ndim < 2:
            return result
        return result.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1) if last else result.view(x.shape)

    def finish(results: Any) -> Any:
        return tuple(map(back, results)) if isinstance(results, tuple) else back(results)

    return [as_rows(arg) for arg in args], finish


BATCH_NORM = Op(
    "batch_norm",
    forward=formulas.batch_norm,
    backward=formulas.batch_norm_backward,
    canonical=_as_rows,
    small_on_cpu=lambda **settings: 2**18,
)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``act(F.batch_norm(x, running_mean, running_var, …) + residual)``.

    Args:
        x: ``[samples, channels, ...]``; float16, bfloat16, float32 or float64, any strides.
        running_mean, running_var: ``[channels]``, or None for both. In training they are updated in place, as torch
            does; else they are the statistics, unless they are None.
        weight, bias: ``[channels]``, or None. DTensors beside a plain x stand for their local shards.
        training: normalize by the statistics of x.
        momentum: of the update; None for the average of all batches, which needs ``num_batches_tracked``.
        eps: added to the variance.
        num_batches_tracked: a number of type int64 that training increases by one, or None.
        activation: a name of `bias_activation`, or None for none.
        residual: of the shape of x, or None. Any other that broadcasts with x is added by torch.

    Returns:
        A tensor of the shape of x, with the strides of ``F.batch_norm``, in the dtype of the expression. Saves x, the
        parameters, and mean and 1/deviation of each channel; and with a residual and an activation, the result if the
        gradient of the activation needs nothing else (ReLU), or the residual if it needs more.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: if a row has another shape or device, one of the running statistics is missing, there is only one
            value for each channel in training, or there is no such activation. Nothing was updated then.
        RuntimeError: from torch, if the residual does not broadcast with x; after the update, as in the expression.

    Source: Ioffe and Szegedy 2015; ``torch.nn.functional.batch_norm`` and ``torch.nn.BatchNorm2d``.
    """
    if sharded(running_mean, running_var, weight, bias) and not sharded(x):
        given = (running_mean, running_var, weight, bias)
        running_mean, running_var, weight, bias = localise("batch_norm", x, given).others
    rows = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _check(x, rows, training, momentum, num_batches_tracked, eps, activation, residual)
    if residual is not None and residual.shape != x.shape:
        args = (x, running_mean, running_var, weight, bias, training, momentum, eps)
        return _finished(batch_norm(*args, num_batches_tracked=num_batches_tracked), residual, activation)
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if momentum is None:
        momentum = 1.0 / float(num_batches_tracked) if training and num_batches_tracked is not None else 0.0
    operands, running = (x, weight, bias, residual), (running_mean, running_var)
    if transformed(*operands) or sharded(*operands, *running) or not x.numel() or differentiated(*running):
        normed = F.batch_norm(x, *running, weight, bias, training or running_mean is None, momentum, eps)
        return _finished(normed, residual, activation)
    if not differentiated(*operands):
        return _forward(x, running, weight, bias, residual, training, momentum, eps, activation)[0]
    result: Tensor = _BatchNorm.apply(x, weight, bias, residual, running, training, momentum, eps, activation)
    return result


def _finished(z: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    z = z if residual is None else z + residual
    return z if activation is None else ACTIVATIONS[activation].value(z)


def _forward(
    x: Tensor,
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, mean and 1/deviation, and update the running statistics in training."""
    mean, variance = running
    if training or mean is None or variance is None:
        if _by_kernel(x):
            return formulas.batch_norm_of_batch(x, weight, bias, running, residual, momentum, eps, activation)
        mean, rstd = _of_batch(x, running, momentum, eps)
    else:
        mean = mean.clone()  # which training updates, perhaps before the backward pass
        rstd = torch.rsqrt(variance.to(compute_dtype(x.dtype)) + eps)
    return _normalized(x, weight, bias, mean, rstd, residual, activation=activation), mean, rstd


def _by_kernel(x: Tensor) -> bool:
    """Check whether torch's kernel normalizes by the statistics of the batch.

    It rounds 16-bit numbers before the activation as well, and statistics beside parameters of 16 bits.
    """
    request = requested()
    return not x.is_cuda and (request == "reference" or (request is None and x.dtype.itemsize >= 4))


def _of_batch(x: Tensor, running: Running, momentum: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1/deviation of the batch, and update the running statistics exactly as torch's kernel does."""
    running_mean, running_var = running
    is_rounded = x.is_cpu and (x if running_mean is None else running_mean).dtype.itemsize < 4
    if is_rounded:
        if running_mean is not None:
            torch.batch_norm_update_stats(x, running_mean, running_var, momentum)
        return formulas.statistics_by_kernel(x, eps)
    mean, variance = torch.batch_norm_update_stats(x, running_mean, running_var, momentum)
    return mean, torch.rsqrt(variance + eps)


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    args = (x, mean, rstd, weight, bias, residual)
    result: Tensor = BATCH_NORM.run("forward", args, requested(), activation=activation, out_dtype=dtype)
    return result.contiguous(memory_format=channels_last_of(x) or torch.contiguous_format)


class _BatchNorm(torch.autograd.Function):
    """Autograd function for plain tensors, saving x, the parameters and the statistics of the channels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running: Running,
        training: bool,
        momentum: float,
        eps: float,
        activation: str | None,
    ) -> Tensor:
        given = (weight, bias, residual, training, momentum, eps, activation)
        result, mean, rstd = owned(_forward(x, running, *given))
        if rstd.dtype.itemsize < 4:
            mean, rstd = formulas.statistics_by_kernel(x, eps)
        by_result = activation is not None and ACTIVATIONS[activation].saves_result(result.dtype)
        ctx.from_result = by_result and residual is not None
        kept = result if ctx.from_result else None if activation is None else residual
        ctx.save_for_backward(x, weight, bias, mean, rstd, kept)
        ctx.of_batch, ctx.eps, ctx.activation = training or running[0] is None, eps, activation
        ctx.backend = requested()
        by_kernel = ctx.of_batch and _by_kernel(x)
        if kept is residual and not (by_kernel and x.dtype.itemsize < 4):
            # torch's kernel rounds wider numbers as the formula does, not as compiled code.
            request = requested() or ("reference" if by_kernel else None)
            ctx.recomputation = Recomputation(result, partial(_normalized, activation=activation), request)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, kept = saved_tensors(ctx)
        if torch.is_grad_enabled() and ctx.of_batch:
            mean, rstd = formulas.statistics(x, ctx.eps)  # recomputed to be differentiable again
        gradients = BATCH_NORM.run(
            "backward",
            (x, g, mean, rstd, weight, bias, kept),
            ctx.backend,
            activation=ctx.activation,
            of_batch=ctx.of_batch,
            from_result=ctx.from_result,
            needs=tuple(ctx.needs_input_grad[:4]),
        )
        return (*gradients, None, None, None, None, None)


def _check(
    x: Tensor,
    rows: dict[str, Tensor | None],
    training: bool,
    momentum: float | None,
    num_batches_tracked: Tensor | None,
    eps: object,
    activation: str | None,
    residual: Tensor | None,
) -> None:
    check_float("batch_norm", "input", x, min_ndim=2)
    for name, row in rows.items():
        check_row("batch_norm", x, name, row, dim=1)
    if (rows["running_mean"] is None) != (rows["running_var"] is None):
        raise ValueError("batch_norm: give both running_mean and running_var, or neither")
    if training and momentum is None and num_batches_tracked is None and rows["running_mean"] is not None:
        raise ValueError("batch_norm: momentum=None averages all batches, which needs num_batches_tracked")
    values = x.numel() // x.shape[1] if x.shape[1] else 0
    if (training or rows["running_mean"] is None) and values == 1:
        raise ValueError(f"batch_norm: expected more than 1 value per channel in training, got input {shape(x)}")
    check_eps("batch_norm", eps)
    if activation is not None:
        check_activation("batch_norm", activation)
    if residual is not None:
        check_float("batch_norm", "residual", residual)
