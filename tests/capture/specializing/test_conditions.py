"""What a graph took for granted is guarded: values, the number of pieces, attributes that stay what they are."""

from __future__ import annotations

import copy
import enum
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from schedule.runtime.scheduled import FallbackWarning, state_of
from tests.capture.running import assert_same, schedule_all


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Filling(nn.Module):
    def __init__(self):
        super().__init__()
        self.fill = float("-inf")

    def forward(self, x, level, ceiling):
        return x.masked_fill(x < 0, self.fill).clamp(max=ceiling) * (2 if level is Level.HIGH else 3)


def test_enums_and_infinities_are_guarded_by_value():
    module = Filling()
    twin = copy.deepcopy(module)
    schedule_all(module, (torch.randn(2, 3), Level.HIGH, float("inf")))
    x = torch.randn(4, 2)
    assert_same(module(x, Level.HIGH, float("inf")), twin(x, Level.HIGH, float("inf")))
    assert state_of(module).fallbacks == 0
    with pytest.warns(FallbackWarning):
        assert_same(module(x, Level.LOW, 0.5), twin(x, Level.LOW, 0.5))


@pytest.mark.parametrize(
    "pieces",
    [
        lambda x: list(x),
        lambda x: x.unbind(1),
        lambda x: x.split(2),
        lambda x: torch.split(x, x.shape[1] // 2, dim=1),
        lambda x: torch.chunk(x, chunks=3),
        lambda x: x.chunk(4, dim=-1),
    ],
    ids=["iter", "unbind", "split", "torch.split", "torch.chunk", "chunk"],
)
def test_a_graph_holds_for_the_number_of_pieces_it_takes(pieces):
    class Adding(nn.Module):
        def forward(self, x):
            return torch.stack([piece.sum() for piece in pieces(x)])

    module = Adding()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(3, 4))
    for shape in ((3, 4), (5, 4), (3, 7), (1, 1 + 1), (8, 9)):
        x = torch.randn(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = module(x)
        assert_same(ours, twin(x))
        assert state_of(module).fallbacks < 5


def test_the_number_of_pieces_leaves_other_sizes_open():
    class Halving(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2, dim=-1)
            return a * b

    module = Halving()
    schedule_all(module, torch.randn(3, 4))
    assert module(torch.randn(5, 8)).shape == (5, 4) and state_of(module).fallbacks == 0


class Clamping(nn.Module):
    def __init__(self):
        super().__init__()
        self.window = 4

    def forward(self, x):
        if x.shape[0] <= self.window:
            self.window = x.shape[0]
        return x * self.window


def test_assigning_what_an_attribute_is_anyway_is_no_change():
    module = Clamping()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(3, 4))
    module(torch.randn(3, 4)), twin(torch.randn(3, 4))  # the first call sets the window to 3
    assert_same(module(torch.ones(3, 5)), twin(torch.ones(3, 5)))
    assert state_of(module).fallbacks == 0
    for rows in (5, 2, 3, 2, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert_same(module(torch.ones(rows, 2)), twin(torch.ones(rows, 2)))
        assert type(module.window) is int and module.window == twin.window
    assert state_of(module).fallbacks == 5


class Scaling(nn.Module):
    def forward(self, x):
        return x * np.float32(0.5) + torch.full(tuple(np.array([2, 3])), 1.0).sum() * np.prod((2, 3))


def test_numbers_of_numpy_are_numbers():
    module = Scaling()
    twin = copy.deepcopy(module)
    schedule_all(module, torch.randn(3, 4))
    x = torch.randn(5, 4)
    assert_same(module(x), twin(x))
    assert state_of(module).fallbacks == 0
