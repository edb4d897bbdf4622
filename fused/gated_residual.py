"""Residual sum with a gate, ``residual + value · gate``, in one pass forward and one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused.backends import Op, requested
from fused.backends.reference import gated_residual as formulas
from fused.backends.rows import merged_shapes
from fused.backends.tracing import differentiated, transformed
from fused.checks import broadcast_shape, broadcasts_to, check_float
from fused.sharding import localise, sharded

Tensor = torch.Tensor


def _merged(args: Sequence[Any]) -> tuple[Sequence[Any], Callable[[Any], Any]]:
    """Merge dimensions broadcast alike, for one compilation to serve many shapes."""
    whole, gate = args[0].shape, args[-1].shape
    sizes, of_gate = merged_shapes(whole, gate)

    def finish(results: Any) -> Any:
        if isinstance(results, Tensor):
            return results.view(whole)
        shapes = (whole, gate)
        return tuple(None if one is None else one.view(shape) for one, shape in zip(results, shapes, strict=True))

    return [*(arg if arg is None else arg.reshape(sizes) for arg in args[:-1]), args[-1].reshape(of_gate)], finish


GATED_RESIDUAL = Op(
    "gated_residual",
    forward=formulas.gated_residual,
    backward=formulas.gated_residual_backward,
    canonical=_merged,
    operands=lambda args: args[:2],
    kernels="fused.backends.triton.gated_residual",
)


def gated_residual(residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """Compute ``residual + value · gate``.

    Args:
        residual: the shape of `value`, floating point; any strides.
        value: ``[...]``, any rank, floating point.
        gate: broadcastable with `value`: ``[samples, 1, hidden]`` of a diffusion transformer, ``[hidden]`` or
            ``[channels, 1, 1]`` of a layer scale. If a shape makes the sum larger than `value`, torch computes it.

    Returns:
        The shape and dtype of the sum. 16-bit numbers are computed in float32 and rounded once. Saves the gate, and the
        value if the gate needs a gradient. Each gradient has the dtype of its tensor; that of the gate is summed in
        float32.

    Raises:
        TypeError: if a tensor is not floating point.
        ValueError: for shapes that do not broadcast, or tensors on two devices.

    Source: Peebles and Xie 2023 (DiT); Touvron et al. 2021 (layer scale).
    """
    op = "gated_residual"
    for name, tensor in (("value", value), ("residual", residual), ("gate", gate)):
        check_float(op, name, tensor)
        broadcast_shape(op, value, name, tensor, "the value")
    if (
        transformed(value, residual, gate)
        or not value.numel()
        or residual.shape != value.shape
        or not broadcasts_to(gate, value)
    ):
        return formulas.gated_residual(residual, value, gate)
    if not sharded(residual, value, gate):
        return _applied(residual, value, gate)
    local = localise(op, value, [residual, gate])
    return local.wrap(_applied(local.given(0), local.x, local.given(1)))


def _applied(residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    if not differentiated(residual, value, gate):
        return _forward(residual, value, gate)
    result: Tensor = _GatedResidual.apply(residual, value, gate)
    return result


def _forward(residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    result: Tensor = GATED_RESIDUAL.run("forward", (residual, value, gate), requested())
    return result


class _GatedResidual(torch.autograd.Function):
    """Autograd function of residual + value·gate for plain tensors, saving value and gate."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(ctx: Any, residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(value if ctx.needs_input_grad[2] else None, gate)
        ctx.dtypes = (residual.dtype, value.dtype)
        ctx.backend = requested()
        return _forward(residual, value, gate)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        value, gate = ctx.saved_tensors
        residual_dtype, value_dtype = (
            dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        of_value, of_gate = GATED_RESIDUAL.run("backward", (g, value, gate), ctx.backend, value_dtype=value_dtype)
        of_gate = None if of_gate is None else of_gate.reshape(gate.shape)
        return None if residual_dtype is None else g.to(residual_dtype), of_value, of_gate
