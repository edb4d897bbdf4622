"""What a forward leaves behind besides its numbers, and when: attributes, errors, objects it returns or hands on."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


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


def outcome(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or the class of its error."""
    try:
        return run()
    except (RuntimeError, IndexError) as error:
        return type(error)


# -- attributes that other code reads ------------------------------------------------------------------------------


class Reading(nn.Module):
    """Reads an attribute of the module around it."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, h: Tensor) -> Tensor:
        """Multiply by the mask."""
        return h * self.owner[0].mask


class Assigning(Base):
    """Assigns a mask for a child that reads it."""

    def __init__(self, branching: bool = False) -> None:
        super().__init__()
        self.child, self.mask, self.branching = Reading(self), torch.zeros(16), branching

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Assign before, in between and at the end."""
        self.mask = mask
        h = self.child(F.gelu(self.fc1(x)))
        self.mask = mask + 1
        if self.branching and h.sum() > 0:
            h = h * 3
        h = self.child(h)
        self.mask = self.mask * 2
        self.mask = self.mask * 2
        return self.fc2(h)


@pytest.mark.parametrize("branching", [False, True])
def test_a_child_reads_what_was_assigned_before_its_call(branching: bool) -> None:
    torch.manual_seed(0)
    model, twin = pair(Assigning(branching), torch.randn(2, 8), torch.ones(16))
    masks = [torch.full((16,), number) for number in (1.0, -2.0, 3.0, -4.0)]
    for mask in masks:
        x = torch.randn(2, 8)
        torch.testing.assert_close(model(x, mask), twin(x, mask))
        torch.testing.assert_close(model.mask, twin.mask)


class Hooked(Base):
    """Assigns a mask before it calls a layer that may get a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(16, 16), torch.zeros(16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Assign, then call."""
        self.mask = mask
        return self.fc2(self.layer(F.gelu(self.fc1(x))))


def test_a_hook_reads_what_was_assigned_before_the_call() -> None:
    model, twin = pair(Hooked(), torch.randn(2, 8), torch.ones(16))
    for each in (model, twin):
        each.layer.register_forward_hook(lambda module, args, out, owner=each: out * owner.mask)
    x, mask = torch.randn(2, 8), torch.full((16,), 3.0)
    torch.testing.assert_close(model(x, mask), twin(x, mask))


class Running(Base):
    """Keeps a running sum, and branches on data after a child was called."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.sum = nn.Linear(16, 16), torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the sum before the branch: an attempt that is given up must not count."""
        h = F.gelu(self.fc1(x))
        self.sum = self.sum + h.detach().sum(0)
        h = self.child(h + self.sum)
        return self.fc2(h * 2 if h.sum() > 0 else h * 3)


def test_an_assignment_is_undone_where_a_graph_is_given_up() -> None:
    torch.manual_seed(0)
    model, twin = pair(Running(), torch.randn(2, 8))
    misses = 0
    for _ in range(8):
        x = torch.randn(2, 8)
        model.sum, twin.sum = torch.zeros(16), torch.zeros(16)
        for _ in range(2):
            torch.testing.assert_close(model(x), twin(x))
            torch.testing.assert_close(model.sum, twin.sum)
        misses = state_of(model).fallbacks
    assert misses, "no attempt was given up"
