"""What calls of a scheduled model led to."""

from __future__ import annotations

import torch
from torch import nn

from schedule.runtime.scheduled import state_of

X = torch.linspace(-2, 2, 96).reshape(2, 3, 16)


def fallbacks(model: nn.Module) -> int:
    return sum(state.fallbacks for module in model.modules() if (state := state_of(module)) is not None)


def adaptations(model: nn.Module) -> int:
    return sum(len(state.adaptations) for module in model.modules() if (state := state_of(module)) is not None)
