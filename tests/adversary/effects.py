"""A module with something to rewrite, and its comparison with an untouched twin."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of


class Base(nn.Module):
    """Something to rewrite, and something odd."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def core(self, x: Tensor) -> Tensor:
        """Compute what the rules rewrite."""
        return self.fc2(F.gelu(self.fc1(x)))


def pair(module: nn.Module, *inputs: Any, rewritten: bool = True) -> tuple[nn.Module, nn.Module]:
    """Return the module, optimized, and an untouched twin."""
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.optimize(module, inputs, cost_guard=False)
    assert any(state_of(each) for each in module.modules()) == rewritten
    return module, twin
