"""Attention by torch's fused kernel, or by the eager expression if their results would differ.

The kernel saves the logarithm of the sum of a row's exponentials in one float. For a row that a mask hides completely,
with the lowest number or any number large compared with the scores, that sum is lost in rounding, and the gradients
with it. In 16 bits the output differs as well, and for a row of -inf eager torch returns NaN. Such rows are rare, and
finding them costs one pass over the mask; a call with such a row computes scores and weights as eager torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from fused.backends.tracing import PLAIN, differentiated, transformed
from fused.checks import agrees
from fused.lazy import lazy
from fused.loss_autograd import gradients_by_autograd, watched
from fused.torch_internals.modes import is_autocasting, is_tracing_dispatch_active
from fused.torch_internals.torch_kernels import choose_attention_kernel

Tensor = torch.Tensor
Filling = tuple[Tensor, float]
Repetition = tuple[Sequence[int], Sequence[int] | None]
"""Sizes to expand ``[batch, heads, 1, tokens, features]`` to, and the shape afterwards; None to merge dims 1 and 2."""
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Queries, keys, values, a bias and a mask."""


class _Settings(NamedTuple):
    """The keyword arguments of :func:`attention`, once heads are repeated."""

    dropout_p: float = 0.0
    scale: float = 1.0
    enable_gqa: bool = False
    filled: Filling | None = None
    filled_last: Filling | None = None
    sink: Tensor | None = None


_FAR = -128.0
"""A row whose every key has less added to it is computed as eager torch does: a float32 is exact to 1e-5 up to here."""
_aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float = 1.0,
    enable_gqa: bool = False,
    repeated: tuple[Repetition | None, Repetition | None] | None = None,
    filled: Filling | None = None,
    filled_last: Filling | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute ``dropout(softmax(scale·q·kᵀ + bias + mask))·v``, without storing the weights if possible.

    The weights are stored if torch's fused kernel would give another result than eager torch. To find out, the mask is
    read, for which the processor waits for the device; while a CUDA graph is captured, that is not possible, and masked
    attention stores the weights.

    Args:
        q: ``[..., heads, queries, features]``.
        k, v: ``[..., heads, keys, features]``, broadcast with q as `torch.matmul` does.
        bias, attn_mask: added to the scores in this order; anything that broadcasts with them.
        dropout_p: probability of dropping a weight; weights are dropped whenever it is above 0.
        scale: factor of the scores.
        enable_gqa: k and v have fewer heads, each shared by the same number of consecutive heads of q.
        repeated: with `enable_gqa`, how the expression repeats the heads of k and of v, each None if it does not. Where
            that is anything else than each head as often as q needs it, k and v are repeated so.
        filled: a boolean mask that broadcasts with the scores, and the value to fill them with where it is True,
            before `bias` and `attn_mask` are added. The value must be about the lowest of the dtype, or -inf.
        filled_last: likewise, after they are added.
        sink: ``[..., heads, queries, 1]``, the score of one more key, whose weight is dropped (GPT-OSS).

    Returns:
        ``[..., heads, queries, features]``, within rounding of the expression. On the CPU it supports second
        derivatives and forward-mode differentiation.

    Raises:
        RuntimeError: for shapes that do not fit, as the expression does.
    """
    operands, enable_gqa = _repeated((q, k, v, bias, attn_mask), repeated, enable_gqa)
    return _attention(operands, _Settings(dropout_p, scale, enable_gqa, filled, filled_last, sink))[0]


def attention_and_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    readers: Sized = (),
    dropout_p: float = 0.0,
    scale: float = 1.0,
    enable_gqa: bool = False,
    repeated: tuple[Repetition | None, Repetition | None] | None = None,
    filled: Filling | None = None,
    filled_last: Filling | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention`, and its weights for whoever may use them.

    Where a kernel computes the attention, the weights are computed when they are used: see :func:`fused.lazy.lazy`.

    Args:
        readers: whatever reads the weights now, such as the hooks of a module; if there is any, they are stored.

    Returns:
        the result, and the weights ``[..., heads, queries, keys]`` after dropout.

    Raises (when the weights are used):
        RuntimeError: a kernel dropped some of them, and does not say which; or an operand was changed in place since.
    """
    operands, enable_gqa = _repeated((q, k, v, bias, attn_mask), repeated, enable_gqa)
    how = _Settings(dropout_p, scale, enable_gqa, filled, filled_last, sink)
    if readers:
        return _written_out(operands, how)
    result, weights = _attention(operands, how)
    return result, _lazy_weights(operands, how) if weights is None else weights


