"""Numbers that a forward draws outside of torch: drawn by the graph at each call, as by the forward."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from random import uniform

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.capture.effects.effects import drawn_number
from schedule.runtime.scheduled import FallbackWarning, state_of
from tests.capture.running import schedule_all
from tests.small import Mlp


class Layers(nn.Module):
    """Layers with LayerDrop, which draws in evaluation too, as in MusicGen."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop, self.layers = layerdrop, nn.ModuleList([Mlp(8), Mlp(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            probability = random.uniform(0, 1)
            if self.training and (probability < self.layerdrop):
                continue
            x = layer(x)
        return x


class Scaled(nn.Module):
    """Numbers of Python and numpy, used as numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x * uniform(1, 2)).relu() + random.randint(1, 5) - random.random()
        return x * np.random.uniform(0, 1) + np.random.rand()


def called(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, object]:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        results = [model(x) for _ in range(4)]
    return torch.stack(results), torch.rand(2), (random.getstate(), np.random.rand())


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for x in (torch.randn(2, 8), torch.randn(3, 8)):
        for training in (False, True):
            ours, theirs = called(model.train(training), x), called(twin.train(training), x)
            torch.testing.assert_close(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1]) and ours[2] == theirs[2]


@pytest.mark.parametrize("make", [lambda: Layers(0.0), lambda: Layers(0.5), Scaled], ids=["never", "half", "numbers"])
def test_numbers_are_drawn_at_each_call(make):
    model = make()
    twin = copy.deepcopy(model)
    for made in schedule_all(model, torch.randn(2, 8)):
        assert any(node.target is drawn_number for node in made.graph.nodes)
    assert_alike(model, twin)
    assert bool(state_of(model).fallbacks) == (getattr(model, "layerdrop", 0) > 0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(other, twin)


def test_layers_around_the_numbers_are_rewritten_and_proved():
    model = Layers(0.0)
    twin, x = copy.deepcopy(model), torch.randn(2, 8)
    sch = schedule.create_schedule(model, x)
    assert sch.optimize(cost_guard=False).applied and sch.trace()
    assert any(node.target is drawn_number for node in sch.graph.nodes)
    schedule.verify(sch, x)
    assert_alike(model, twin)


def test_another_function_under_its_name_is_noticed(monkeypatch):
    model = Layers(0.0)
    schedule_all(model, torch.randn(2, 8))
    drawn = []
    monkeypatch.setattr(random, "uniform", lambda low, high: drawn.append(low) or 0.5)
    model(torch.randn(2, 8))
    assert len(drawn) == 2
