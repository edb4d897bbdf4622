"""Rotary position embedding of queries and keys in one pass, with only cos and sin saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from fused.backends import Op, compiled_rotary, requested
from fused.backends.reference import rotary as formulas
from fused.backends.strides import memory_order
from fused.backends.tracing import differentiated, transformed
from fused.checks import (
    FLOATS,
    MismatchError,
    agrees,
    broadcast_shape,
    broadcasts_to,
    check_float,
    check_same_device,
    shape,
)
from fused.sharding import localise, sharded

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor
Views = tuple["Sequence[int] | None", "Sequence[int] | None"]
"""Shapes that an expression views a part as, to take its pairs or halves apart, and to join its pairs again.

None stands for ``unflatten`` and ``flatten``.
"""

Turned = tuple[int | None, int | Views | None]
"""Width of the part that an expression turns, None for all, and where it splits that part, None for ``chunk``."""

HALF = -1
"""Stands in :data:`Turned` for a part that is split at half of its width, rounded down."""


def _operands(x: Tensor, cos: Tensor) -> tuple[Tensor, ...]:
    """Return the operands that set the strides of the result: none for a partial rotation, which is contiguous."""
    return (x, cos) if cos.shape[-1] == x.shape[-1] else ()


ROTARY = Op(
    "rotary_embedding",
    forward=formulas.rotary,
    backward=formulas.rotary_backward,
    operands=lambda args: _operands(args[0], args[2]),
    kernels="fused.backends.triton.rotary",
)
ROTARY.register("inductor", forward=compiled_rotary.rotary, backward=compiled_rotary.rotary_backward)


class _Rotary(torch.autograd.Function):
    """Autograd function to rotate q and, if given, k, saving cos and sin and returning no gradient for them."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = (q.dtype, None if k is None else k.dtype)
        ctx.interleaved, ctx.backend = interleaved, requested()
        results = _forward(q, k, cos, sin, interleaved, out_dtype)
        fixed = [result for result, needs in zip(results, ctx.needs_input_grad, strict=False) if not needs]
        if fixed:  # in one call: each replaces what the last one marked
            ctx.mark_non_differentiable(*[result for result in fixed if result is not None])
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        wanted = [n for n, g in enumerate(incoming) if g is not None and ctx.needs_input_grad[n]]
        gradients: list[Tensor | None] = [None, None]
        if wanted:
            given = [incoming[n] for n in wanted]
            args = (given[0], given[1] if len(given) > 1 else None, cos, sin)
            dtypes = {ctx.dtypes[n] for n in wanted}
            out_dtype = dtypes.pop() if len(dtypes) == 1 else None
            turned = ROTARY.run("backward", args, ctx.backend, interleaved=ctx.interleaved, out_dtype=out_dtype)
            for n, gradient in zip(wanted, turned, strict=False):
                gradients[n] = gradient if gradient.dtype == ctx.dtypes[n] else gradient.to(ctx.dtypes[n])
        return *gradients, None, None, None, None


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    unsqueeze_dim: int | None = 1,
    turned: Turned | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of dimensions of queries and keys by the angles of their positions.

    Same as HuggingFace's ``apply_rotary_pos_emb``.

    Args:
        q: ``[batch, heads, seq, head_dim]`` or any other shape that cos broadcasts with; floating point, any strides.
            A DTensor may be sharded on any dimension; if sharded on the last, it is gathered.
        k: as q; may have another number of heads.
        cos, sin: ``[batch, seq, rotary_dim]``, an even rotary_dim at most head_dim: the dimensions after it are passed
            through. Each dimension has a separate value, usually equal for the two of a pair: HuggingFace's Llama
            repeats the halves; interleaved, its Cohere repeats each number (GLM's cos is
            ``cos[..., : rotary_dim // 2].repeat_interleave(2, -1)``).
        interleaved: pairs are dimensions (0, 1), (2, 3), …; else (0, n/2), (1, n/2 + 1), … of n = rotary_dim.
        unsqueeze_dim: position of the head dimension in cos and sin; None if they broadcast to q and k already.
        turned: the sizes in the expression that this stands for. Where they are not rotary_dim and half of it, such as
            for cos and sin that broadcast in the last dimension, the expression itself is computed, and its errors are
            raised.
        out_dtype: dtype of the results, by default those of ``q * cos`` and ``k * cos``.

    Returns:
        q and k rotated; 16-bit numbers are computed in float32 and
        rounded once. Saves only cos and sin; q and k too if cos or sin require a gradient.

    Raises:
        TypeError: if an argument is not a floating-point tensor, or `out_dtype` not a floating-point dtype.
        ValueError: for cos and sin of two shapes or dtypes, an odd or too large rotary_dim, shapes that do not
            broadcast, or tensors on two devices.

    Source: Su et al. 2021; transformers ``apply_rotary_pos_emb`` of Llama, GPT-NeoX and Cohere.
    """
    op = "rotary_embedding"
    _check_out_dtype(op, out_dtype)
    check_float(op, "q", q, min_ndim=1)
    check_float(op, "k", k, min_ndim=1)
    if turned is not None and not all(_is_turned(x, cos, sin, interleaved, turned) for x in (q, k)):
        q, k = (_written_out(x, cos, sin, interleaved, turned, out_dtype) for x in (q, k))
        return q, k
    _check_angles(op, cos, sin)
    if unsqueeze_dim is not None:
        if not -cos.ndim <= unsqueeze_dim + (unsqueeze_dim < 0) < cos.ndim:
            raise ValueError(f"{op}: unsqueeze_dim {unsqueeze_dim} puts no dimension before the last of {shape(cos)}")
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if sharded(q, k, cos, sin):
        q, k = (_on_shards(op, name, x, cos, sin, interleaved, out_dtype) for name, x in (("q", q), ("k", k)))
        return q, k
    q, k = _expanded(op, "q", q, cos), _expanded(op, "k", k, cos)
    return cast("tuple[Tensor, Tensor]", _apply(q, k, cos, sin, interleaved, out_dtype))


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    turned: Turned | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate one tensor, as `rotary_embedding` rotates q.

    Args:
        x: as q in `rotary_embedding`.
        cos, sin: broadcast to x, except for the last dimension, which may be shorter: the rest of x is passed through.
        interleaved, turned, out_dtype: as in `rotary_embedding`.

    Returns, raises: as `rotary_embedding`.
    """
    op = "apply_rotary"
    _check_out_dtype(op, out_dtype)
    check_float(op, "x", x, min_ndim=1)
    if turned is not None and not _is_turned(x, cos, sin, interleaved, turned):
        return _written_out(x, cos, sin, interleaved, turned, out_dtype)
    _check_angles(op, cos, sin)
    if sharded(x, cos, sin):
        return _on_shards(op, "x", x, cos, sin, interleaved, out_dtype)
    return _apply(_expanded(op, "x", x, cos), None, cos, sin, interleaved, out_dtype)[0]


def _have_one_order(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Check whether the results of q and k have the same order of dimensions in memory, as those of one pass."""
    if q.stride() == k.stride() or (q.is_contiguous() and k.is_contiguous() and cos.is_contiguous()):
        return True
    of_q, of_k = _operands(q, cos), _operands(k, cos)
    return bool(of_q) == bool(of_k) and (not of_q or memory_order(of_q) == memory_order(of_k))


def _is_turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, turned: Turned) -> bool:
    """Check whether cos and sin are as wide as what an expression turns, which it splits in pairs or halves."""
    (width, half), size = turned, cos.shape[-1]
    alike = cos.shape == sin.shape and cos.dtype == sin.dtype
    if not alike or size != _width(x, width) or size % 2:
        return False
    if not isinstance(half, tuple):
        return half in (None, HALF, size // 2)
    apart, joined = half
    leading, parts = x.shape[:-1], (size // 2, 2) if interleaved else (2, size // 2)
    fits = apart is None or agrees(apart, (*leading, *parts))
    return fits and (joined is None or agrees(joined, (*leading, size)))


def _width(x: Tensor, width: int | None) -> int:
    return x.shape[-1] if width is None else min(width, x.shape[-1])


def _written_out(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, turned: Turned, out_dtype: torch.dtype | None
) -> Tensor:
    """Compute the expression as it is written, for any sizes."""
    width, half = turned
    part = x if width is None else x[..., :width]
    first, second = _taken_apart(part, interleaved, half)
    if interleaved:
        swapped = torch.stack((-second, first), dim=-1)
        joined = half[1] if isinstance(half, tuple) else None
        swapped = swapped.flatten(-2) if joined is None else swapped.reshape(tuple(joined))
    else:
        swapped = torch.cat((-second, first), dim=-1)
    result = part * cos + swapped * sin
    result = result if width is None else torch.cat((result, x[..., width:]), dim=-1)
    return result if out_dtype is None else result.to(out_dtype)


def _taken_apart(part: Tensor, interleaved: bool, half: int | Views | None) -> tuple[Tensor, Tensor]:
    if isinstance(half, tuple):
        sizes = (-1, 2) if interleaved else (2, -1)
        apart = part.unflatten(-1, sizes) if half[0] is None else part.reshape(tuple(half[0]))
        parts = apart.unbind(-1 if interleaved else -2)
        return parts[0], parts[1]
    if interleaved:
        return part[..., ::2], part[..., 1::2]
    half = part.shape[-1] // 2 if half == HALF else half
    first, second = part.chunk(2, dim=-1) if half is None else (part[..., :half], part[..., half:])
    return first, second


def _forward(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    if k is not None and not _have_one_order(q, k, cos):
        first, second = (_forward(x, None, cos, sin, interleaved, out_dtype)[0] for x in (q, k))
        return first, second
    results: tuple[Tensor, Tensor | None] = ROTARY.run(
        "forward", (q, k, cos, sin), requested(), interleaved=interleaved, out_dtype=out_dtype
    )
    return results


def _apply(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    # Gradients of cos and sin are rare: autograd of the plain formula is enough.
    if transformed(q, k, cos, sin) or differentiated(cos, sin):
        return formulas.rotary(q, k, cos, sin, interleaved=interleaved, out_dtype=out_dtype)
    if not differentiated(q, k):
        return _forward(q, k, cos, sin, interleaved, out_dtype)
    result: tuple[Tensor, Tensor | None] = _Rotary.apply(q, k, cos, sin, interleaved, out_dtype)
    return result


def _on_shards(
    op: str,
    name: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Rotate q or k alone: their sharding may differ."""
    if sharded(x):
        _check_fits(op, name, x, cos)
    local = localise(op, x, [cos, sin], whole=[-1])
    cos, sin = local.given(0), local.given(1)
    _check_fits(op, name, local.x, cos)
    return local.wrap(_apply(local.x, None, cos, sin, interleaved, out_dtype)[0])


def _check_out_dtype(op: str, out_dtype: object) -> None:
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"{op}: out_dtype must be a floating-point dtype, got {out_dtype}")


def _check_angles(op: str, cos: Tensor, sin: Tensor) -> None:
    check_float(op, "cos", cos, min_ndim=1)
    check_float(op, "sin", sin, min_ndim=1)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise MismatchError(f"{op}: cos {shape(cos)} of {cos.dtype} and sin {shape(sin)} of {sin.dtype} are not alike")
    check_same_device(op, cos, "sin", sin)
    if cos.shape[-1] % 2:
        raise ValueError(f"{op}: the last dimension of cos and sin must be even, got {shape(cos)}")


def _expanded(op: str, name: str, x: Tensor, cos: Tensor) -> Tensor:
    """Expand x to its broadcast shape with cos, except for a partial rotation."""
    if cos.shape[-1] == x.shape[-1]:
        if broadcasts_to(cos, x):
            check_same_device(op, x, "cos", cos)
            return x
        x = x.expand(broadcast_shape(op, x, "cos", cos, name))
    _check_fits(op, name, x, cos)
    return x


def _check_fits(op: str, name: str, x: Tensor, cos: Tensor) -> None:
    """Raise ValueError unless cos broadcasts to x, except for a shorter last dimension."""
    if cos.shape[-1] > x.shape[-1]:
        raise MismatchError(f"{op}: cos {shape(cos)} is wider than {name} {shape(x)}")
    extra = x.ndim - cos.ndim
    if extra < 0 or any(size not in (1, x.shape[extra + dim]) for dim, size in enumerate(cos.shape[:-1])):
        raise MismatchError(f"{op}: cos and sin of shape {shape(cos)} do not broadcast to {name} {shape(x)}")
    check_same_device(op, x, "cos", cos)
