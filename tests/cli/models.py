"""What the tests of the command line name as module:factory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.small import Mlp, Small, ids, small


class Asking(nn.Module):
    """Takes an object that nothing can make."""

    def forward(self, session: Any) -> torch.Tensor:
        found: torch.Tensor = session.embeddings
        return found


def make() -> tuple[Small, dict[str, torch.Tensor]]:
    """A model with its batch."""
    return small(), ids(2, 5)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """One tensor is its batch."""
    torch.manual_seed(0)
    return Mlp(16), torch.randn(2, 3, 16)


def without_batch() -> nn.Module:
    """No batch can be made for it."""
    return Asking()


def nothing() -> Any:
    """No model."""
    return 3
