"""What is taken for rounding by the sweep, and what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from schedule.rules import Rule
from schedule.rules.attention import SDPA
from tests.sweep.rounding import is_rounding


class Attention(nn.Module):
    """Attention, in float32 alone if ``narrow``: in float64 it is something else, or an error."""

    def __init__(self, narrow: str) -> None:
        super().__init__()
        self.project, self.narrow = nn.Linear(8, 8), narrow

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).view(2, 2, -1, 8)
        if self.narrow and q.dtype == torch.float64:
            if self.narrow == "refuses":
                raise TypeError("float64")
            return q.sum()
        return F.softmax(q @ q.transpose(-1, -2) * 0.5, dim=-1) @ q


def scaled(error: float) -> Rule:
    """The rule for attention with a scale that is off by ``error``."""

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made: Any = SDPA.build(graph, inputs, scalars)
        made.kwargs = {**made.kwargs, "scale": made.kwargs["scale"] * (1 + error)}
        return made

    return replace(SDPA, build=build)


@pytest.mark.unwritable("a rule of the test stands in for the registered one")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("narrow", ["", "differs", "refuses"])
@pytest.mark.parametrize(("error", "rounds"), [(0.0, True), (1e-2, False)])
def test_a_scale_that_is_off_is_not_rounding(error: float, rounds: bool, narrow: str) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Attention(narrow)

    with fused.backend("reference"):
        assert is_rounding(build, [{"x": torch.randn(4, 6, 8)}], 1, [scaled(error)]) == rounds
