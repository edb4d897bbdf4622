"""Settings of a cross entropy, with the arithmetic on the numbers of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused.backends.reference.losses import row_losses, row_losses_backward

Tensor = torch.Tensor
Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The highest logit of each row, which is a constant for derivatives, and three numbers relative to it."""

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Loss:
    """Settings of a cross entropy, with the arithmetic on rows."""

    op: str
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"

    def checked(self) -> Loss:
        """Return these settings, or raise ValueError if one is out of range."""
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"{self.op}: label_smoothing must be between 0 and 1, got {self.label_smoothing}")
        if not self.z_loss >= 0.0:
            raise ValueError(f"{self.op}: z_loss must be 0 or more, got {self.z_loss}")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"{self.op}: softcap must be above 0, or None for none, got {self.softcap}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{self.op}: reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}")
        return self

    @property
    def total(self) -> bool:
        """Whether the sum of the logits is needed."""
        return self.label_smoothing != 0.0

    def rows(self, statistics: Statistics, targets: Tensor, classes: int) -> Tensor:
        """Compute the loss of each row from its statistics."""
        return row_losses(*statistics, targets == self.ignore_index, **self._settings(classes))

    def rows_backward(
        self, g: Tensor, normalizer: tuple[Tensor, Tensor], targets: Tensor, classes: int
    ) -> Sequence[Tensor | None]:
        """Compute the gradients of the statistics from the gradients of the rows' losses."""
        return row_losses_backward(g, *normalizer, targets == self.ignore_index, **self._settings(classes))

    def _settings(self, classes: int) -> dict[str, Any]:
        return {"classes": classes, "label_smoothing": self.label_smoothing, "z_loss": self.z_loss}

    def count(self, targets: Tensor) -> Tensor | None:
        """Return the number of rows that a mean is over, or None for other reductions."""
        return (targets != self.ignore_index).sum() if self.reduction == "mean" else None

    def reduce(self, losses: Tensor, count: Tensor | None) -> Tensor:
        """Reduce the losses of all rows, with NaN for the mean of no rows."""
        if self.reduction == "none":
            return losses
        return losses.sum() if count is None else losses.sum() / count

    def index(self, targets: Tensor, start: int = 0) -> Tensor:
        """Return the columns of the targets in a shard beginning at column `start`, negative for ignored targets."""
        targets = targets.long()
        if self.ignore_index >= 0:
            targets = targets.masked_fill(targets == self.ignore_index, -1)
        return targets - start if start else targets
