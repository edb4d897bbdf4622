"""Summands and factors that broadcast are no construct of a rule: a fused op would refuse them when it runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule


class Gated(nn.Module):
    def forward(self, x, other):
        return F.silu(x) * other


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, other):
        return self.norm(x + other)


class Scaled(Summed):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)


class Dropped(nn.Module):
    def forward(self, x, other):
        return other + F.dropout(x, 0.1, self.training)


class LayerScaled(nn.Module):
    def forward(self, x, other):
        return other + x * other[0, 0]


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (Gated(), "gated_silu"),
        (Summed(), "add_layer_norm"),
        (Scaled(), "add_rms_norm_torch"),
        (Dropped(), "bias_dropout_add"),
        (LayerScaled(), "gated_residual"),
    ],
)
def test_what_broadcasts_is_not_fused(module: nn.Module, rule: str) -> None:
    x, other = torch.randn(4, 6, 8), torch.randn(1, 6, 8)
    sch = schedule.create_schedule(module, (x, other))
    before = module.eval()(x, other)
    assert not sch.find(rule)
    report = schedule.optimize(sch, rules=[rule], cost_guard=False)
    assert not report.applied
    assert torch.equal(module(x, other), before)