def _lazy_weights(operands: Operands, how: _Settings) -> Tensor:
    q, k, _, bias, mask = operands
    where = [None if each is None else each[0] for each in (how.filled, how.filled_last)]  # not to be changed either

    def weights(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, sink: Tensor | None, *_: Any) -> Tensor:
        if how.dropout_p > 0:
            raise RuntimeError(
                "these attention weights are not known: a kernel dropped some of them, and does not say which"
            )
        return _weights(q, k, bias, mask, how._replace(sink=sink))

    leading = q.shape[:-2] if how.enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    return lazy(weights, (q, k, bias, mask, how.sink, *where), (*leading, q.shape[-2], k.shape[-2]), q.dtype)


def _attention(operands: Operands, how: _Settings) -> tuple[Tensor, Tensor | None]:
    """Return the result, and the weights if they are stored."""
    q, k, v, *_ = operands
    dropout_p, scale, enable_gqa, filled, filled_last, sink = how
    if _is_watched((*operands, sink)) or (sink is not None and scale == 0) or (dropout_p > 0 and q.is_cpu):
        return _written_out(operands, how)
    mask = _one_mask(operands, filled, filled_last)
    if sink is not None:
        operands = _with_sink(q, k, v, mask, sink / scale)
        return _attention(operands, _Settings(dropout_p, scale, enable_gqa))[0][..., : v.shape[-1]], None
    if not q.is_cpu:
        done = None if _is_captured(mask) else _by_kernel(operands, mask, dropout_p, scale, enable_gqa)
        return _written_out(operands, how) if done is None else (done, None)
    if not _is_kernels_own(q, k, v, mask, dropout_p, scale, enable_gqa) or _is_far(mask, operands):
        return _written_out(operands, how)
    if not differentiated(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=enable_gqa), None
    q, k, v, mask = _autocast(q, k, v, mask)
    result: Tensor = _Attention.apply(q, k, v, mask, scale, enable_gqa)
    return result, None


def _repeated(
    operands: Operands, repeated: tuple[Repetition | None, Repetition | None] | None, enable_gqa: bool
) -> tuple[Operands, bool]:
    """Return the operands, with heads of k and v repeated where the kernels would repeat them in another way."""
    q, k, v, bias, mask = operands
    if repeated is None or _is_grouped(q, k, v, repeated):
        return operands, enable_gqa
    return (q, _repeat(k, repeated[0]), _repeat(v, repeated[1]), bias, mask), False


def _is_grouped(q: Tensor, k: Tensor, v: Tensor, repeated: tuple[Repetition | None, Repetition | None]) -> bool:
    """Check whether k and v have fewer heads than q, and are repeated so that each is shared by as many."""
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[1] != v.shape[1]:
        return False
    for x, how in zip((k, v), repeated, strict=True):
        if how is None:
            return False
        (sizes, shape), (batch, heads, *rest) = how, x.shape
        count = q.shape[1] // max(heads, 1)
        merged = (batch, heads * count, *rest)
        if heads * count != q.shape[1] or not agrees(sizes, (batch, heads, count, *rest)) or sizes[2] != count:
            return False
        if shape is not None and not agrees(shape, merged):
            return False
    return True


def _repeat(x: Tensor, how: Repetition | None) -> Tensor:
    if how is None:
        return x
    wide = x.unsqueeze(2).expand(tuple(how[0]))
    return wide.flatten(1, 2) if how[1] is None else wide.reshape(tuple(how[1]))


def _is_watched(operands: Sequence[Tensor | None]) -> bool:
    """Check whether the call is traced or transformed, or operands have no data to read."""
    if transformed() or is_tracing_dispatch_active():
        return True
    return any(tensor is not None and (type(tensor) not in PLAIN or tensor.is_meta) for tensor in operands)


def _is_captured(mask: Tensor | None) -> bool:
    """Check whether the mask cannot be read because a CUDA graph is being captured."""
    return mask is not None and mask.is_cuda and torch.cuda.is_current_stream_capturing()


def _by_kernel(
    operands: Operands, mask: Tensor | None, dropout_p: float, scale: float, enable_gqa: bool
) -> Tensor | None:
    """Compute attention by a fused kernel of an accelerator, or return None if none gives eager's result.

    The kernels for long sequences take no mask, and of those with a mask few take grouped keys: a causal mask is handed
    over as a setting, and with any other, grouped keys and values are repeated.
    """
    q, k, v, *_ = operands
    causal = mask is not None and _is_causal(mask, q.shape[-2])
    if causal:
        mask = None
    elif mask is not None and enable_gqa and k.ndim == q.ndim:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        enable_gqa = False
    if not _is_kernels_own(q, k, v, mask, dropout_p, scale, enable_gqa, causal) or _is_far(mask, operands):
        return None
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal=causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_causal(mask: Tensor, queries: int) -> bool:
    """Check whether a mask adds nothing up to the position of a query, and hides all after it, by reading it."""
    if mask.requires_grad or mask.shape[-2:] != (queries, queries):
        return False
    seen = torch.ones(queries, queries, dtype=torch.bool, device=mask.device).tril()
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(torch.where(seen, mask == 0, hidden).all())


