"""Settings of a cross entropy, with the arithmetic on the numbers of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fused.backends.reference.losses import RowSettings, weights_of
from fused.backends.reference.numbers import compute_dtype
from fused.sharding import full_tensor, placed_as

Tensor = torch.Tensor
Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""The highest logit of each row, which is a constant for derivatives, three numbers relative to it, and its column."""

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """Results of `cross_entropy_with_metrics`: the loss, and metrics for logs, which have no gradient.

    Args:
        loss: a number, or ``[...]`` for reduction "none".
        z_loss: the part of the loss that is due to `z_loss`, reduced as the loss is.
        token_accuracy: a number, the share of the rows not ignored whose highest logit is that of the target; NaN if
            there are none.
        predicted_tokens: ``[...]``, int64, the class of the highest logit, the first of several; −1 for ignored rows.
    """

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor


@dataclass(frozen=True)
class Loss:
    """Settings of a cross entropy, with the arithmetic on rows.

    Args:
        metrics: whether the results are the loss, and of each row the z-loss and the predicted class.
    """

    op: str
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    token_scaling: bool = False
    metrics: bool = False

    def checked(self) -> Loss:
        """Return these settings, or raise ValueError if one is out of range."""
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"{self.op}: label_smoothing must be between 0 and 1, got {self.label_smoothing}")
        if not self.z_loss >= 0.0:
            raise ValueError(f"{self.op}: z_loss must be 0 or more, got {self.z_loss}")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"{self.op}: softcap must be above 0, or None for none, got {self.softcap}")
        check_reduction(self.op, self.reduction)
        return self

    def of_rows(self, classes: int, start: int = 0) -> RowSettings:
        """Return the settings of the loss of a row whose index is that of :meth:`index`."""
        return RowSettings(self.ignore_index - start, classes, self.label_smoothing, self.z_loss)

    def index(self, targets: Tensor, start: int = 0) -> Tensor:
        """Return the columns of the targets in a shard beginning at column `start`."""
        targets = targets.long()
        return targets - start if start else targets

    def count(self, targets: Tensor, class_weight: Tensor | None = None) -> Tensor | None:
        """Return the number or total weight of the rows that a mean is over, or None for other reductions."""
        if self.reduction != "mean":
            return None
        if class_weight is None:
            return (targets != self.ignore_index).sum()
        targets = full_tensor(targets)
        of_rows = weights_of(targets.long(), class_weight, compute_dtype(class_weight.dtype))
        return torch.where(targets != self.ignore_index, of_rows, 0).sum()

    def reduce(self, losses: Tensor, count: Tensor | None) -> Tensor:
        """Reduce the losses of all rows as :func:`reduced`."""
        return reduced(losses, self.reduction, count)

    def output(self, results: tuple[Tensor, ...], targets: Tensor, class_weight: Tensor | None) -> CrossEntropyOutput:
        """Return the results with metrics, reduced as users get them."""
        value, z_losses, predicted = results
        here = placed_as(targets, predicted)
        counted = here != self.ignore_index
        accuracy = ((predicted == here) & counted).sum() / counted.sum()
        return CrossEntropyOutput(value, self.reduce(z_losses, self.count(targets, class_weight)), accuracy, predicted)


def reduced(losses: Tensor, reduction: str, count: Tensor | None) -> Tensor:
    """Reduce the losses of all rows, with NaN for the mean of no rows.

    Args:
        count: what a mean is over; without it, the losses are summed.
    """
    if reduction == "none":
        return losses
    return losses.sum() if count is None else losses.sum() / count


def check_reduction(op: str, reduction: str) -> None:
    """Raise ValueError unless there is such a reduction."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
