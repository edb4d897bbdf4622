"""A projection that is split into gate and up is passed whole, whichever half is the gate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from fused.gated import gated_halves


class Halves(nn.Module):
    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.proj, self.gate_first = nn.Linear(8, 32), gate_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.proj(x).chunk(2, dim=-1)
        return F.gelu(first) * second if self.gate_first else first * F.gelu(second)


@pytest.mark.parametrize("gate_first", [True, False])
def test_the_projection_is_passed_whole(gate_first: bool) -> None:
    sch = schedule.create_schedule(Halves(gate_first), (torch.randn(4, 8),))
    assert schedule.optimize(sch, rules="default", cost_guard=False).applied == {"gated_gelu": 1}
    (node,) = [node for node in sch.graph.nodes if node.target is gated_halves]
    assert node.args[0].op == "call_module"
    assert node.kwargs == ({} if gate_first else {"gate_first": False})
