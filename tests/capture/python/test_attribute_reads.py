"""Attributes that Python code may set on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture.running import schedule_all


class Scaled(nn.Module):
    """Doubles tensors that are marked, arguments and results of operations alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if hasattr(x, "marked_by_the_user"):
            y = y * 2
        return y if hasattr(y, "marked_by_the_user") else y + 1


@pytest.mark.parametrize(
    "compiled", [lambda f: f, lambda f: torch.compile(f, backend="eager")], ids=["eager", "compiled"]
)
def test_a_mark_set_later_is_seen(compiled: Callable[[Any], Any]) -> None:
    model = Scaled()
    plain, marked = torch.randn(3, 4), torch.randn(3, 4)
    marked.marked_by_the_user = True  # type: ignore[attr-defined]
    expected = [model(x) for x in (plain, marked, plain)]
    schedule_all(model, plain)
    run = compiled(model)
    for x, result in zip((plain, marked, plain), expected, strict=True):
        torch.testing.assert_close(run(x), result, rtol=0, atol=0)
