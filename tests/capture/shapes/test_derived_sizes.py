"""Branches on sizes that no rule follows are decided beforehand too, by torch's shape functions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedule.util.errors import TraceError
from tests.capture.shapes.test_windows import Halving, assert_same_as, traced

DERIVED = {
    "matrix product": Halving(part=lambda self, x: x @ x.transpose(2, 3)),
    "windows": Halving(part=lambda self, x: x.unfold(2, 3, 2)),
    "shuffled": Halving(part=lambda self, x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2)),
    "stretched": Halving(nn.Upsample(scale_factor=2)),
    "transposed convolution": Halving(nn.ConvTranspose2d(2, 4, 3, stride=2)),
    "item of several": Halving(part=lambda self, x: x[..., None].topk(2, 2)[0]),
    "a number of the graph": Halving(part=lambda self, x: x.repeat(1, 2, x.shape[2], 1)),
}


@pytest.mark.parametrize("module", DERIVED.values(), ids=DERIVED)
def test_a_branch_on_a_derived_size(module):
    module = copy.deepcopy(module)
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 8, 9))
    for rows, height, width in ((2, 8, 9), (3, 8, 9), (2, 7, 9), (2, 9, 8), (2, 4, 2)):
        assert_same_as(twin, module, torch.randn(rows, 2, height, width))


def test_a_dimension_of_one_element_is_dropped():
    module = Halving(part=lambda self, x: x.squeeze(2).reshape(x.shape[0], 2, -1, 3))
    twin = copy.deepcopy(module)
    traced(module, torch.randn(5, 2, 4, 3))
    for height in (4, 3, 1):
        assert_same_as(twin, module, torch.randn(5, 2, height, 3))


def test_a_setting_of_a_module_that_is_changed_later_is_seen():
    module = Halving(nn.Upsample(scale_factor=2))
    twin = copy.deepcopy(module)
    traced(module, torch.randn(2, 2, 9, 9))
    for each in (module, twin):
        each.layers[0].scale_factor = 3
    assert_same_as(twin, module, torch.randn(2, 2, 9, 9))


class Early(Halving):
    def forward(self, x):
        y = self.layers[0](x)
        return y * 2 if y.shape[2] % 2 == 0 else y


def test_torch_is_asked_only_where_a_check_would_come_too_late(monkeypatch):
    asked = []
    monkeypatch.setattr("schedule.capture.shapes.symbolic_sizes.derived_size", lambda *args: asked.append(args))
    traced(Early(nn.Upsample(scale_factor=2)), torch.randn(2, 2, 8, 9))
    assert not asked


class Counting(nn.Module):
    """Branches on how many values data pick, after it has changed a buffer."""

    def __init__(self, picked):
        super().__init__()
        self.picked = picked
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2 if self.picked(x)[0].shape[0] > 1 else x


@pytest.mark.parametrize(
    "picked", [lambda x: x.nonzero(as_tuple=True), lambda x: torch.unique(x, return_counts=True)]
)  # the first of several results: its size is derived with that of the call, which only data know
def test_a_branch_on_a_size_that_data_decide_is_refused(picked):
    with pytest.raises(TraceError, match="only known after"):
        traced(Counting(picked), torch.randn(3, 4))
