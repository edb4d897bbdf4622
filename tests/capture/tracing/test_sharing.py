"""Like modules are traced once; unlike ones never share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize


class Layer(nn.Module):
    def __init__(self, index: int, width: int = 4, act=F.relu, reads_index: bool = False):
        super().__init__()
        self.index, self.reads_index, self.act = index, reads_index, act
        self.linear = nn.Linear(4, width)

    def forward(self, x):
        y = self.act(self.linear(x)).sum(-1, keepdim=True) + x
        return y * self.index if self.reads_index else y


def graphs(*layers):
    root = nn.Sequential(*layers)
    recording = record(root, torch.randn(2, 4))
    return [specialize(layer, Layer.forward, recording.calls[layer][0], recording, False).graph for layer in layers]


def test_like_layers_share():
    first, second = graphs(Layer(0), Layer(1))
    assert first is second


def test_a_setting_that_is_read_and_differs_keeps_them_apart():
    first, second = graphs(Layer(1, reads_index=True), Layer(2, reads_index=True))
    assert first is not second


def test_other_widths_functions_and_dtypes_keep_them_apart():
    first, wide, other = graphs(Layer(0), Layer(1, width=6), Layer(2, act=F.gelu))
    assert first is not wide and first is not other and wide is not other
