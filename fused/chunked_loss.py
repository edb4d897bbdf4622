"""Losses and gradients of a linear layer's logits in chunks of rows, of which only one is in memory."""

from __future__ import annotations

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
    """Gradients of hidden, weight and bias, accumulated over the chunks."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> None:
        self.rows, self.weight_itself = rows, weight
        wide = compute_dtype(rows.dtype)
        self.hidden = self.weight = self.bias = None
        if not any(needs):
            return
        if needs[0]:
            self.hidden = torch.empty_like(rows, dtype=wide if has_exact_products(rows) else rows.dtype)
        if needs[1]:
            self.weight = torch.zeros_like(weight, dtype=wide)
        if needs[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=wide)

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[chunk] = _product(dlogits, self.weight_itself)
        if self.weight is not None:
            turned, rows = dlogits.t(), self.rows[chunk]
            if self.weight.dtype == rows.dtype:
                self.weight.addmm_(turned, rows)
            elif rows.is_cuda:
                # The product adds to the sum itself: no second [vocab, features].
                torch.addmm(self.weight, turned, rows, out_dtype=self.weight.dtype, out=self.weight)
            else:
                self.weight += _product(turned, rows)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def gradients(self, shape: Sequence[int]) -> Gradients:
        return None if self.hidden is None else self.hidden.reshape(shape), self.weight, self.bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, with a float32 result for 16-bit matrices on CUDA."""
    if a.dtype.itemsize < 4 and has_exact_products(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return linear(a, b.t())
