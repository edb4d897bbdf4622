"""Bias, dropout and residual sum fused by hand: in evaluation too, where ``optimize`` has nothing to gain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fused
import schedule


class Block(nn.Module):
    """A projection, dropout, and for ``bias_dropout_add`` what goes around them."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.out, self.drop, self.around = nn.Linear(8, 8), nn.Dropout(0.3), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.out(x))
        return x + y if self.around else y * 2


@pytest.mark.parametrize(("rule", "around"), [("bias_dropout_add", True), ("bias_dropout", False)])
def test_nothing_is_dropped_in_evaluation(rule: str, around: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    model = nn.Sequential(Block(around))
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, x)
    with fused.backend("reference"):
        sch["0"].fuse(sch["0"].find(rule, expect=1))
        report = schedule.equivalent(twin, model, x, steps=0)
        assert report.equal, str(report)
        assert torch.allclose(model.eval()(x), twin.eval()(x))
