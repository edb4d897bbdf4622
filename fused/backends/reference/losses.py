"""Reference formulas of cross entropy: statistics of the logits in one pass, and their gradient.

Every loss of this family is arithmetic on three numbers per row: the logarithm of the sum of exponentials, the
logit of the target, and (for label smoothing) the sum of the logits. Only these formulas read the logits. As in
`log_softmax`, the highest logit of a row is subtracted from all before anything is rounded: it is a fourth number, and
the others are relative to it.
"""

from __future__ import annotations

import torch

from fused.backends.reference.numbers import compute_dtype

Tensor = torch.Tensor


def logit_statistics(
    logits: Tensor, index: Tensor, softcap: float | Tensor | None, *, total: bool, elsewhere: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the highest z of each row, and logsumexp, picked logit and sum of z − highest.

    z is ``softcap·tanh(logits / softcap)``, or the logits themselves. For derivatives, the highest is a constant.

    Args:
        logits: ``[..., vocab]``.
        index: ``[...]``, the column to pick.
        total: whether the sum is wanted.
        elsewhere: the picked value if the index is not one of the columns: 0 for a shard, NaN for the full vocabulary.

    Returns:
        Four ``[...]`` (the last may be None), float32 for 16-bit logits. As in `log_softmax`, a row with a logit of
        +inf has a logsumexp of NaN; a row of only −inf has −inf, and 0 as its highest.
    """
    columns = logits.shape[-1]
    compute = compute_dtype(logits.dtype)
    if columns == 0:
        nothing = torch.zeros_like(index, dtype=compute)
        return nothing, nothing - torch.inf, nothing + elsewhere, nothing if total else None
    z = _capped(logits.to(compute), softcap)
    highest = z.detach().amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0)
    below = z - highest
    here = (index >= 0) & (index < columns)
    picked = torch.where(here, _picked(below, torch.where(here, index, 0)), elsewhere)
    sums = below.sum(-1) if total else None
    return highest.squeeze(-1), torch.exp(below).sum(-1).log(), picked, sums


def _picked(z: Tensor, index: Tensor) -> Tensor:
    """Return ``z`` at ``index``, a column of each row."""
    if torch.compiler.is_compiling():
        # The gradient of `gather` writes one number per row into a tensor of zeros; this form is fused with the rest.
        chosen = torch.arange(z.shape[-1], device=z.device) == index.unsqueeze(-1)
        return torch.where(chosen, z, 0).sum(-1)
    return z.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def logit_statistics_backward(
    logits: Tensor,
    g_lse: Tensor,
    g_picked: Tensor | None,
    g_total: Tensor | None,
    index: Tensor,
    highest: Tensor,
    lse: Tensor,
    softcap: float | Tensor | None,
    *,
    inplace: bool,
) -> Tensor:
    """Compute ``g_lse·softmax(z) + g_picked·[column = index] + g_total``, through the soft cap, in the logits' dtype.

    Args:
        g_lse, g_picked, g_total: ``[...]``, gradients of the statistics.
        highest, lse: over all columns, of which the logits may be a part.
        inplace: write the gradient over the logits.
    """
    z = _capped(logits.to(lse.dtype), softcap)
    dz = torch.exp(z - highest.unsqueeze(-1)) * (torch.exp(-lse) * g_lse).unsqueeze(-1)
    if g_picked is not None:
        columns = torch.arange(logits.shape[-1], device=logits.device)
        dz = torch.where(columns == index.unsqueeze(-1), dz + g_picked.unsqueeze(-1), dz)
    if g_total is not None:
        dz = dz + g_total.unsqueeze(-1)
    if softcap is not None:
        dz = dz * (1 - (z / softcap).square())
    return logits.copy_(dz) if inplace else dz.to(logits.dtype)


def row_losses(
    highest: Tensor,
    lse: Tensor,
    picked: Tensor,
    total: Tensor | None,
    ignored: Tensor,
    *,
    classes: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Compute ``lse − (1 − ε)·picked − ε·total / classes + z_loss·(highest + lse)²`` of rows, 0 for ignored ones."""
    if total is None:
        losses = lse - picked
    else:
        losses = lse - (1 - label_smoothing) * picked - total * (label_smoothing / classes)
    if z_loss != 0.0:
        losses = losses + z_loss * (highest + lse).square()
    return losses.masked_fill(ignored, 0)


def row_losses_backward(
    g: Tensor, highest: Tensor, lse: Tensor, ignored: Tensor, *, classes: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the gradients of lse, picked and total from those of the rows' losses."""
    g = g.masked_fill(ignored, 0)
    g_lse = g if z_loss == 0.0 else g * (1 + 2 * z_loss * (highest + lse))
    return g_lse, g * (label_smoothing - 1), None if label_smoothing == 0.0 else g * (-label_smoothing / classes)


def _capped(logits: Tensor, softcap: float | Tensor | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
