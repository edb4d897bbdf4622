"""Softmax of attention: scale, mask, softmax, cast and dropout in one pass, with the probabilities saved."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends.reference import softmax as formulas
from fused.backends.reference.numbers import compute_dtype
from fused.backends.reference.softmax import Window
from fused.backends.tracing import differentiated, transformed
from fused.checks import FLOATS, MismatchError, broadcast_shape, broadcasts_to, check_broadcast, check_float, shape
from fused.dropout import check_probability, keep_mask, keep_scale
from fused.sharding import localise, sharded
from fused.softmax_autograd import MaskedSoftmax, forward

Tensor = torch.Tensor

CAUSAL: Window = (-1, 0)


def scaled_masked_softmax(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float | None = 1.0,
    *,
    causal: bool = False,
    window: Window | None = None,
    sink: Tensor | None = None,
    softmax_in_fp32: bool = True,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    fill: float | None = None,
) -> Tensor:
    """Compute ``dropout(softmax(scale·x + mask))`` over the last dimension, in one pass.

    Args:
        x: scores ``[..., queries, keys]`` (``[..., keys]`` without `causal` and `window`); float16, bfloat16,
            float32 or float64. Never modified. A DTensor may be sharded on any dimension but the last.
        mask: broadcastable with x, or None. Floating point: added to the scaled scores (a causal mask of
            HuggingFace, T5's relative positions, ALiBi), with a gradient if it requires one. bool or
            uint8: True (1) = masked, as in Megatron; HuggingFace's boolean masks mean the opposite.
        scale: a number, applied before the mask; None is 1.
        causal: a query sees no later keys; the last query is aligned to the last key.
        window: ``(left, right)``: the number of keys before and after its position that a query sees, −1 for all.
            HuggingFace's ``sliding_window=n`` is ``(n - 1, 0)``. Mask, `causal` and `window` all apply.
        sink: ``[heads]`` (x then is ``[..., heads, queries, keys]``) or broadcastable to ``[..., queries,
            1]``: logits of one more key, which takes its share of the probability and is dropped (GPT-OSS).
        softmax_in_fp32: 16-bit scores are computed in float32 and rounded once in both cases. False saves no third
            byte for each 16-bit probability. Gradients are then not rounded once only, but are as accurate as those of
            ``F.softmax`` on 16-bit scores.
        dropout_p: probability of dropping; elements are dropped whenever it is above 0, so pass 0 in evaluation.
            With the same seed the CPU and the reference backend drop the same elements as ``F.dropout``.
        out_dtype: dtype of the result, by default the dtype of x.
        fill: with a bool mask, what replaces the masked scores after the scale, as ``masked_fill`` does: −inf or a low
            number. A row with all keys masked is then as in eager torch: NaN, or the same probability for all.

    Returns:
        The broadcast shape of x and the mask. A row with all keys hidden by a bool mask without `fill`, `causal` or
        `window` is zeros; a row hidden by an additive mask is as in eager torch (NaN for −inf, the softmax of the rest
        for finite numbers; scores and a mask of one 16-bit dtype are rounded as their sum is). Saves the probabilities
        in `out_dtype` (their sign marks dropped elements), for 16-bit ones a third byte with their rounding error (see
        `softmax_in_fp32`), with a sink its column, and with `fill` the mask. Triton kernels skip keys hidden by
        `causal` and `window`, in units of 16; plain and compiled torch compute them and set them to 0: slicing the
        scores to the keys seen by each block of queries would copy them.

    Raises:
        TypeError: if x, the sink or `out_dtype` is not floating point, the mask neither floating point nor bool or
            uint8, the scale or `fill` not a number, or the window not two integers.
        ValueError: for shapes that do not broadcast, tensors on two devices, a probability outside [0, 1], fewer
            than two dimensions with `causal` or `window`, or `fill` without a bool mask or beyond the dtype.

    Source: Megatron-LM ``fused_softmax``; HuggingFace ``eager_attention_forward``.
    """
    op = "scaled_masked_softmax"
    window = checked_window(op, causal, window)
    return checked_softmax(op, x, mask, scale, window, sink, dropout_p, out_dtype, softmax_in_fp32, fill)


def masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float | None = 1.0) -> Tensor:
    """Compute ``softmax(scale·x + mask)``: `scaled_masked_softmax` without its options. A boolean True is masked."""
    return checked_softmax("masked_softmax", x, mask, scale)


def causal_softmax(x: Tensor, scale: float | None = 1.0) -> Tensor:
    """Compute the softmax of ``scale·x`` over the keys up to each query: `scaled_masked_softmax` with ``causal``."""
    return checked_softmax("causal_softmax", x, None, scale, CAUSAL)


def reciprocal(divisor: float) -> float:
    """Return the scale of scores that an expression divides by a number, which may be 0."""
    return 1.0 / divisor if divisor != 0 else math.copysign(math.inf, divisor)


def checked_window(op: str, causal: bool, window: object) -> Window | None:
    """Check a window and combine it with causality, or return None if every key is seen."""
    before, after = -1, -1
    if window is not None:
        pair = tuple(window) if isinstance(window, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(side, int) for side in pair):
            raise TypeError(f"{op}: window must be two integers (left, right), −1 for all, got {window!r}")
        before, after = pair
        if before < -1 or after < -1:
            raise ValueError(f"{op}: the sides of a window are −1 (all) or more, got {window!r}")
    if causal:
        after = 0
    return None if before == after == -1 else (before, after)


def checked_softmax(
    op: str,
    x: Tensor,
    mask: Tensor | None,
    scale: float | None,
    window: Window | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
    softmax_in_fp32: bool = True,
    fill: float | None = None,
) -> Tensor:
    """Run `scaled_masked_softmax` under the name `op`: check the arguments, take local shards, and apply the op."""
    scale = _checked_scale(op, scale)
    check_probability(op, dropout_p)
    check_float(op, "input", x, min_ndim=1 if window is None else 2)
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype not in FLOATS:
        raise TypeError(f"{op}: out_dtype must be a floating-point dtype, got {out_dtype}")
    if mask is not None and mask.dtype == torch.uint8:
        mask = mask.to(torch.bool)
    if fill is not None:
        _check_fill(op, fill, mask, torch.promote_types(x.dtype, out_dtype))
    if sink is not None and sink.ndim == 1:
        sink = sink.reshape(-1, 1, 1)
    if not sharded(x, mask, sink):
        if isinstance(mask, torch.Tensor) and not broadcasts_to(mask, x):
            x = x.expand(broadcast_shape(op, x, "mask", mask))
        _check_operands(op, x, mask, sink)
        return _apply(x, mask, sink, scale, window, 0, fill, dropout_p, out_dtype, softmax_in_fp32)
    if sharded(x):
        _check_operands(op, x, mask, sink)
    local = localise(op, x, [mask, sink], whole=[-1])
    mask, sink = local.others
    _check_operands(op, local.x, mask, sink)
    shift = 0
    if window is not None and local.mesh is not None:
        shift = local.offset(-2) + local.x.shape[-2] - x.shape[-2]
    if local.mesh is None:
        return _apply(local.x, mask, sink, scale, window, 0, fill, dropout_p, out_dtype, softmax_in_fp32)
    out = local.wrap(_apply(local.x, mask, sink, scale, window, shift, fill, 0.0, out_dtype, softmax_in_fp32))
    # Only torch's own dropout knows which shards must drop the same elements.
    return F.dropout(out, dropout_p) if dropout_p > 0 else out


def _apply(
    x: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    window: Window | None,
    shift: int,
    fill: float | None,
    dropout_p: float,
    out_dtype: torch.dtype,
    rounding: bool,
) -> Tensor:
    if transformed(x, mask, sink):
        settings: dict[str, Any] = {"window": window, "shift": shift, "out_dtype": out_dtype, "fill": fill}
        out = formulas.masked_softmax(x, mask, sink, None, scale, 1.0, **settings)[0]
        return F.dropout(out, dropout_p) if dropout_p > 0 else out
    keep = keep_mask(x, dropout_p, out_dtype) if dropout_p > 0 and x.numel() > 0 else None
    inputs = (x, mask, sink, keep, scale, keep_scale(dropout_p), window, shift, fill, out_dtype)
    if not differentiated(x, mask, sink):
        return forward(*inputs, False)[0]
    result: Tensor = MaskedSoftmax.apply(*inputs, rounding)[0]
    return result


def _checked_scale(op: str, scale: object) -> float:
    if scale is None:
        return 1.0
    if isinstance(scale, int | float) and torch.compiler.is_compiling():
        return scale  # may be symbolic and must stay symbolic
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"{op}: scale must be a number or None, got {type(scale).__name__}")
    return float(scale)


def _check_fill(op: str, fill: object, mask: object, dtype: torch.dtype) -> None:
    if not isinstance(fill, int | float) or math.isnan(fill):
        raise TypeError(f"{op}: fill must be a number or None, got {fill!r}")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"{op}: fill replaces the scores where a bool mask is True: give such a mask, or no fill")
    most = torch.finfo(compute_dtype(dtype)).max
    if most < abs(fill) < math.inf:
        raise ValueError(
            f"{op}: fill {fill} is beyond the numbers of {compute_dtype(dtype)}; give one above {-most:.3g}"
        )


def _check_operands(op: str, x: Tensor, mask: Tensor | None, sink: Tensor | None) -> None:
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, *FLOATS):
            kind = f"{mask.dtype} of shape {shape(mask)}" if isinstance(mask, torch.Tensor) else type(mask)
            raise TypeError(f"{op}: mask must be bool or uint8 (True = masked) or floating point (added), got {kind}")
        check_broadcast(op, x, "mask", mask)
    if sink is not None:
        check_float(op, "sink", sink)
        if sink.shape[-1] != 1:
            raise MismatchError(
                f"{op}: sink must be [heads] or broadcast to [..., queries, 1] of the input {shape(x)}, "
                f"got {shape(sink)}"
            )
        check_broadcast(op, x, "sink", sink)
