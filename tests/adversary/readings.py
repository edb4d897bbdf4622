"""A module that multiplies by what it reads, and its comparison with an untouched twin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of

Read = Callable[[Any], Any]


class Reading(nn.Module):
    """Multiplies by a number that is read of the module."""

    def __init__(self, read: Read, **values: Any) -> None:
        super().__init__()
        self.proj, self.read = nn.Linear(4, 4), read
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x)) * self.read(self)


class Box:
    """An object with one number."""

    def __init__(self, k: float = 1.5) -> None:
        self.k = k


def fallbacks(module: nn.Module) -> int:
    return sum(state.fallbacks for each in module.modules() if (state := state_of(each)) is not None)


def as_untouched(
    module: nn.Module, *changes: Callable[[Any], Any], once: bool = False, twin: nn.Module | None = None
) -> None:
    """The same as an untouched twin, by a graph before the changes; ``once`` is for changes outside of the module."""
    twin, x = twin or copy.deepcopy(module), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, x, cost_guard=False)
        assert report.applied, str(report)
        torch.testing.assert_close(module(x), twin(x))
        assert not fallbacks(module), "the graph holds where nothing has changed"
        for change in changes:
            before = twin(x)
            change(module)
            if not once:
                change(twin)
            assert not torch.equal(before, twin(x)), "the change matters"
            torch.testing.assert_close(module(x), twin(x))
            torch.testing.assert_close(module(x), twin(x))
