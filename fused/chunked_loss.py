"""Losses and gradients of a linear layer's logits in chunks of rows, of which only one is in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused.backends.reference.numbers import compute_dtype
from fused.linear import linear
from fused.loss import Loss
from fused.loss_autograd import LOGIT_STATISTICS, gradient

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

UNITS = {torch.float16: 2.0**8}
"""Gradient of each row's loss while gradients are computed with the loss, if not 1, by dtype.

With 1, gradients of improbable classes would be zero in float16. The rest up to 65504 is for z-losses.
"""


def comes_with_gradients(loss: Loss, hidden: Tensor) -> bool:
    """Check whether gradients are computed together with the loss, and scaled in the backward pass."""
    return loss.reduction != "none" and has_exact_products(hidden)


def has_exact_products(tensor: Tensor) -> bool:
    """Check whether torch has a product of such matrices with a result in float32 or wider."""
    return tensor.is_cuda or tensor.dtype.itemsize >= 4


def unit_gradients(hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each row's loss, ``[...]``, for gradients that are scaled later by `over_units`."""
    unit = hidden.new_full((), UNITS.get(hidden.dtype, 1.0), dtype=compute_dtype(hidden.dtype))
    return unit.expand(targets.shape)


def over_units(loss: Loss, g: Tensor, dtype: torch.dtype, targets: Tensor, class_weight: Tensor | None) -> Tensor:
    """Return the factor from gradients for `unit_gradients` to those for the gradient of the reduced loss."""
    return _of_each_row(loss, g, targets, class_weight) / UNITS.get(dtype, 1.0)


def row_gradients(loss: Loss, g: Tensor, targets: Tensor, class_weight: Tensor | None) -> Tensor:
    """Compute the gradient of each row's loss, ``[...]``, from the gradient of the reduced loss."""
    return _of_each_row(loss, g, targets, class_weight).expand(targets.shape)


def _of_each_row(loss: Loss, g: Tensor, targets: Tensor, class_weight: Tensor | None) -> Tensor:
    """Divide by the rows that a mean is over; of none, gradients are zero, while the loss is NaN."""
    rows = loss.count(targets, class_weight)
    return g if rows is None else torch.where(rows != 0, g / rows, 0)


def sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    loss: Loss,
    chunk_rows: int | None,
    backend: str | None,
    g: Tensor | None = None,
    needs: Sequence[bool] = (),
) -> tuple[Tensor, Gradients]:
    """Compute the losses of the rows, ``[...]``, and the needed gradients of hidden, weight and bias.

    Gradients are computed only if the losses' gradients g are given.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    flat_g = None if g is None else g.reshape(-1)
    size = chunk_rows or max(hidden.shape[-1], 256)
    losses = torch.empty(len(rows), dtype=compute_dtype(hidden.dtype), device=hidden.device)
    sums = Sums(rows, weight, bias, needs if g is not None else ())
    settings = loss.of_rows(weight.shape[0])
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        logits = linear(rows[chunk], weight, bias)
        index = loss.index(flat[chunk])
        highest, lse, losses[chunk], _ = LOGIT_STATISTICS.run(
            "forward", (logits, index, loss.softcap, class_weight), backend, settings=settings, whole=True
        )
        if flat_g is not None:
            args = (logits, flat_g[chunk], None, index, highest, lse, loss.softcap, class_weight)
            sums.add(chunk, gradient(args, settings, True, backend))
    return losses.reshape(targets.shape), sums.gradients(hidden.shape)


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
