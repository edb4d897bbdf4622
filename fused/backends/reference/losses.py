"""Reference formulas of cross entropy: statistics of the logits in one pass, and their gradient.

Every loss of this family is arithmetic on three numbers per row: the logarithm of the sum of exponentials, the
logit of the target, and (for label smoothing) the sum of the logits. Only these formulas read the logits. The three
numbers of logits sharded on the vocabulary are combined before the loss is computed. As in `log_softmax`, the highest
logit of a row is subtracted from all before anything is rounded: it is a fourth number, and the others are relative to
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import row_by_row

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowSettings:
    """Settings of the loss of a row.

    Args:
        ignored: the index of rows that are ignored.
        classes: the number of columns, of all shards.
        label_smoothing: ε.
        z_loss: factor of the squared logsumexp.
    """

    ignored: int
    classes: int
    label_smoothing: float
    z_loss: float


def logit_statistics(
    logits: Tensor,
    index: Tensor,
    softcap: float | Tensor | None,
    class_weight: Tensor | None = None,
    *,
    settings: RowSettings,
    whole: bool,
    token_scaling: bool = False,
    predicts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the highest z of each row, the logsumexp of z − highest, the loss, its scale, and the predicted column.

    z is ``softcap·tanh(logits / softcap)``, or the logits themselves. For derivatives, the highest is a constant.

    Args:
        logits: ``[..., vocab]``.
        index: ``[...]``, the column to pick.
        class_weight: ``[vocab]``, the weight of each class, or None; needs all columns.
        settings: those of the losses.
        whole: whether these are all columns. Of a shard, the third and the fourth result are the picked z − highest, 0
            if it is in another shard, and with smoothing the sum of z − highest, for :func:`row_losses`.
        token_scaling: multiply the loss by the probability of the picked class, a constant for derivatives.
        predicts: whether the column of the highest logit is a result.

    Returns:
        Five ``[...]`` (the last two may be None), float32 for 16-bit logits, int64 for the column. As in `log_softmax`,
        a row with a logit of +inf has a logsumexp of NaN; a row of only −inf has −inf, and 0 as its highest. The loss
        of a row whose index is none of the columns is NaN.
    """
    columns = logits.shape[-1]
    compute = compute_dtype(logits.dtype)
    smoothed, elsewhere = settings.label_smoothing != 0.0, torch.nan if whole else 0.0
    if columns == 0:
        nothing = torch.zeros_like(index, dtype=compute)
        total = nothing if smoothed and not whole else None
        column = index.new_zeros(index.shape) if predicts else None
        return nothing, nothing - torch.inf, nothing + elsewhere, total, column
    z = _capped(logits.to(compute), softcap)
    highest = z.detach().amax(-1, keepdim=True)
    below = z - highest.clamp(min=torch.finfo(compute).min)  # −inf where all are
    highest = highest.masked_fill(row_by_row(highest == -torch.inf), 0)
    here = (index >= 0) & (index < columns)
    picked = torch.where(here, _picked(below, torch.where(here, index, 0)), elsewhere)
    sums = None
    if smoothed:
        sums = below.sum(-1) if class_weight is None else (below * class_weight.to(compute)).sum(-1)
    highest, lse = highest.squeeze(-1), torch.exp(below).sum(-1).log()
    column = logits.detach().argmax(-1) if predicts else None
    if whole:
        losses, scale = row_losses(highest, lse, picked, sums, index, settings, class_weight, token_scaling)
        return highest, lse, losses, scale, column
    return highest, lse, picked, sums, column


