"""Star-ReLU, ``scale · relu(x)² + bias``, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch

from fused.backends import Op, requested
from fused.backends.reference import star_relu as formulas
from fused.backends.rows import as_rows
from fused.backends.tracing import differentiated, transformed
from fused.checks import MismatchError, check_float, check_same_device, shape
from fused.sharding import localise, sharded

Tensor = torch.Tensor

STAR_RELU = Op(
    "star_relu",
    forward=formulas.star_relu,
    backward=formulas.star_relu_backward,
    canonical=as_rows,
    operands=lambda args: args[:1],
)


def star_relu(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute ``scale · relu(x)² + bias``.

    Args:
        x: ``[..., hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor may be
            sharded on any dimension; if sharded on the last, it is gathered.
        scale, bias: ``[hidden]``, ``[1]`` or a number ``[]``, both alike.

    Returns:
        ``[..., hidden]`` in the dtype of the expression. 16-bit numbers are computed in float32 and rounded once. Saves
        x and the scale; eager saves the ReLU and its square. The gradients of scale and bias are summed in float32.

    Raises:
        TypeError: if a tensor is not floating point.
        ValueError: for other shapes, or tensors on two devices.

    Source: Yu et al. 2022 (MetaFormer baselines); timm's ``StarReLU``.
    """
    op = "star_relu"
    check_float(op, "x", x, min_ndim=1)
    dtype = x.dtype
    for name, row in (("scale", scale), ("bias", bias)):
        check_float(op, name, row)
        check_same_device(op, x, name, row)
        if row.shape not in ((), (1,), x.shape[-1:]):
            raise MismatchError(f"{op}: {name} must be [{x.shape[-1]}], [1] or [] for x {shape(x)}, got {shape(row)}")
        dtype = torch.promote_types(dtype, row.dtype) if row.ndim else dtype
    if scale.shape != bias.shape:
        raise MismatchError(f"{op}: scale {shape(scale)} and bias {shape(bias)} must have one shape")
    scale, bias = scale.reshape(-1), bias.reshape(-1)
    if not sharded(x, scale, bias):
        return _applied(x, scale, bias, dtype)
    local = localise(op, x, [scale, bias], whole=[-1])
    return local.wrap(_applied(local.x, local.given(0), local.given(1), dtype))


def _applied(x: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    if transformed(x, scale, bias) or not x.numel():
        return formulas.star_relu(x, scale, bias, out_dtype=dtype)
    if not differentiated(x, scale, bias):
        result: Tensor = STAR_RELU.run("forward", (x, scale, bias), requested(), out_dtype=dtype)
        return result
    applied: Tensor = _StarReLU.apply(x, scale, bias, dtype)
    return applied


class _StarReLU(torch.autograd.Function):
    """Autograd function for plain tensors, saving x and the scale."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.bias_dtype, ctx.backend = bias.dtype, requested()
        result: Tensor = STAR_RELU.run("forward", (x, scale, bias), ctx.backend, out_dtype=dtype)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_scale, of_bias, _ = ctx.needs_input_grad
        args, bias_dtype = (g, *ctx.saved_tensors), ctx.bias_dtype if of_bias else None
        gradients: tuple[Tensor | None, ...] = STAR_RELU.run(
            "backward", args, ctx.backend, bias_dtype=bias_dtype, needs=(of_x, of_scale)
        )
        return *gradients, None
