"""Masked softmax as an op and as an autograd function, for checked plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fused.backends import Op, compiled_softmax, requested
from fused.backends.reference import softmax as formulas
from fused.backends.reference.softmax import Window

Tensor = torch.Tensor

_RANK = 4


def _four_dimensions(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Reshape inputs to [batch, heads, queries, keys] for compiled code, masks without expanded dimensions or bools."""
    ndim = args[0].ndim

    def pad(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1 and tensor is not args[0]:
                tensor = tensor.narrow(dim, 0, 1)
        tensor = tensor.reshape((1,) * (_RANK - tensor.ndim) + tensor.shape)
        return compiled_softmax.widened(tensor, args[0])

    def finish(results: Any) -> Any:
        extra = max(_RANK - ndim, 0)
        return tuple(None if result is None else result.reshape(result.shape[extra:]) for result in results)

    return [pad(arg) for arg in args], finish


# Number of elements from which compiled code is faster, forward and backward together.
_COMPILED_FROM = 2**17

MASKED_SOFTMAX = Op(
    "masked_softmax",
    forward=formulas.masked_softmax,
    backward=formulas.masked_softmax_backward,
    canonical=_four_dimensions,
    small_on_cpu=lambda **statics: _COMPILED_FROM,
    kernels="fused.backends.triton.softmax",
)
MASKED_SOFTMAX.register(
    "inductor",
    forward=compiled_softmax.masked_softmax,
    backward=compiled_softmax.masked_softmax_backward,
)

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def forward(
    x: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    scale: float,
    p_keep: float,
    window: Window | None,
    shift: int,
    fill: float | None,
    out_dtype: torch.dtype,
    rounding: bool,
) -> Results:
    """Run the forward formula on the requested backend.

    `rounding`: whether a backward pass follows whose gradients must be rounded only once.
    """
    results: Results = MASKED_SOFTMAX.run(
        "forward",
        (x, mask, sink, keep, scale, p_keep),
        requested(),
        window=window,
        shift=shift,
        out_dtype=out_dtype,
        fill=fill,
        rounding=rounding and out_dtype.itemsize < 4,
    )
    return results


def save(ctx: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Save the probabilities and the mask of replaced scores as tensors, and only shapes and dtypes of the inputs."""
    x, mask, sink, keep, ctx.scale, ctx.keep_scale, ctx.window, ctx.shift, fill = inputs[:9]
    out, signed, p_sink, lost = results
    ctx.dropout = keep is not None
    ctx.x = (x.shape, x.dtype)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.sink = None if sink is None else (sink.shape, sink.dtype)
    ctx.backend = requested()
    ctx.save_for_backward(signed if ctx.dropout else out, p_sink, lost, None if fill is None else mask)


def gradients(
    ctx: Any,
    needs: Sequence[bool],
    g: Tensor | None,
    g_signed: Tensor | None = None,
    g_sink: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the needed gradients among those of x, mask and sink, in the shapes and dtypes of these."""
    p, p_sink, lost, filled = ctx.saved_tensors
    x_shape, x_dtype = ctx.x
    mask = ctx.mask if needs[1] else None
    sink = ctx.sink if needs[2] else None
    dx, dmask, dsink = MASKED_SOFTMAX.run(
        "backward",
        (p, p_sink, lost, g, g_signed, g_sink, filled, ctx.scale, ctx.keep_scale),
        ctx.backend,
        dropout=ctx.dropout,
        x_dtype=x_dtype if needs[0] else None,
        mask_sum=None if mask is None else _broadcast_dims(mask[0], x_shape),
        sink_sum=None if sink is None else _broadcast_dims(sink[0], (*x_shape[:-1], 1)),
        window=ctx.window,
        shift=ctx.shift,
    )
    if mask is not None and dmask is not None:
        dmask = dmask.reshape(mask[0]).to(mask[1])
    if sink is not None and dsink is not None:
        dsink = dsink.reshape(sink[0]).to(sink[1])
    return dx, dmask, dsink


def _broadcast_dims(small: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of the broadcast of `small` to `large`, counted from the end."""
    return tuple(
        -dim for dim in range(1, len(large) + 1) if large[-dim] != 1 and (dim > len(small) or small[-dim] == 1)
    )


class MaskedSoftmax(torch.autograd.Function):
    """Autograd function of `scaled_masked_softmax` for plain tensors, saving probabilities and the sink's column."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Results:
        results = forward(*inputs)
        ctx.set_materialize_grads(False)
        if results[3] is not None:
            ctx.mark_non_differentiable(results[3])
        save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, g_signed, g_sink, _ = grads
        if g is None and g_signed is None and g_sink is None:
            return (None,) * 11
        return *gradients(ctx, ctx.needs_input_grad, g, g_signed, g_sink), *(None,) * 8
