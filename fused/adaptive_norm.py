"""Adaptive layer norm, with the scale and shift of each sample or token, in one pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import Op, compiled_norms, requested
from fused.backends.reference import adaptive_norm as formulas
from fused.backends.reference.numbers import autocast_norm_dtype
from fused.backends.strides import owned
from fused.backends.tracing import differentiated, transformed
from fused.checks import broadcast_shape, broadcasts_to, check_eps, check_float, check_row
from fused.recomputation import Recomputation, saved_tensors
from fused.sharding import localise, sharded

Tensor = torch.Tensor
Parameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The scale, the shift, the weight and the bias."""

ADAPTIVE_LAYER_NORM = Op(
    "adaptive_layer_norm", forward=formulas.adaptive_layer_norm, backward=formulas.adaptive_layer_norm_backward
)
ADAPTIVE_LAYER_NORM.register(
    "inductor",
    forward=compiled_norms.adaptive_layer_norm,
    backward=formulas.adaptive_layer_norm_backward,
    finish_forward=compiled_norms.adaptive_layer_norm_statistics,
)


def adaptive_layer_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``F.layer_norm(x, (hidden,), weight, bias, eps) · (1 + scale) + shift``.

    Args:
        x: ``[..., hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor may be
            sharded on any dimension; if sharded on the last, it is gathered.
        scale, shift: broadcastable with x, such as ``[samples, 1, hidden]``, or None. If the result is larger than x,
            torch applies them after the norm.
        weight, bias: ``[hidden]``, or None.
        eps: added to the variance.

    Returns:
        A tensor in the dtype of the expression, contiguous. 16-bit numbers are computed in float32 and rounded once.
        Saves x, the parameters, and mean and 1/deviation of each row in float32; eager saves the norm as well.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: for a weight or bias that is not ``[hidden]``, shapes that do not broadcast, or two devices.

    Source: Peebles and Xie 2023 (DiT); diffusers' ``AdaLayerNormZero``.
    """
    check_float("adaptive_layer_norm", "input", x, min_ndim=1)
    check_eps("adaptive_layer_norm", eps)
    for name, factor in (("scale", scale), ("shift", shift)):
        if factor is not None:
            check_float("adaptive_layer_norm", name, factor)
            broadcast_shape("adaptive_layer_norm", x, name, factor)
    for name, row in (("weight", weight), ("bias", bias)):
        check_row("adaptive_layer_norm", x, name, row)
    if not all(factor is None or broadcasts_to(factor, x) for factor in (scale, shift)):
        return modulated(adaptive_layer_norm(x, None, None, weight, bias, eps), scale, shift)
    parameters = (scale, shift, weight, bias)
    if not sharded(x, *parameters):
        return _applied(x, parameters, eps)
    local = localise("adaptive_layer_norm", x, parameters, whole=[-1])
    others = (local.others[0], local.others[1], local.others[2], local.others[3])
    return local.wrap(_applied(local.x, others, eps))


def _applied(x: Tensor, parameters: Parameters, eps: float) -> Tensor:
    if transformed(x, *parameters) or not x.numel():
        return _expression(x, parameters, eps)
    dtype = _dtype(x, parameters)
    if not differentiated(x, *parameters):
        return _forward(x, parameters, eps, dtype)[0]
    result: Tensor = _AdaptiveLayerNorm.apply(x, *parameters, eps, dtype)
    return result


def _expression(x: Tensor, parameters: Parameters, eps: float) -> Tensor:
    """Compute the result in operations that tracers and transforms see."""
    scale, shift, weight, bias = parameters
    weight, bias = (None if row is None else row.to(x.dtype) for row in (weight, bias))
    return modulated(F.layer_norm(x, x.shape[-1:], weight, bias, eps), scale, shift)


def modulated(normed: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Compute ``normed · (1 + scale) + shift``, without the missing ones."""
    scaled = normed if scale is None else normed * (1 + scale)
    return scaled if shift is None else scaled + shift


def _dtype(x: Tensor, parameters: Parameters) -> torch.dtype:
    """Return the dtype of the expression."""
    dtype = autocast_norm_dtype(x.dtype, x.device)
    for factor in parameters[:2]:
        dtype = dtype if factor is None or not factor.ndim else torch.promote_types(dtype, factor.dtype)
    return dtype


def _forward(x: Tensor, parameters: Parameters, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, rstd = ADAPTIVE_LAYER_NORM.run("forward", (x, *parameters), requested(), eps=eps, out_dtype=dtype)
    return result.contiguous(), mean, rstd


def _again(x: Tensor, *saved: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    scale, shift, weight, bias = saved[:4]
    return _forward(x, (scale, shift, weight, bias), eps, dtype)[0]


class _AdaptiveLayerNorm(torch.autograd.Function):
    """Autograd function for plain tensors, saving x, the parameters and the statistics of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        parameters = (scale, shift, weight, bias)
        result, mean, rstd = owned(_forward(x, parameters, eps, dtype))
        ctx.save_for_backward(x, *parameters, mean, rstd)
        ctx.eps, ctx.backend = eps, requested()
        ctx.recomputation = Recomputation(result, partial(_again, eps=eps, dtype=dtype), ctx.backend)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ADAPTIVE_LAYER_NORM.run(
            "backward", (g, *saved_tensors(ctx)), ctx.backend, eps=ctx.eps, needs=tuple(ctx.needs_input_grad[:5])
        )
        return *gradients, None, None
