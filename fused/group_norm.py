"""Group norm with an optional scale and shift of each sample and an activation, in one pass.

It saves the input, the parameters, and two numbers per group; eager saves a tensor for each step after the norm too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fused.adaptive_norm import modulated
from fused.backends import Op, requested
from fused.backends.reference import group_norm as formulas
from fused.backends.reference.activations import ACTIVATIONS
from fused.backends.reference.numbers import autocast_norm_dtype
from fused.backends.strides import owned
from fused.backends.tracing import differentiated, transformed
from fused.checks import MismatchError, broadcast_shape, check_activation, check_eps, check_float, check_row, shape
from fused.recomputation import Recomputation, saved_tensors
from fused.sharding import localise, sharded

Tensor = torch.Tensor
Parameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The weight, the bias, the scale and the shift."""

GROUP_NORM = Op("group_norm", forward=formulas.group_norm, backward=formulas.group_norm_backward)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Compute ``act(F.group_norm(x, num_groups, weight, bias, eps) · (1 + scale) + shift)``.

    Args:
        x: ``[samples, channels, ...]``; float16, bfloat16, float32 or float64, any strides. A DTensor stays sharded on
            the samples; if sharded on another dimension, it is gathered.
        num_groups: divides the channels.
        weight, bias: ``[channels]``, or None. May have another dtype than x.
        eps: added to the variance.
        activation: a name of `bias_activation`, or None for none.
        scale, shift: ``[samples or 1, channels, 1, ...]``, with as many dimensions as x, or None. Any other that
            broadcasts with x is applied by torch after the norm.

    Returns:
        A tensor of the shape of x, with the strides of ``F.group_norm``, in the dtype of the expression. 16-bit numbers
        are computed in float32 and rounded once. Saves x, the parameters, and mean and 1/deviation of each group in
        float32.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: if the groups do not divide the channels, a parameter has another shape or device, or there is no
            such activation.

    Source: Wu and He 2018; ``torch.nn.functional.group_norm``; the scale and shift as in diffusers' ``ResnetBlock2D``.
    """
    _check(x, num_groups, eps, activation)
    for name, row in (("weight", weight), ("bias", bias)):
        check_row("group_norm", x, name, row, dim=1)
    for name, factor in (("scale", scale), ("shift", shift)):
        _check_factor(x, name, factor)
    if not all(factor is None or _is_per_sample(x, factor) for factor in (scale, shift)):
        normed = group_norm(x, num_groups, weight, bias, eps)
        return _finished(normed, scale, shift, activation)
    parameters = (weight, bias, scale, shift)
    if not sharded(x, *parameters):
        return _applied(x, parameters, num_groups, eps, activation)
    rows = [None if row is None else row.reshape(-1, *(1,) * (x.ndim - 2)) for row in (weight, bias)]
    local = localise("group_norm", x, [*rows, scale, shift], whole=range(1, x.ndim))
    weight, bias = (None if row is None else row.flatten() for row in local.others[:2])
    given = (weight, bias, local.others[2], local.others[3])
    return local.wrap(_applied(local.x, given, num_groups, eps, activation))


def _is_per_sample(x: Tensor, factor: Tensor) -> bool:
    if factor.ndim != x.ndim or factor.shape[1] != x.shape[1] or any(size != 1 for size in factor.shape[2:]):
        return False
    return bool(factor.shape[0] == x.shape[0] or factor.shape[0] == 1)


def _applied(x: Tensor, parameters: Parameters, groups: int, eps: float, activation: str | None) -> Tensor:
    if transformed(x, *parameters) or not x.numel():
        return _expression(x, parameters, groups, eps, activation)
    dtype = _dtype(x, parameters)
    if not differentiated(x, *parameters):
        return _forward(x, parameters, groups, eps, activation, dtype)[0]
    result: Tensor = _GroupNorm.apply(x, *parameters, groups, eps, activation, dtype)
    return result


def _expression(x: Tensor, parameters: Parameters, groups: int, eps: float, activation: str | None) -> Tensor:
    """Compute the result in operations that tracers and transforms see."""
    weight, bias, scale, shift = parameters
    weight, bias = (None if row is None else row.to(x.dtype) for row in (weight, bias))
    return _finished(F.group_norm(x, groups, weight, bias, eps), scale, shift, activation)


def _finished(z: Tensor, scale: Tensor | None, shift: Tensor | None, activation: str | None) -> Tensor:
    z = modulated(z, scale, shift)
    return z if activation is None else ACTIVATIONS[activation].value(z)


def _dtype(x: Tensor, parameters: Parameters) -> torch.dtype:
    """Return the dtype of the expression."""
    dtype = autocast_norm_dtype(x.dtype, x.device)
    for each in parameters[2:]:
        dtype = dtype if each is None else torch.promote_types(dtype, each.dtype)
    return dtype


def _forward(
    x: Tensor, parameters: Parameters, groups: int, eps: float, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    settings: dict[str, Any] = {"groups": groups, "eps": eps, "activation": activation, "out_dtype": dtype}
    result, mean, rstd = GROUP_NORM.run("forward", (x, *parameters), _backend(x, activation), **settings)
    return result.contiguous(memory_format=formulas.layout_of(x)), mean, rstd


def _backend(x: Tensor, activation: str | None) -> str | None:
    """Return the requested backend: torch's kernel has no activation, and compiled code no layout of channels last."""
    by_kernel = activation is None or formulas.layout_of(x) != torch.contiguous_format
    return requested() or ("reference" if x.is_cpu and by_kernel else None)


def _again(x: Tensor, *saved: Tensor | None, **settings: Any) -> Tensor:
    weight, bias, scale, shift = saved[:4]
    return _forward(x, (weight, bias, scale, shift), **settings)[0]


class _GroupNorm(torch.autograd.Function):
    """Autograd function for plain tensors, saving x, the parameters and the statistics of the groups."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        groups: int,
        eps: float,
        activation: str | None,
        dtype: torch.dtype,
    ) -> Tensor:
        parameters = (weight, bias, scale, shift)
        result, mean, rstd = owned(_forward(x, parameters, groups, eps, activation, dtype))
        ctx.save_for_backward(x, *parameters, mean, rstd)
        ctx.groups, ctx.eps, ctx.activation = groups, eps, activation
        ctx.backend = _backend(x, activation)
        again = partial(_again, groups=groups, eps=eps, activation=activation, dtype=dtype)
        ctx.recomputation = Recomputation(result, again, requested())
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters, mean, rstd = saved_tensors(ctx)
        if torch.is_grad_enabled():
            mean, rstd = formulas.statistics(x, ctx.groups, ctx.eps)  # recomputed to be differentiable again
        gradients = GROUP_NORM.run(
            "backward",
            (g, x, *parameters, mean, rstd),
            ctx.backend,
            groups=ctx.groups,
            activation=ctx.activation,
            needs=tuple(ctx.needs_input_grad[:5]),
        )
        return *gradients, None, None, None, None


def _check(x: Tensor, groups: int, eps: object, activation: str | None) -> None:
    check_float("group_norm", "input", x, min_ndim=2)
    if not isinstance(groups, int) or groups < 1 or x.shape[1] % groups:
        raise MismatchError(
            f"group_norm: {groups} groups do not divide the {x.shape[1]} channels of the input {shape(x)}"
        )
    check_eps("group_norm", eps)
    if activation is not None:
        check_activation("group_norm", activation)


def _check_factor(x: Tensor, name: str, factor: Tensor | None) -> None:
    if factor is not None:
        check_float("group_norm", name, factor)
        broadcast_shape("group_norm", x, name, factor)
