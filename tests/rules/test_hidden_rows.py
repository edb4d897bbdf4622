"""A row of scores that is hidden whole becomes what eager makes of it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import fused
import schedule


class Hiding(nn.Module):
    def __init__(self, fill: float):
        super().__init__()
        self.fill = fill

    def forward(self, q, k, hidden):
        scores = torch.matmul(q, k.transpose(-1, -2)) * 0.5
        return nn.functional.dropout(scores.masked_fill(hidden, self.fill).softmax(-1), 0.1, self.training)


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_rows_hidden_whole_are_as_in_eager(fill):
    module, q = Hiding(fill), torch.randn(2, 2, 4, 4)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[1] = hidden[2, 1:] = True
    twin = copy.deepcopy(module).eval()
    with fused.backend("reference"):
        schedule.optimize(module, (q, q, hidden), cost_guard=False)
        assert "scaled_masked_softmax" in schedule.create_schedule(module).graph.python_code("self").src
        found = module.eval()(q, q, hidden)
    torch.testing.assert_close(found, twin(q, q, hidden), equal_nan=True)
