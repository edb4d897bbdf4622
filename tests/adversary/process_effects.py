"""A call of a submodule with something around it, scheduled beside an untouched twin."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

Module = Callable[[Tensor], Tensor]
LOCK = threading.Lock()


class Late(nn.Module):
    """Asks only once it is told to, so that the runs of scheduling see no difference."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.ask, self.asks = ask, False

    def forward(self, h: Tensor) -> Tensor:
        factor: Any = self.ask() if self.asks else 1
        return h * factor


class Around(nn.Module):
    """Calls ``around(child, h)`` between two layers."""

    def __init__(self, around: Callable[[Module, Tensor], Tensor], ask: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.around, self.child = around, Late(ask)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        return self.second(self.around(self.child, h))


def pair(around: Any, ask: Callable[[], Any] = lambda: 1) -> tuple[Around, Around, Tensor, schedule.Report]:
    """Return a scheduled module, an untouched twin, an input and the report."""
    module, twin, x = Around(around, ask), Around(around, ask), torch.randn(2, 8)
    twin.load_state_dict(module.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, x, cost_guard=False)
    module.child.asks = twin.child.asks = True
    return module, twin, x, report


def refusal(report: schedule.Report) -> str:
    """Return why the whole module was not rewritten."""
    return "\n".join(map(str, report.select(status="skipped")))
