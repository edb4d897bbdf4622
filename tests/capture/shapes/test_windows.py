"""A branch on the size of what a convolution or pooling returns is decided before the graph runs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from schedule.util.errors import TraceError


class Halving(nn.Module):
    """Asks for sizes of what layers or a function return when it has changed a buffer already."""

    def __init__(self, *layers, part=lambda self, x: x):
        super().__init__()
        self.layers, self.part = nn.ModuleList(layers), part
        self.weight = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        y = self.part(self, x)
        y = y * 2 if y.shape[2] % 2 == 0 else y + 1
        return y.abs() if y.shape[1] > 3 and y.shape[3] > 2 else y


LAYERS = {
    "convolution": [nn.Conv2d(2, 4, 3, stride=2, padding=1)],
    "dilated": [nn.Conv2d(2, 4, (1, 3), dilation=2, padding="valid")],
    "between norms": [nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Hardswish(), nn.MaxPool2d(3, 2, 1)],
    "maximum, rounded up": [nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)],
    "average, rounded up": [nn.AvgPool2d((2, 3), ceil_mode=True)],
}
FUNCTIONS = {
    "function": lambda self, x: torch.conv2d(x, self.weight, stride=(2, 1), padding=1),
    "pooling function": lambda self, x: F.avg_pool2d(F.batch_norm(x, None, None, training=True), 2, ceil_mode=True),
    "stacked": lambda self, x: torch.stack([torch.conv2d(x, self.weight), torch.conv2d(x, self.weight)], 1).sum(dim=1),
}


def traced(module, x):
    recording = record(module, (x,))
    install(module, [specialize(module, type(module).forward, recording.calls[module][0], recording, True)])


def assert_same_as(twin, module, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.testing.assert_close(module(x), twin(x), rtol=0, atol=0)
    assert torch.equal(module.calls, twin.calls)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_branch_on_the_size_of_what_a_layer_returns(layers):
    assert_decided_beforehand(Halving(*copy.deepcopy(layers)))


@pytest.mark.parametrize("part", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_branch_on_the_size_of_what_a_function_returns(part):
    assert_decided_beforehand(Halving(part=part))


def assert_decided_beforehand(module):
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 8, 9))
    for height in range(5, 13):
        for width in (5, 9):
            assert_same_as(twin, module, torch.randn(2, 2, height, width))
    assert state_of(module).fallbacks < 16


def test_a_setting_that_is_changed_later_is_seen():
    module = Halving(nn.Conv2d(2, 4, 3, stride=2))
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 9, 9))
    for each in (module, twin):
        each.layers[0].stride = (1, 1)
    assert_same_as(twin, module, torch.randn(2, 2, 9, 9))


def test_a_weight_of_another_size_is_seen():
    module = Halving(nn.Conv2d(2, 4, 3))
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 9, 9))
    for each in (module, twin):
        torch.manual_seed(0)
        each.layers[0].weight, each.layers[0].bias = nn.Parameter(torch.randn(3, 2, 3, 3)), None
    assert_same_as(twin, module, torch.randn(2, 2, 9, 9))


class Growing(nn.Conv2d):
    """Returns other sizes than the layer it is made from."""

    def _conv_forward(self, x, weight, bias):
        return F.pad(super()._conv_forward(x, weight, bias), (0, 1))


def test_a_layer_with_a_method_of_its_own_is_not_taken_for_a_convolution():
    with pytest.raises(TraceError, match="only known after"):
        traced(Halving(Growing(2, 4, 3)), torch.randn(2, 2, 9, 9))


REDUCED = {
    "variance": lambda self, x: x.var(1, True)[:, None].expand(-1, 4, -1, -1),
    "norm": lambda self, x: x.norm(2, 1)[:, None] + x,
    "rows": lambda self, x: x.var(0, False)[None],
}


@pytest.mark.parametrize("part", REDUCED.values(), ids=REDUCED)
def test_the_second_argument_of_a_reduction(part):
    module = Halving(part=part)
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 8, 9))
    for size in (2, 3, 4, 5):
        assert_same_as(twin, module, torch.randn(2, 2, size, 9))
        assert_same_as(twin, module, torch.randn(2, size, 8, 9))
