"""In-place changes of a parameter through every kind of view, between the parts of a match that reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda b: b.detach(),
    "data": lambda b: b.data,
    "T": lambda b: b.detach().view(2, 4).T,
    "mT": lambda b: b.detach().view(1, 8).mT,
    "H": lambda b: b.detach().view(1, 8).H,
    "real": lambda b: b.detach().real,
    "einsum": lambda b: torch.einsum("i->i", b.detach()),
    "einsum of dimensions": lambda b: torch.einsum("ij->ji", b.detach().view(2, 4)),
    "slice": lambda b: b.detach()[2:],
    "unfold": lambda b: b.detach().unfold(0, 2, 2),
    "chunk": lambda b: b.detach().chunk(2)[0],
    "to": lambda b: b.detach().to(torch.float32),
    "contiguous": lambda b: b.detach().contiguous(),
    "dropout": lambda b: F.dropout(b.detach(), 0.5, False),
    "operator": lambda b: torch.ops.aten.view(b.detach(), [8]),
    "list": lambda b: [b.detach()][0],
}


class Layer(nn.Module):
    """A Linear whose bias changes between its call and the activation, under its own name or another."""

    def __init__(self, view: Callable[[Tensor], Tensor], tied: bool) -> None:
        super().__init__()
        self.fc, self.act, self.view = nn.Linear(8, 8), nn.GELU(), view
        self.same = self.fc.bias if tied else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.view(self.fc.bias if self.same is None else self.same).add_(1.0)
        return self.act(h)


class Plain(nn.Module):
    """A tensor that is neither a parameter nor a buffer, and a view of it under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8, bias=False), nn.GELU()
        self.offset = torch.randn(8)
        self.rows = self.offset.view(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + self.offset
        self.rows.add_(1.0)
        return self.act(h) * self.offset


class Added(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        offset = self.offset
        self.rows.mul_(2.0)
        return self.act(h + offset)


class Held(Plain):
    """The tensor and its view are found in a list and in an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(rows=[self.rows], offset=self.offset)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + self.offset
        self.held.rows[0].add_(1.0)
        return self.act(h) * self.offset


class HeldTwice(Held):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + self.held.offset
        self.held.rows[0].add_(1.0)
        return self.act(h) * self.held.offset


@pytest.mark.parametrize("make", [Plain, Added, Held, HeldTwice])
def test_a_view_of_a_plain_tensor(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    schedule.optimize(model, x, rules="all", cost_guard=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), twin(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_bias_changed_between(view: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = Layer(VIEWS[view], tied)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    schedule.optimize(model, x, rules="all", cost_guard=False)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), twin(x))
