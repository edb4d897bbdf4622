"""Gated activations in one pass: act(gate)·up, with only gate and up saved.

One-tensor forms take gate and up concatenated in the last dimension, the gate first, as Megatron's first linear
layer returns them; `gated_activation` takes two tensors, as in HuggingFace models.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from fused.backends import requested
from fused.backends.reference import gated as formulas
from fused.backends.reference.activations import ACTIVATIONS
from fused.backends.tracing import differentiated, transformed
from fused.checks import (
    MismatchError,
    broadcast_shape,
    check_activation,
    check_bias,
    check_float,
    check_same_device,
    check_weights,
    shape,
)
from fused.gated_autograd import Gated, GatedActivation, GateSecond, forward
from fused.sharding import localise, sharded

Tensor = torch.Tensor


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: str,
    *,
    linear_offset: float = 0.0,
    weights: Tensor | None = None,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute ``act(gate) · (up + linear_offset)``, saving only gate and up for the backward pass.

    Args:
        gate, up: ``[..., hidden]``, which broadcast with each other; any rank from 1, any strides (two halves of one
            tensor are not copied); float16, bfloat16, float32 or float64. DTensors may be sharded on any dimension.
        activation: of the gate, a name of `bias_activation`: ``"silu"`` for SwiGLU, ``"gelu"`` and
            ``"gelu_tanh"`` for GEGLU, ``"relu"`` for ReGLU, ``"quick_gelu"``, ``"sigmoid"`` for GLU, and others.
        linear_offset: added to the up (1 in GPT-OSS).
        weights: ``[..., 1]``, a number for each token to multiply the result with; may have another dtype.
        clamp_value: c, at which the gate is first clamped from above, and the up to −c … c (7 in GPT-OSS). Clamped
            elements have no gradient; elements equal to c have that of `torch.clamp`, which is 0 from torch 2.14 on.
        fp8_input_store: save gate and up for the backward pass as float8_e4m3fn, each with one scale for the
            tensor (for its shard, if it is a DTensor). This takes a quarter of the memory of float32; the
            gradients are those of inputs that are off by up to 1/16 of their value. Infinities are saved as NaN.
            `torch.func` transforms use the original inputs; a second derivative raises RuntimeError.

    Returns:
        ``[..., hidden]`` in the dtype that ``gate * up`` has in torch, for any dtype of the weights. 16-bit
        inputs are computed in float32 and rounded once. Each gradient has the dtype of its tensor; the gradient of
        the weights is summed in float32.

    Raises:
        TypeError: if a tensor is not floating point, or the offset or the clamp not a number.
        ValueError: for an unknown activation, shapes that do not fit, tensors on two devices, or a negative clamp.

    Source: HuggingFace's gated MLPs; Megatron-LM ``fused_bias_swiglu`` and ``fused_bias_geglu``; Liger-Kernel.
    """
    op = "gated_activation"
    check_activation(op, activation)
    how = settings(op, activation, clamp_value, fp8_input_store, linear_offset)
    check_float(op, "gate", gate, min_ndim=1)
    check_float(op, "up", up)
    if not sharded(gate, up, weights):
        if gate.shape != up.shape:
            size = broadcast_shape(op, up, "gate", gate, "up")
            gate, up = gate.expand(size), up.expand(size)
        _check_two(op, gate, up, weights)
        return _apply(gate, up, None, weights, how)
    if sharded(gate):
        _check_two(op, gate, up, weights)
    local = localise(op, gate, [up, weights])
    up = local.given(0)
    _check_two(op, local.x, up, local.others[1])
    return local.wrap(_apply(local.x, up, None, local.others[1], how))


