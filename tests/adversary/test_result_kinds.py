"""Results of submodules, and what objects among the arguments hold, of another kind than recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import ScheduleError


class Child(nn.Module):
    """A submodule that returns another kind of result by a flag."""

    def __init__(self, other: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.other, self.changed = nn.Linear(4, 4), other, False

    def forward(self, x: Tensor) -> Any:
        return self.other(x) if self.changed else self.proj(x)


class Asking(nn.Module):
    """A forward that asks about the result of its child, and has something to rewrite."""

    def __init__(self, other: Callable[[Tensor], Any], ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.child, self.ask = Child(other), ask
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return nn.functional.gelu(x + self.bias) * self.ask(y)


RESULTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "rank": (lambda x: x[None], lambda y: y.dim()),
    "rank by shape": (lambda x: x[None], lambda y: len(y.shape)),
    "dtype": (lambda x: x.double(), lambda y: 2 if y.dtype == torch.float32 else 3),
    "dtype of what is computed": (lambda x: x.half(), lambda y: (y * 0 + 1).dtype.itemsize),
    "precision": (lambda x: x.half(), lambda y: torch.finfo(y.dtype).bits),
    "floating": (lambda x: x.int(), lambda y: 2 if y.is_floating_point() else 3),
    "device": (lambda x: x.to("meta"), lambda y: 2 if y.device.type == "cpu" else 3),
    "layout": (lambda x: x.to_sparse(), lambda y: 2 if y.layout == torch.strided else 3),
    "None": (lambda x: None, lambda y: 2 if y is None else 3),
    "something": (lambda x: None, lambda y: 2 if y is None else 3),
    "a tuple": (lambda x: (x, x), lambda y: 2 if isinstance(y, tuple) else 3),
    "size": (lambda x: x[:2], lambda y: y.shape[0]),
    "order in memory": (lambda x: x.t(), lambda y: 2 if y.is_contiguous() else 3),
    "gradient": (lambda x: x.detach(), lambda y: 2 if y.requires_grad else 3),
}


@pytest.mark.parametrize("name", RESULTS)
def test_another_kind_of_result_is_noticed(name: str) -> None:
    other, ask = RESULTS[name]
    original, x = Asking(other, ask), torch.randn(3, 4)
    original.child.changed = name == "something"
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, x, cost_guard=False)
    torch.testing.assert_close(scheduled(x), original(x))
    scheduled.child.changed = original.child.changed = name != "something"
    expected = original(x)
    try:
        actual = scheduled(x)
    except ScheduleError as error:
        assert "the result of child is" in str(error)
    else:
        torch.testing.assert_close(actual, expected)
    install(scheduled, None)
    torch.testing.assert_close(scheduled(x), expected)


def test_results_that_nothing_is_asked_about_are_not_checked() -> None:
    original = Asking(lambda x: x.double(), lambda y: y)
    scheduled, x = copy.deepcopy(original), torch.randn(3, 4)
    schedule.optimize(scheduled, x, cost_guard=False)
    scheduled.child.changed = original.child.changed = True
    torch.testing.assert_close(scheduled(x), original(x), atol=1e-5, rtol=1e-5)
    state = state_of(scheduled)
    assert state is not None and state.fallbacks == 0


class Held:
    """An object of a user's, passed as an argument."""

    kind = "a"

    def __init__(self) -> None:
        self.function, self.name, self.items, self.nothing = torch.relu, "x", [1.0, 2.0], None
        self.table, self.tensor, self.inner = {"k": "v"}, torch.ones(1), None

    def find(self, key: str) -> Any:
        return self.table.get(key)

    def text(self) -> str:
        return self.name

    @property
    def shown(self) -> str:
        return self.name


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "function": (lambda h: h.function(torch.ones(1)), lambda h: setattr(h, "function", torch.neg)),
    "text": (lambda h: 2 if h.name == "x" else 3, lambda h: setattr(h, "name", "y")),
    "text of a method": (lambda h: 2 if h.text() == "x" else 3, lambda h: setattr(h, "name", "y")),
    "text of a property": (lambda h: 2 if h.shown == "x" else 3, lambda h: setattr(h, "name", "y")),
    "method replaced": (lambda h: 2 if h.text() == "x" else 3, lambda h: setattr(h, "text", lambda: "z")),
    "nothing found": (lambda h: 2 if h.find("z") is None else 3, lambda h: h.table.update(z=1)),
    "something found": (lambda h: 2 if h.find("k") is None else 3, lambda h: h.table.clear()),
    "length": (lambda h: len(h.items), lambda h: h.items.append(1.0)),
    "sum": (lambda h: sum(h.items), lambda h: h.items.append(1.0)),
    "item": (lambda h: h.items[0], lambda h: h.items.insert(0, 5.0)),
    "None": (lambda h: 2 if h.nothing is None else 3, lambda h: setattr(h, "nothing", 1)),
    "no such attribute": (lambda h: getattr(h, "missing", 2), lambda h: setattr(h, "missing", 3)),
    "hasattr": (lambda h: 2 if hasattr(h, "missing") else 3, lambda h: setattr(h, "missing", 3)),
    "entry": (lambda h: 2 if h.table["k"] == "v" else 3, lambda h: h.table.update(k="w")),
    "entries": (lambda h: len(h.table), lambda h: h.table.update(z="w")),
    "keys": (lambda h: sum(len(key) for key in h.table), lambda h: h.table.update(zz="w")),
    "values": (lambda h: sum(len(value) for value in h.table.values()), lambda h: h.table.update(zz="w")),
    "of the class": (lambda h: 2 if h.kind == "a" else 3, lambda h: setattr(h, "kind", "b")),
    "rank": (lambda h: h.tensor * h.tensor.dim(), lambda h: setattr(h, "tensor", torch.ones(3, 4))),
    "dtype": (
        lambda h: 2 if h.tensor.dtype == torch.float32 else 3,
        lambda h: setattr(h, "tensor", torch.ones(1).int()),
    ),
    "no tensor": (lambda h: 2 if h.tensor is None else h.tensor, lambda h: setattr(h, "tensor", None)),
    "vars": (lambda h: len(vars(h)), lambda h: setattr(h, "more", 1)),
    "dir": (lambda h: len(dir(h)), lambda h: setattr(h, "more", 1)),
    "one object": (lambda h: 2 if h.table is h.table else 3, lambda h: None),
}


class Taking(nn.Module):
    """A forward that reads an object among its arguments."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read, self.bias = read, nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return nn.functional.gelu(x + self.bias) * self.read(held)


@pytest.mark.parametrize("name", HELD)
def test_what_an_argument_holds_may_change(name: str) -> None:
    read, change = HELD[name]
    original, x, held = Taking(read), torch.randn(3, 4), Held()
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, (x, held), cost_guard=False)
    torch.testing.assert_close(scheduled(x, held), original(x, held))
    change(held)
    torch.testing.assert_close(scheduled(x, held), original(x, held))
