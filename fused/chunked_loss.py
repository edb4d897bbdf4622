"""Losses and gradients of a linear layer's logits in chunks of rows, of which only one is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused.backends.reference.numbers import compute_dtype
from fused.linear import linear

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

UNITS = {torch.float16: 2.0**8}
"""Gradient of each row's loss while gradients are computed with the loss, if not 1, by dtype.

With 1, gradients of improbable classes would be zero in float16. The rest up to 65504 is for z-losses.
"""


OfChunk = Callable[[slice, Tensor, Tensor | None], tuple[tuple[Tensor, ...], Tensor | None]]
"""``of_chunk(chunk, logits, g)`` returns the losses of a chunk's rows, perhaps with metrics of them, and, given the
gradients g of the losses, the gradient of the logits, perhaps written over them."""


def comes_with_gradients(reduction: str, hidden: Tensor) -> bool:
    """Check whether gradients are computed together with the loss, and scaled in the backward pass."""
    return reduction != "none" and has_exact_products(hidden)


def expects_one(reduction: str, hidden: Tensor) -> bool:
    """Check whether gradients are computed together with the loss for a loss gradient of 1, and mostly not scaled.

    Of a mean on the CPU: a sum is mostly divided by a number of tokens, and float16 has `UNITS`.
    """
    return reduction == "mean" and hidden.is_cpu and hidden.dtype != torch.float16


def is_exact_factor(factor: Tensor, dtype: torch.dtype) -> bool:
    """Check whether gradients are as exact if scaled afterwards: those in bfloat16 only by a power of two.

    Zeros of ignored rows would become NaN by an infinite factor.
    """
    number = factor.item()
    return math.isfinite(number) and (dtype.itemsize >= 4 or math.frexp(number)[0] == 0.5)


def has_exact_products(tensor: Tensor) -> bool:
    """Check whether torch has a product of such matrices with a result in float32 or wider."""
    return tensor.is_cuda or tensor.dtype.itemsize >= 4


def unit_gradients(hidden: Tensor) -> Tensor:
    """Return the gradient of each row's loss, ``[...]``, for gradients that are scaled later by `over_units`."""
    unit = hidden.new_full((), UNITS.get(hidden.dtype, 1.0), dtype=compute_dtype(hidden.dtype))
    return unit.expand(hidden.shape[:-1])


def over_units(g: Tensor, dtype: torch.dtype, count: Tensor | None) -> Tensor:
    """Return the factor from gradients for `unit_gradients` to those for the gradient of the reduced loss.

    Args:
        count: what a mean is over, or None for other reductions.
    """
    return _of_each_row(g, count) / UNITS.get(dtype, 1.0)


def row_gradients(g: Tensor, hidden: Tensor, count: Tensor | None) -> Tensor:
    """Compute the gradient of each row's loss, ``[...]``, from the gradient of the reduced loss."""
    return _of_each_row(g, count).expand(hidden.shape[:-1])


def _of_each_row(g: Tensor, count: Tensor | None) -> Tensor:
    """Divide by what a mean is over; of nothing, gradients are zero, while the loss is NaN."""
    return g if count is None else torch.where(count != 0, g / count, 0)


def sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    of_chunk: OfChunk,
    chunk_rows: int | None,
    g: Tensor | None = None,
    needs: Sequence[bool] = (),
) -> tuple[tuple[Tensor, ...], Gradients]:
    """Compute the losses of the rows with their metrics, each ``[...]``, and the needed gradients of the operands.

    Gradients are computed only if the losses' gradients g are given.
    """
    rows, size = hidden.reshape(-1, hidden.shape[-1]), chunk_rows or max(hidden.shape[-1], 256)
    flat_g = None if g is None else g.reshape(-1)
    sums = Sums(rows, weight, bias, needs if g is not None else ())

    def results_of(chunk: slice) -> tuple[Tensor, ...]:
        """Return the results of a chunk, after its gradients were added; nothing else of it stays in memory."""
        logits = linear(rows[chunk], weight, bias)
        found, dlogits = of_chunk(chunk, logits, None if flat_g is None else flat_g[chunk])
        if dlogits is not None:
            sums.add(chunk, dlogits)
        return found

    # Of no rows, one empty chunk.
    parts = [results_of(slice(start, start + size)) for start in range(0, max(len(rows), 1), size)]
    results = tuple(torch.cat(each).reshape(hidden.shape[:-1]) for each in zip(*parts, strict=True))
    return results, sums.gradients(hidden.shape)


class Sums:
    """Gradients of hidden, weight and bias, summed over the chunks in float32 or wider.

    The first chunk's are not added to zeros: often there is only one.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> None:
        self.rows, self.of, self.dtype = rows, weight, gradient_dtype(rows)
        needs_hidden, self.needs_weight, needs_bias = (*needs, False, False, False)[:3]
        self.needs_bias = needs_bias and bias is not None
        self.hidden = torch.empty_like(rows, dtype=self.dtype) if needs_hidden else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[chunk] = _product(dlogits, self.of)
        if self.needs_weight:
            turned, rows = dlogits.t(), self.rows[chunk]
            self.weight = _product(turned, rows) if self.weight is None else _added(self.weight, turned, rows)
        if self.needs_bias:
            of_bias = dlogits.sum(0, dtype=self.dtype)
            self.bias = of_bias if self.bias is None else self.bias.to(compute_dtype(self.dtype)).add_(of_bias)

    def gradients(self, shape: Sequence[int]) -> Gradients:
        """Return the sums in the `gradient_dtype`, with the given shape for hidden."""
        of_hidden = None if self.hidden is None else self.hidden.reshape(shape)
        of_weight, of_bias = (None if one is None else one.to(self.dtype) for one in (self.weight, self.bias))
        return of_hidden, of_weight, of_bias


def gradient_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of the chunks: float32 or wider if torch has such products."""
    return compute_dtype(hidden.dtype) if has_exact_products(hidden) else hidden.dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, with a float32 result for 16-bit matrices on CUDA."""
    if a.dtype.itemsize < 4 and has_exact_products(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return linear(a, b.t())


def _added(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b in float32 or wider, over the total if it is wide enough."""
    if total.dtype == b.dtype and total.dtype.itemsize >= 4:
        return total.addmm_(a, b)
    if b.is_cuda:
        # The product adds to the sum itself: no second [vocab, features].
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.to(compute_dtype(total.dtype)).add_(_product(a, b))
