"""Gated activations as an op and as an autograd function, for checked plain tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fused.backends import Op, compiled_gated, requested
from fused.backends.reference import gated as formulas
from fused.backends.rows import as_rows
from fused.recomputation import Recomputation, saved_tensors

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


def _rows(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return the inputs as [rows, hidden] for compiled code, and a function to reshape the results.

    If gate and up are the halves of one tensor, that tensor is passed: as the gate, or as the up if that comes first.
    """
    *first, y, up, bias, weights, offset, clamp = args
    up_first = up is not None and up.storage_offset() < y.storage_offset()
    whole = None if up is None else _whole(up, y) if up_first else _whole(y, up)
    if whole is not None:
        y, up = whole, None

    (*flat, y, up, bias, weights, offset, clamp), in_shape = as_rows([*first, y, up, bias, weights, offset, clamp])
    if whole is not None and up_first:
        y, up = None, y

    def finish(result: Any) -> Any:
        if not isinstance(result, tuple):
            return in_shape(result)
        dy, dup, dbias, dweights = in_shape(result)
        if whole is not None and dy is not None:
            dy, dup = reversed(dy.chunk(2, -1)) if up_first else dy.chunk(2, -1)
        return dy, dup, dbias, dweights

    return [*flat, y, up, bias, weights, offset, clamp], finish


def _whole(first: Tensor, second: Tensor) -> Tensor | None:
    """Return the contiguous tensor with these two as its halves, or None if there is none."""
    half = first.shape[-1]
    strides = [1]
    size = 2 * half
    for length in reversed(first.shape[:-1]):
        strides.insert(0, size)
        size *= length
    if (
        first.dtype != second.dtype
        or first.stride() != second.stride()
        or first.stride() != tuple(strides)
        or second.storage_offset() - first.storage_offset() != half
        or second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    ):
        return None
    return first.as_strided((*first.shape[:-1], 2 * half), strides)


# Elements from which compiled code is faster, forward and backward together: more if torch has kernels for both passes.
_COMPILED_FROM = {"silu": 2**18, "relu": 2**18, "sigmoid": 2**18}


def _compiled_from(activation: str, **statics: Hashable) -> int:
    return _COMPILED_FROM.get(activation, 2**16)


GATED_ACTIVATION = Op(
    "gated_activation",
    forward=formulas.gated_activation,
    backward=formulas.gated_activation_backward,
    canonical=_rows,
    operands=lambda args: args[:2],
    small_on_cpu=_compiled_from,
    kernels="fused.backends.triton.gated",
)
GATED_ACTIVATION.register(
    "inductor",
    forward=compiled_gated.gated_activation,
    backward=compiled_gated.gated_activation_backward,
)


@dataclass(frozen=True)
class Gated:
    """Settings of a gated activation.

    Args:
        activation: of the gate.
        offset: added to the up, after the clamp; None for none.
        clamp: limit of the gate from above and of the up from both sides; None for none.
        fp8: whether gate and up are kept for the backward pass in 8 bits.
        offload: whether the saved tensors are marked for an offloader, as in Megatron.
    """

    activation: str
    offset: float | None = None
    clamp: float | None = None
    fp8: bool = False
    offload: bool = False


def forward(
    y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, how: Gated, backend: str | None
) -> Tensor:
    """Run the forward formula on the requested backend."""
    inputs = (y, up, bias, weights, how.offset, how.clamp)
    result: Tensor = GATED_ACTIVATION.run("forward", inputs, backend, activation=how.activation)
    return result


def save(ctx: Any, y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, how: Gated) -> None:
    """Save gate and up, in 8 bits if the settings say so, and the bias and the weights."""
    ctx.how = how
    ctx.backend = requested()
    ctx.dtypes = (y.dtype, None if up is None else up.dtype)
    y_scale = up_scale = None
    if how.fp8:
        y, y_scale = stored(y)
        if up is not None:
            up, up_scale = stored(up)
    saved = (y, up, bias, weights, y_scale, up_scale)
    if how.offload:
        for tensor in saved[:4]:
            if tensor is not None:
                tensor.activation_offloading = True  # type: ignore[attr-defined]
    ctx.save_for_backward(*saved)


def gradients(ctx: Any, g: Tensor, needs: tuple[bool, bool, bool, bool]) -> formulas.Gradients:
    """Compute the needed gradients among those of y, up, bias and weights."""
    how: Gated = ctx.how
    y, up, bias, weights, y_scale, up_scale = saved_tensors(ctx)
    if how.fp8:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{how.activation} gate with fp8_input_store: a second derivative (create_graph=True) needs the "
                "input itself, of which 8 bits were kept; use fp8_input_store=False"
            )
        y = restored(y, y_scale, ctx.dtypes[0])
        up = None if up is None else restored(up, up_scale, ctx.dtypes[1])
    results: formulas.Gradients = GATED_ACTIVATION.run(
        "backward",
        (g, y, up, bias, weights, how.offset, how.clamp),
        ctx.backend,
        activation=how.activation,
        needs=needs,
    )
    return results


def stored(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to 8 bits and return it with its scale.

    The largest finite number of x becomes the largest 8-bit number. Infinities become NaN.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    finite = wide.isfinite()
    largest = torch.where(finite, wide.abs(), 0).amax() if x.numel() > 0 else wide.new_zeros(())
    scale = (largest / torch.finfo(FP8).max).clamp(min=torch.finfo(wide.dtype).tiny)
    # The cast of infinities differs between devices.
    return torch.where(finite, wide / scale, torch.nan).to(FP8), scale


def restored(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `stored`."""
    return (x.to(scale.dtype) * scale).to(dtype)


def _again(y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *_: None, how: Gated) -> Tensor:
    return forward(y, up, bias, weights, how, requested())


class GatedActivation(torch.autograd.Function):
    """Autograd function of act(gate)·(up + offset)·weights for plain tensors, saving gate, up, bias and weights."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, how: Gated
    ) -> Tensor:
        save(ctx, y, up, bias, weights, how)
        result = forward(y, up, bias, weights, how, ctx.backend)
        if torch.compiler.is_compiling():
            # torch 2.11 loses the gradient of a result that the last operation returned as it got it, such as `to`.
            return result.clone()
        if not how.fp8:
            ctx.recomputation = Recomputation(result, partial(_again, how=how), ctx.backend)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(ctx, grad_output, tuple(ctx.needs_input_grad[:4])), None


def _gate_second(y: Tensor, *, how: Gated, backend: str | None) -> Tensor:
    up, gate = y.chunk(2, -1)
    return forward(gate, up, None, None, how, backend)


class GateSecond(torch.autograd.Function):
    """Autograd function of up·act(gate) for a plain tensor with the up in its first half, which is saved whole.

    Its gradient is written in one piece; those of two halves would be joined by a copy.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, how: Gated) -> Tensor:
        ctx.how, ctx.backend = how, requested()
        ctx.save_for_backward(y)
        compute = partial(_gate_second, how=how, backend=ctx.backend)
        result = compute(y)
        ctx.recomputation = Recomputation(result, compute, ctx.backend)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (y,) = saved_tensors(ctx)
        how: Gated = ctx.how
        up, gate = y.chunk(2, -1)
        inputs = (grad_output, gate, up, None, None, how.offset, how.clamp)
        needs = (True, True, False, False)
        dgate, dup, *_ = GATED_ACTIVATION.run("backward", inputs, ctx.backend, activation=how.activation, needs=needs)
        whole = _whole(dup, dgate)
        return torch.cat((dup, dgate), -1) if whole is None else whole, None
