"""Residual sums multiplied or divided by one: which lose the pass over memory, and which do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule

Body = Callable[["Residual", Tensor], Tensor]


class Residual(nn.Module):
    """A block with a scale, as those of diffusers."""

    def __init__(self, body: Body, scale: Any = 1.0) -> None:
        super().__init__()
        self.conv, self.scale, self.body = nn.Conv1d(3, 3, 3, padding=1), scale, body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _with_shape(block: Residual, x: Tensor) -> Tensor:
    """Read the shape of the sum, as a block behind it may."""
    summed = x + block.conv(x)
    return (summed / block.scale).reshape(summed.shape[0], -1) * summed.shape[-1]


def _added_in_place(block: Residual, x: Tensor) -> Tensor:
    scaled = (x + block.conv(x)) / block.scale
    scaled.add_(1)
    return scaled


def _also_without(block: Residual, x: Tensor) -> Tensor:
    summed = x + block.conv(x)
    scaled = summed / block.scale
    scaled.mul_(2)
    return scaled + summed


def applied(body: Body, scale: Any = 1.0) -> int:
    """Return how often the rule was applied, after a comparison of outputs and gradients."""
    torch.manual_seed(0)
    block = Residual(body, scale)
    twin, x = copy.deepcopy(block), torch.randn(2, 3, 8)
    report = schedule.optimize(block, x, rules="unit_scale")
    for given in (x, torch.randn(1, 3, 5)):
        mine, theirs = block(given), twin(given)
        assert torch.equal(mine, theirs)
        mine.sum().backward()
        theirs.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(block.parameters(), twin.parameters(), strict=True))
    return len(report.applied)


REWRITTEN: dict[str, Body] = {
    "the sum": lambda block, x: (x + block.conv(x)) / block.scale,
    "a summand": lambda block, x: block.conv(x) / block.scale + x,
    "a product": lambda block, x: (block.conv(x) + x) * block.scale,
    "the shape of the sum is read": _with_shape,
    "changed in place afterwards": _added_in_place,
}


@pytest.mark.parametrize("scale", [1.0, 1])
@pytest.mark.parametrize("name", REWRITTEN)
def test_a_scale_of_one_is_left_out(name: str, scale: Any) -> None:
    assert applied(REWRITTEN[name], scale) == 1


LEFT: dict[str, tuple[Body, Any]] = {
    "another scale": (REWRITTEN["the sum"], 2.0),
    "the sum is used": (_also_without, 1.0),
    "no sum": (lambda block, x: block.conv(x) / block.scale, 1.0),
}


@pytest.mark.parametrize("name", LEFT)
def test_these_are_left_alone(name: str) -> None:
    assert applied(*LEFT[name]) == 0


def test_a_scale_that_changes_is_noticed() -> None:
    block = Residual(REWRITTEN["the sum"])
    x = torch.randn(2, 3, 8)
    schedule.optimize(block, x, rules="unit_scale")
    block.scale = 2.0
    assert torch.equal(block(x), (x + block.conv(x)) / 2)