def _picked(z: Tensor, index: Tensor) -> Tensor:
    """Return ``z`` at ``index``, a column of each row."""
    if torch.compiler.is_compiling():
        # The gradient of `gather` writes one number per row into a tensor of zeros; this form is fused with the rest.
        chosen = torch.arange(z.shape[-1], device=z.device) == index.unsqueeze(-1)
        return torch.where(chosen, z, 0).sum(-1)
    return z.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def logit_statistics_backward(
    logits: Tensor,
    g: Tensor,
    count: Tensor | None,
    index: Tensor,
    highest: Tensor,
    lse: Tensor,
    softcap: float | Tensor | None,
    class_weight: Tensor | None = None,
    *,
    settings: RowSettings,
    inplace: bool,
) -> Tensor:
    """Compute the gradient of the logits from that of the rows' losses, in the logits' dtype.

    It is ``(1 + 2·z_loss·(highest + lse))·softmax(z) − (1 − ε)·[column = index] − ε / classes``, times g, through the
    soft cap; 0 for ignored rows. With class weights, 1 becomes (1 − ε)·w[index] + ε·Σw / classes, the second term
    has the weight of the index, and the third that of the column.

    Args:
        g: ``[...]``, or a number for all rows.
        count: what g is divided by, or None.
        highest, lse: over all columns, of which the logits may be a part.
        inplace: write the gradient over the logits.
    """
    g_lse, g_picked, g_total = _row_losses_backward(g, count, index, highest, lse, settings, class_weight)
    z = _capped(logits.to(lse.dtype), softcap)
    dz = torch.exp(z - highest.unsqueeze(-1)) * (torch.exp(-lse) * g_lse).unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    dz = torch.where(columns == index.unsqueeze(-1), dz + g_picked.unsqueeze(-1), dz)
    if g_total is not None:
        g_total = g_total.unsqueeze(-1)
        dz = dz + (g_total if class_weight is None else g_total * class_weight.to(dz.dtype))
    if softcap is not None:
        dz = dz * (1 - (z / softcap).square())
    return logits.copy_(dz) if inplace else dz.to(logits.dtype)


def row_losses(
    highest: Tensor,
    lse: Tensor,
    picked: Tensor,
    total: Tensor | None,
    index: Tensor,
    settings: RowSettings,
    class_weight: Tensor | None = None,
    token_scaling: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``lse − (1 − ε)·picked − ε·total / classes + z_loss·(highest + lse)²`` of rows, 0 for ignored ones.

    With class weights, it is ``(1 − ε)·w[index]·(lse − picked) + ε·(Σw·lse − total) / classes + z_loss·(…)²``. With
    token scaling it is multiplied by the second result, the probability ``exp(picked − lse)``.
    """
    if class_weight is None:
        losses = lse - (1 - settings.label_smoothing) * picked
    else:
        of_index = weights_of(index, class_weight, lse.dtype) * (1 - settings.label_smoothing)
        losses = of_index * (lse - picked)
        if total is not None:
            losses = losses + lse * (class_weight.to(lse.dtype).sum() * (settings.label_smoothing / settings.classes))
    if total is not None:
        losses = losses - total * (settings.label_smoothing / settings.classes)
    if settings.z_loss != 0.0:
        losses = losses + settings.z_loss * (highest + lse).square()
    ignored = index == settings.ignored
    if not token_scaling:
        return losses.masked_fill(ignored, 0), None
    scale = torch.exp(picked - lse).detach().masked_fill(ignored, 0)
    return losses.masked_fill(ignored, 0) * scale, scale


def z_losses(highest: Tensor, lse: Tensor, scale: Tensor | None, index: Tensor, settings: RowSettings) -> Tensor:
    """Compute the part ``z_loss·(highest + lse)²`` of :func:`row_losses`, 0 for ignored rows."""
    parts = settings.z_loss * (highest + lse).square() * (1 if scale is None else scale)
    return parts.masked_fill(index == settings.ignored, 0)


def weights_of(index: Tensor, class_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights of the classes of rows; rows without a class get that of some class."""
    return class_weight.to(dtype)[index.clamp(0, class_weight.shape[0] - 1)]


def _row_losses_backward(
    g: Tensor,
    count: Tensor | None,
    index: Tensor,
    highest: Tensor,
    lse: Tensor,
    settings: RowSettings,
    class_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of lse, picked and total from those of the rows' losses."""
    g = (g if count is None else g / count).masked_fill(index == settings.ignored, 0)
    smoothing = settings.label_smoothing
    g_total = None if smoothing == 0.0 else g * (-smoothing / settings.classes)
    of_lse: Tensor | float = 1.0
    g_picked = g * (smoothing - 1)
    if class_weight is not None:
        of_index = weights_of(index, class_weight, lse.dtype)
        g_picked = g_picked * of_index
        of_lse = (1 - smoothing) * of_index + class_weight.to(lse.dtype).sum() * (smoothing / settings.classes)
    if settings.z_loss != 0.0:
        of_lse = of_lse + 2 * settings.z_loss * (highest + lse)
    return g if isinstance(of_lse, float) else g * of_lse, g_picked, g_total


def _capped(logits: Tensor, softcap: float | Tensor | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
