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


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min, -10000, -1.5])
def test_rows_hidden_whole_are_as_in_eager(fill):
    module, q = Hiding(fill), torch.randn(2, 2, 4, 4)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[1] = hidden[2, 1:] = True
    twin, given = copy.deepcopy(module).eval(), q.clone().requires_grad_()
    with fused.backend("reference"):
        schedule.optimize(module, (q, q, hidden), cost_guard=False)
        code = schedule.create_schedule(module).graph.python_code("self").src
        assert "scaled_masked_softmax" in code and "masked_fill" not in code
        found, expected = module.eval()(given, q, hidden), twin(given, q, hidden)
    torch.testing.assert_close(found, expected, equal_nan=True)
    g = torch.randn_like(expected)
    gradients = [torch.autograd.grad(result, given, g)[0] for result in (found, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True)
