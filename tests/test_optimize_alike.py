"""``optimize`` on modules with one graph: they share a search, and keep what differs in the layers that they call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import schedule


class Convolved(nn.Module):
    """A convolution of a width-keeping size, and an activation behind it."""

    def __init__(self, width: int = 1, act: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=width, dilation=width, **options)
        self.norm, self.act = nn.BatchNorm2d(4), act or nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x.relu())))


def _hooked() -> nn.Module:
    layer = Convolved()
    layer.conv.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@pytest.mark.parametrize("rules", ["all", "inference"])
@pytest.mark.parametrize(
    "other",
    [
        lambda: Convolved(2),
        lambda: Convolved(groups=2),
        lambda: Convolved(padding_mode="circular"),
        lambda: Convolved(bias=False),
        lambda: Convolved(act=nn.ReLU(inplace=True)),
        lambda: Convolved(act=nn.Dropout()),
        _hooked,
    ],
    ids=["dilation", "groups", "padding mode", "no bias", "in place", "other activation", "hook"],
)
def test_layers_with_one_graph_and_other_settings_keep_them(other: Any, rules: str) -> None:
    """Their graphs call the same submodules; what those compute is in none of them."""
    for blocks in ((Convolved(), other()), (other(), Convolved())):
        model = nn.Sequential(*blocks).double().eval()
        x = torch.linspace(-2, 2, 2 * 4 * 36, dtype=torch.float64).reshape(2, 4, 6, 6)
        expected = model(x)
        schedule.optimize(model, x, rules=rules, cost_guard=False)
        torch.testing.assert_close(model(x), expected)
