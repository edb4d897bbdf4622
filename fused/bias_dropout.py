"""Bias + dropout + residual in one pass, with the keep mask saved as one byte per element, or drawn again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import Op, requested
from fused.backends.reference import bias_dropout as formulas
from fused.backends.rows import as_rows
from fused.backends.tracing import differentiated, needs_reference, transformed, watched
from fused.checks import MismatchError, broadcast_shape, check_broadcast, check_float, check_same_device, shape
from fused.dropout import check_probability, keep_mask, keep_scale
from fused.philox import DropoutStream, dropout_stream
from fused.sharding import localise, sharded

Tensor = torch.Tensor
Keep = Tensor | DropoutStream
BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


# Number of elements from which compiled code is faster, forward and backward together.
_COMPILED_FROM = 2**17

BIAS_DROPOUT = Op(
    "bias_dropout",
    forward=formulas.bias_dropout,
    backward=formulas.bias_dropout_backward,
    canonical=as_rows,
    operands=lambda args: (args[2], args[0]),
    small_on_cpu=lambda **statics: _COMPILED_FROM,
    kernels="fused.backends.triton.bias_dropout",
)


class _BiasDropout(torch.autograd.Function):
    """Autograd function of residual + keep·scale·(x + bias) for plain tensors, saving `keep`: a mask or a stream."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Keep | None, scale: float
    ) -> Tensor:
        ctx.stream = keep if isinstance(keep, DropoutStream) else None
        ctx.save_for_backward(None if isinstance(keep, DropoutStream) else keep)
        ctx.scale = scale
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, bias, residual)]
        ctx.backend = requested()
        result: Tensor = BIAS_DROPOUT.run("forward", (x, bias, residual, keep, scale), ctx.backend)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, bias_dtype, residual_dtype = (
            dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        dx = dbias = None
        if x_dtype is not None or bias_dtype is not None:
            (keep,) = ctx.saved_tensors if ctx.stream is None else (ctx.stream,)
            if ctx.stream is not None and needs_reference((grad_output,)):
                keep = ctx.stream.mask(grad_output.shape, grad_output.device)
            dx, dbias = BIAS_DROPOUT.run(
                "backward",
                (grad_output, keep, ctx.scale),
                ctx.backend,
                x_dtype=x_dtype,
                bias_dtype=bias_dtype,
            )
        dresidual = None if residual_dtype is None else grad_output.to(residual_dtype)
        return dx, dbias, dresidual, None, None


def bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool = True) -> Tensor:
    """Compute ``F.dropout(x + bias, p, training)`` in one pass.

    Args:
        x: ``[..., hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. Never
            modified. A DTensor may be sharded on any dimension; without dropout nothing is gathered.
        bias: ``[hidden]``, or anything that broadcasts with x, or None for no bias.
        p: probability of dropping an element.
        training: False for no dropout.

    Returns:
        The shape of ``x + bias``, in the dtype that this sum has in torch. Saves the keep mask, one byte per
        element; Triton kernels draw it again instead, from seed and offset of the generator, for contiguous x with a
        last dimension divisible by 8 outside of graph capture. Each gradient has the dtype of its tensor; the bias
        gradient is summed in float32. With the same seed the same elements are dropped as by ``F.dropout``. NaN and
        infinity become NaN where they are dropped, as in eager torch.

    Raises:
        TypeError: if x or the bias is not a floating-point tensor.
        ValueError: for a bias that does not broadcast with x, tensors on two devices, or p outside [0, 1].

    Source: Megatron-LM ``fused_bias_dropout``.
    """
    return _bias_dropout("bias_dropout", x, bias, None, p, training)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool = True) -> Tensor:
    """Compute ``residual + F.dropout(x + bias, p, training)`` in one pass.

    Args:
        x, bias, p, training: as for `bias_dropout`.
        residual: broadcastable with ``x + bias``; may have another dtype, may require a gradient.

    Returns:
        The shape of the sum in the widest of the dtypes: a 16-bit x with a float32 residual gives float32. 16-bit
        numbers are computed in float32 and rounded once. Saved, dropped and non-finite numbers as for
        `bias_dropout`. The result is always new memory: the op cannot know whether other code still reads x or
        the residual, so it overwrites only tensors that it has created.

    Raises:
        TypeError: if x, the bias or the residual is not a floating-point tensor.
        ValueError: as `bias_dropout`, and for a residual that does not broadcast.

    Source: Megatron-LM ``fused_bias_dropout``, which casts the residual down to the dtype of x instead.
    """
    op = "bias_dropout_add"
    check_float(op, "residual", residual)
    return _bias_dropout(op, x, bias, residual, p, training)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return a function ``(x_with_bias, residual, prob) -> Tensor``, as Megatron's ``get_bias_dropout_add``.

    Args:
        training: whether the function applies dropout.
        fused: True for `bias_dropout_add`, False for the same in plain torch operations.

    Returns:
        A function of ``(x, bias)``, the residual and the probability, with the shapes, dtypes and errors of
        `bias_dropout_add`.

    Source: Megatron-LM ``get_bias_dropout_add``.
    """
    return functools.partial(_add_fused if fused else _add_unfused, training)


def _add_fused(training: bool, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    return bias_dropout_add(*x_with_bias, residual, prob, training)


def _add_unfused(training: bool, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    check_probability("bias_dropout_add", prob)
    return residual + F.dropout(x if bias is None else x + bias, prob, training)


def _bias_dropout(op: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool) -> Tensor:
    check_probability(op, p)
    check_float(op, "input", x, min_ndim=1)
    if bias is not None:
        check_float(op, "bias", bias)
    p = p if training else 0.0
    if not sharded(x, bias, residual):
        return _broadcast(op, x, bias, residual, p)
    if sharded(x):
        _check_operands(op, x, bias, residual)
    local = localise(op, x, [bias, residual])
    bias, residual = local.others
    _check_operands(op, local.x, bias, residual)
    if local.mesh is None or p == 0:
        return local.wrap(_apply(local.x, bias, residual, p))
    # Only torch's own dropout knows which shards must drop the same elements.
    dropped: Any = F.dropout(local.wrap(_apply(local.x, bias, None, 0.0)), p)
    return local.wrap(_apply(dropped.to_local(grad_placements=local.placements), None, residual, 0.0))


def _broadcast(op: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> Tensor:
    """Apply the op to plain tensors, in one pass for a bias of one row and a residual of the shape of x.

    For other shapes torch computes the broadcasting sum, before or after the pass.
    """
    if bias is not None and bias.shape != x.shape[-1:]:
        broadcast_shape(op, x, "bias", bias)
        x, bias = x + bias, None
    _check_devices(op, x, bias, residual)
    if residual is None or residual.shape == x.shape:
        return _apply(x, bias, residual, p)
    broadcast_shape(op, x, "residual", residual)
    return residual + _apply(x, bias, None, p)


def _check_devices(op: str, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None:
            check_same_device(op, x, name, tensor)


def _check_operands(op: str, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    if bias is not None:
        check_broadcast(op, x, "bias", bias)
    if residual is None:
        return
    if residual.shape != x.shape:
        raise MismatchError(f"{op}: the residual {shape(residual)} must have the shape of the input {shape(x)}")
    check_same_device(op, x, "residual", residual)


def _apply(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> Tensor:
    if bias is not None and bias.shape != x.shape[-1:]:
        x, bias = x + bias, None  # a bias of more than one row gains nothing from being read in the same pass
    if transformed(x, bias, residual):
        z = formulas.bias_dropout(x, bias, None, None, 1.0)
        z = F.dropout(z, p) if p > 0 else z
        return z if residual is None else formulas.bias_dropout(z, None, residual, None, 1.0)
    keep = None
    if p > 0 and x.numel() > 0:
        keep = _stream(x, bias, residual, p) or _keep(x, bias, p)
    if not differentiated(x, bias, residual):
        result: Tensor = BIAS_DROPOUT.run("forward", (x, bias, residual, keep, keep_scale(p)), requested())
        return result
    result = _BiasDropout.apply(x, bias, residual, keep, keep_scale(p))
    return result


def _stream(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float) -> DropoutStream | None:
    """Return the random numbers of eager torch's dropout of x + bias for a kernel, or None if it has to read a mask."""
    if not x.is_cuda or p == 1.0 or x.shape[-1] % 8 or x.numel() >= 2**33 or not x.is_contiguous():
        return None
    given = [tensor for tensor in (x, bias, residual) if tensor is not None]
    if any(tensor.dtype == torch.float64 for tensor in given) or watched(given):
        return None
    # torch reads fewer elements at a time of a tensor that is not aligned, and a sum is.
    if (bias is None and x.data_ptr() % 16) or BIAS_DROPOUT.choose("cuda", requested()).backend != "triton":
        return None
    return dropout_stream(x.numel(), p, _sum_dtype(x, bias).itemsize, x.device)


def _sum_dtype(x: Tensor, bias: Tensor | None) -> torch.dtype:
    return x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)


def _keep(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """Return the keep mask of eager torch for x + bias, drawn in the memory order of this sum."""
    dtype = _sum_dtype(x, bias)
    if x.is_contiguous():
        return keep_mask(x, p, dtype)
    strides = torch.empty_like(x, device="meta").stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    return keep_mask(x.permute(order), p, dtype).permute([order.index(dim) for dim in range(x.ndim)])
