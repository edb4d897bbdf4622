"""Layers in a graph as patterns see them: convolutions, subclasses, and modules that only pass their argument on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.patterns import scalar
from tests.beyond.timm import DropPath


def bias_relu(x: Any, bias: Any) -> Any:
    return F.relu(x + bias)


def clamped(x: Tensor, bias: Tensor) -> Tensor:
    return torch.clamp(x + bias, min=0)


class Passing(nn.Module):
    """A sum, something that passes it on, and an activation."""

    def __init__(self, between: nn.Module, used_twice: bool = False) -> None:
        super().__init__()
        self.between, self.used_twice, self.bias = between, used_twice, nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.between(x + self.bias)
        return F.relu(h) + h if self.used_twice else F.relu(h)


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return +x


class Doubling(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("between", [nn.Identity(), DropPath(0.0), Positive(), nn.Sequential()], ids=str)
def test_what_passes_its_argument_on_is_seen_through(between: nn.Module) -> None:
    model = Passing(between)
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, torch.randn(2, 8))
    sch.replace(clamped, sch.find(bias_relu, expect=1))
    for x in (torch.randn(2, 8), torch.randn(5, 8)):
        torch.testing.assert_close(model(x), twin(x))
    sch.undo()
    assert type(model) is Passing


def hooked() -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, out: out * 2)
    return module


@pytest.mark.parametrize("make", [hooked, Doubling, lambda: DropPath(0.5), lambda: nn.Dropout(0.5)])
def test_what_does_more_is_not(make: Any) -> None:
    sch = schedule.create_schedule(Passing(make()).train(), torch.randn(2, 8))
    in_training = [site for match in sch.find(bias_relu) for site in match.sites if site.found_in.training]
    assert not in_training


def test_a_value_passed_on_to_something_else_too() -> None:
    sch = schedule.create_schedule(Passing(nn.Identity(), used_twice=True), torch.randn(2, 8))
    assert sch.find(bias_relu) == []


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_a_change_of_what_was_seen_through() -> None:
    model = Passing(DropPath(0.0)).train()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, torch.randn(2, 8))
    sch.replace(clamped, sch.find(bias_relu, expect=1))
    x = torch.randn(16, 8)
    for change in (0.5, 0.0):
        for each in (model, twin):
            each.between.drop_prob = change
        torch.manual_seed(0)
        ours = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, twin(x))
    for each in (model, twin):
        each.between = Doubling()
    torch.testing.assert_close(model(x), twin(x))


class Small(nn.Conv2d):
    """A subclass with nothing but a constructor."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3, stride=2, padding=1)


class Halving(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def convolved(x: Any, weight: Any, bias: Any) -> Any:
    return F.relu(F.conv2d(x, weight, bias, stride=2, padding=[1, 1], groups=scalar("groups")))


def convolved_and_clamped(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    return F.conv2d(x, weight, bias, 2, 1, groups=groups).clamp(min=0)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), 1),
        (lambda: nn.Conv2d(3, 4, 3, stride=(2, 2), padding=(1, 1)), 1),
        (Small, 1),
        (Halving, 0),
        (lambda: nn.Conv2d(3, 4, 3, stride=1, padding=1), 0),
        (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="circular"), 0),
    ],
)
def test_convolutions(make: Any, found: int) -> None:
    model = nn.Sequential(make(), nn.ReLU())
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, torch.randn(2, 3, 6, 6))
    matches = sch.find(convolved, expect=found)
    if matches:
        sch.replace(convolved_and_clamped, matches)
    x = torch.randn(3, 3, 8, 6)
    torch.testing.assert_close(model(x), twin(x))
    if matches:
        assert list(model.state_dict()) == list(twin.state_dict())
        nn.init.ones_(model[0].weight), nn.init.ones_(twin[0].weight)
        torch.testing.assert_close(model(x), twin(x))


def added(h: Any, x: Any) -> Any:
    return F.relu(h * 2 + x)


def added_and_clamped(h: Tensor, x: Tensor) -> Tensor:
    return torch.clamp(h * 2 + x, min=0)


def test_an_in_place_sum_is_its_first_operand() -> None:
    """The second one is not changed by what is done to the sum."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x) * 2
            h += x
            return F.relu(h, inplace=True) + x

    model = Model()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, torch.randn(2, 8))
    sch.replace(added_and_clamped, sch.find(added, expect=1))
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), twin(x))
