"""Slapo's tests of matching (``test_subgraph.py``, ``test_utils.py``), with ``find``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule import call_module


class Residual(nn.Module):
    """A convolution, and its activation added to it."""

    act: Callable[[Tensor], Tensor]

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(2, 2, 1), activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.act(y) + y


class Convolutions(nn.Module):
    """A chain in a container, and layers of two names that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.fc, self.relu = nn.Linear(16, 8), nn.ReLU()
        self.fc1, self.relu1 = nn.Linear(8, 8), nn.ReLU()
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x.reshape(x.size(0), -1)
        return self.fc2(self.relu1(self.fc1(self.relu(self.fc(x)))))


class Projections(nn.Module):
    """Three projections, each permuted by a method of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def heads(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
        return F.softmax(q * k, dim=-1) * v


class Joined(nn.Module):
    """Two inputs, each through a layer of its own, that meet in a function."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.meet = nn.Linear(4, 4), nn.Linear(4, 4), meet

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.meet(self.fc1(x), self.fc2(y))


class Block(nn.Module):
    """What a pattern with a batch norm of its own looks for."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(4), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x))


def consumed(model: nn.Module, inputs: Any, pattern: Any, path: str = "", closed: bool = True) -> list[str]:
    """The operations of each match: of a function its name, of a module that stays a call its class."""
    sch = schedule.create_schedule(model, inputs)
    node = sch[path] if path else sch
    modules = {name: type(module).__name__ for name, module in node.module.named_modules()}
    return [
        " ".join(modules.get(str(each.target), getattr(each.target, "__name__", "")) for each in match.nodes)
        for match in node.find(pattern, closed=closed)
    ]


def relu_plus(x: Tensor) -> Tensor:
    return F.relu(x) + x


def called_plus(x: Tensor) -> Tensor:
    return call_module("act")(x) + x


IMAGE = torch.ones(1, 2, 3, 3)


def test_a_function_is_found_as_it_is_written() -> None:
    assert consumed(Residual(F.relu), IMAGE, relu_plus) == ["relu add"]


def test_a_function_is_found_where_a_module_is_called() -> None:
    assert consumed(Residual(nn.ReLU()), IMAGE, relu_plus) == ["relu add"]


def test_a_module_is_found_by_its_name() -> None:
    assert consumed(Residual(nn.ReLU()), IMAGE, called_plus) == ["ReLU add"]


DIGITS = torch.ones(2, 1, 6, 6)


@pytest.mark.parametrize("activation", [nn.ReLU(), F.relu])
def test_a_pattern_is_a_module_with_layers_of_its_own(activation: Any) -> None:
    """One intention each: its activation is a module, or a function."""
    assert consumed(Convolutions(), DIGITS, Block(activation), "stem") == ["BatchNorm2d relu"]


class Linears(nn.Module):
    """A pattern of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_pattern_of_layers_is_found_at_any_width() -> None:
    assert consumed(Convolutions(), DIGITS, Linears()) == ["linear add relu"] * 2


PAIR = (torch.ones(2, 4), torch.ones(2, 4))


def two_paths(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x + y)


def test_two_paths_meet_in_one_pattern() -> None:
    assert consumed(Joined(two_paths), PAIR, two_paths) == ["add relu"]


def tree(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x + y) * (y - z)


class Tree(nn.Module):
    """An expression whose inputs are used twice."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return tree(x, y, z)


def test_a_tree_of_operators_shares_an_input() -> None:
    assert consumed(Tree(), tuple(torch.ones(3, 2)), tree) == ["add sub mul"]


def projected(x: Tensor) -> Tensor:
    return call_module(r"[qkv]_proj")(x).permute(0, 2, 1, 3)


def test_parallel_projections_are_found_by_one_expression() -> None:
    """In the order of the code, each with what its own method does to it."""
    sch = schedule.create_schedule(Projections(), torch.ones(1, 2, 3, 8))
    found = sch.find(projected)
    names = [[str(node.target) for node in match.nodes] for match in found]
    assert names == [[f"{name}_proj", "permute"] for name in "qkv"]


def called_fc(x: Tensor) -> Tensor:
    return F.relu(call_module(r"fc1?")(x))


class ByExpression(nn.Module):
    """A pattern as a module, which finds layers by an expression of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(call_module(r"fc1?")(x))


@pytest.mark.parametrize("pattern", [ByExpression(), called_fc])
def test_an_expression_of_names_is_part_of_a_pattern(pattern: Any) -> None:
    """One intention each: the pattern is a module, or a function."""
    assert consumed(Convolutions(), DIGITS, pattern) == ["Linear relu"] * 2


def diamond(x: Tensor, y: Tensor) -> Tensor:
    a = x + y
    return a * 2 + a * 3


def with_more_uses(x: Tensor, y: Tensor) -> Tensor:
    a = x + y
    return a * 5 + (a * 2 + a * 3)


def test_a_diamond_is_found() -> None:
    """Both operations in the middle read one value, not two that are computed alike."""
    assert consumed(Joined(diamond), PAIR, diamond) == ["add mul mul add"]
    assert consumed(Joined(lambda x, y: (x + y) * 2 + (x - y) * 3), PAIR, diamond) == []


def test_a_diamond_is_found_beside_other_uses_of_its_tip() -> None:
    """It is no match to replace, and found when such are asked for."""
    assert consumed(Joined(with_more_uses), PAIR, diamond) == []
    assert consumed(Joined(with_more_uses), PAIR, diamond, closed=False) == ["add mul mul add"]


def test_every_module_has_a_schedule_by_its_path() -> None:
    found = dict(schedule.create_schedule(Convolutions()).named_schedules())
    assert {"stem", "stem.0", "stem.2", "fc", "relu", "fc1", "fc2"} <= found.keys()
    assert found["stem.0"].module is found[""].module.stem[0]