def _is_kernels_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    enable_gqa: bool,
    causal: bool = False,
) -> bool:
    """Check whether torch has a fused kernel for these operands, not only the math fallback."""
    if any(each.ndim != 4 for each in (q, k, v)):
        return False
    if mask is not None and not _fits(mask, (*q.shape[:-1], k.shape[-2])):
        return False
    chosen = choose_attention_kernel(q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=enable_gqa)
    return chosen is not None and chosen != SDPBackend.MATH.value


def _fits(mask: Tensor, scores: tuple[int, ...]) -> bool:
    return mask.ndim == len(scores) and all(a in (1, b) for a, b in zip(mask.shape, scores, strict=True))


def _with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor) -> Operands:
    """Return operands with one more feature and key: its product with a query is the sink, and its value is 0."""
    one = F.pad(k.new_zeros(*k.shape[:-2], 1, k.shape[-1]), (0, 1), value=1.0)
    k = torch.cat((F.pad(k, (0, 1)), one), -2)
    v = F.pad(v, (0, 1, 0, 1))
    return torch.cat((q, sink), -1), k, v, None, None if mask is None else F.pad(mask, (0, 1))


def _is_far(mask: Tensor | None, operands: Operands) -> bool:
    """Check whether any row of the mask may give another result in the kernel than in eager torch."""
    if mask is None:
        return False
    highest = float(mask.detach().amax(-1).amin())
    if highest >= _FAR:
        return False
    exact_forward = operands[0].dtype.itemsize >= 4 and not is_autocasting(operands[0])
    return not exact_forward or differentiated(*operands) or not highest > -math.inf


def _one_mask(operands: Operands, *fillings: Filling | None) -> Tensor | None:
    """Return the sum of all masks and fillings as one additive mask of at least four dimensions."""
    q, _, _, bias, mask = operands
    parts = [bias, mask]
    parts += [None if each is None else q.new_zeros(()).masked_fill(*each) for each in fillings]
    given = [part for part in parts if part is not None]
    if not given:
        return None
    total = given[0]
    for part in given[1:]:
        total = total + part
    return total.reshape((1,) * (4 - total.ndim) + total.shape)


def _written_out(operands: Operands, how: _Settings) -> tuple[Tensor, Tensor]:
    """Compute attention and its weights by the plain expression, in the order of eager code."""
    q, k, v, bias, mask = operands
    weights = _weights(q, k, bias, mask, how)
    weights = F.dropout(weights, how.dropout_p) if how.dropout_p > 0 else weights
    return torch.matmul(weights, _shared(v, q) if how.enable_gqa else v), weights


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys or values for the heads of q that share it."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, how: _Settings) -> Tensor:
    k = _shared(k, q) if how.enable_gqa else k
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores if how.scale == 1.0 else scores * how.scale
    scores = scores if how.filled is None else scores.masked_fill(*how.filled)
    for part in (bias, mask):
        scores = scores if part is None else scores + part
    scores = scores if how.filled_last is None else scores.masked_fill(*how.filled_last)
    scores = scores if how.sink is None else torch.cat((scores, how.sink), -1)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return weights if how.sink is None else weights[..., :-1]


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast the operands as autocast does for torch's own attention."""
    if not is_autocasting(q) or q.dtype == torch.float64:
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype), None if mask is None else mask.to(dtype)


class _Attention(torch.autograd.Function):
    """Autograd function around torch's CPU kernel, differentiable any number of times.

    Saves its inputs, its result and one number per row.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, enable_gqa: bool
    ) -> Tensor:
        options = {"attn_mask": mask, "scale": scale}
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, **options)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.scale, ctx.enable_gqa = scale, enable_gqa
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if watched(grads[0]):

            def expression(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return _written_out((q, k, v, None, mask), _Settings(scale=ctx.scale, enable_gqa=ctx.enable_gqa))[0]

            return *gradients_by_autograd(expression, (q, k, v), needed, grads[0]), None, None, None
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grads[0], q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        return *(each if wanted else None for each, wanted in zip(found, needed, strict=True)), None, None, None