def gated_halves(y: Tensor, activation: str, half: int | None = None, *, gate_first: bool = True) -> Tensor:
    """Compute ``act(y[..., :half]) · y[..., half:]``, in one pass over y where these are its halves.

    Args:
        y: ``[..., 2·hidden]``, as `gated_activation`; of another width if the two parts broadcast.
        activation: as `gated_activation`.
        half: where y is split; None splits it as ``y.chunk(2, dim=-1)``.
        gate_first: whether the first part is the gate; if not, ``y[..., :half] · act(y[..., half:])`` is computed.

    Returns:
        ``[..., hidden]``, as `gated_activation`.

    Raises:
        TypeError, ValueError: as `gated_activation`.
    """
    are_halves = y.shape[-1] % 2 == 0 and half in (None, y.shape[-1] // 2)
    if are_halves and gate_first:
        return gated("gated_halves", y, None, None, settings("gated_halves", activation, None, False))
    if are_halves and differentiated(y) and not sharded(y) and not transformed(y):
        check_float("gated_halves", "input", y, min_ndim=1)
        result: Tensor = GateSecond.apply(y, settings("gated_halves", activation, None, False))
        return result
    first, second = y.chunk(2, dim=-1) if half is None else (y[..., :half], y[..., half:])
    gate, up = (first, second) if gate_first else (second, first)
    return gated_activation(gate, up, activation)


def _check_two(op: str, gate: Tensor, up: Tensor, weights: Tensor | None) -> None:
    if gate.shape != up.shape:
        raise MismatchError(f"{op}: gate {shape(gate)} and up {shape(up)} must have one shape")
    check_same_device(op, gate, "up", up)
    _check_weights(op, gate, weights)


def settings(
    op: str,
    activation: str,
    clamp_value: float | None,
    fp8_input_store: bool,
    linear_offset: float = 0.0,
    offload: bool = False,
) -> Gated:
    """Check the settings of an op and return them."""
    offset = None if linear_offset == 0 else _number(op, "linear_offset", linear_offset)
    clamp = None if clamp_value is None else _number(op, "clamp_value", clamp_value)
    if clamp is not None and not torch.compiler.is_compiling() and (clamp < 0 or math.isnan(clamp)):
        raise ValueError(f"{op}: clamp_value must be 0 or more, or None for no clamp, got {clamp_value}")
    if offset is None and clamp is None and not (fp8_input_store or offload):
        return _PLAIN[activation]
    return Gated(activation, offset, clamp, bool(fp8_input_store), offload)


_PLAIN = {activation: Gated(activation) for activation in ACTIVATIONS}


def _number(op: str, name: str, value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    return float(value)


def gated(op: str, y: Tensor, bias: Tensor | None, weights: Tensor | None, how: Gated) -> Tensor:
    """Run a one-tensor form under the name `op`: check the arguments, take local shards, and apply the op."""
    check_float(op, "input", y, min_ndim=1)
    if not sharded(y, bias, weights):
        _check_one(op, y, bias, weights)
        return _apply(y, None, bias, weights, how)
    if sharded(y):
        _check_one(op, y, bias, weights)
    # The halves of a shard of y's last dimension are not a matching gate and up.
    local = localise(op, y, [bias, weights], whole=[-1])
    bias, weights = local.others
    _check_one(op, local.x, bias, weights)
    halved = dataclasses.replace(local, shape=(*local.shape[:-1], y.shape[-1] // 2))
    return halved.wrap(_apply(local.x, None, bias, weights, how))


def _check_one(op: str, y: Tensor, bias: Tensor | None, weights: Tensor | None) -> None:
    if y.shape[-1] % 2 != 0:
        raise ValueError(
            f"{op}: the last dimension of the input {shape(y)} is odd; it must be the gate and the up side by side"
        )
    check_bias(op, y, bias)
    _check_weights(op, y, weights)


def _check_weights(op: str, x: Tensor, weights: Tensor | None) -> None:
    if weights is not None:
        check_float(op, "weights", weights)
        check_weights(op, x, weights)


def _apply(y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, how: Gated) -> Tensor:
    # The compiler can trace the autograd function as well, and only then are the 8-bit tensors saved.
    if transformed(y, up, bias, weights) and not (how.fp8 and torch.compiler.is_compiling()):
        return formulas.gated_activation(y, up, bias, weights, how.offset, how.clamp, activation=how.activation)
    if not differentiated(y, up, bias, weights):
        return forward(y, up, bias, weights, how, requested())
    result: Tensor = GatedActivation.apply(y, up, bias, weights, how)
    return result
