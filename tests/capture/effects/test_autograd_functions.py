"""Autograd functions of the user's keep their own backward."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import schedule
from schedule.capture.effects.autograd_functions import Applied
from schedule.runtime.scheduled import state_of

X = torch.linspace(-2, 2, 24).reshape(3, 8)
Tensor = torch.Tensor


class Rounded(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return torch.round(x * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, None


class Halves(torch.autograd.Function):
    """In the two-part form, with two outputs."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return torch.floor(x), torch.ceil(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, low: Tensor, high: Tensor) -> Tensor:
        return low + 2 * high


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class One(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(Rounded.apply(self.mlp(x), 4.0))


class Two(Model):
    def forward(self, x: Tensor) -> Tensor:
        low, high = Halves.apply(self.mlp(x))
        return self.mlp(low * high)


@pytest.mark.parametrize("cls", [One, Two])
def test_the_backward_stays_the_users(cls: type[Model]) -> None:
    model = cls()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, X)
    assert schedule.optimize(sch, cost_guard=False).applied == {"bias_gelu": 2}
    schedule.verify(sch, X, steps=2)
    twin(X).sum().backward()
    assert twin.fc1.weight.grad is not None and twin.fc1.weight.grad.abs().sum() > 0
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        each(X).sum().backward()
        torch.testing.assert_close(each.fc1.weight.grad, twin.fc1.weight.grad)


def test_one_node_a_function() -> None:
    targets = [node.target for node in schedule.create_schedule(One(), X).graph.nodes]
    assert targets.count(Applied(Rounded)) == 1 and torch.round not in targets


@pytest.mark.parametrize(
    ("function", "why"),
    [(lambda x: Doubled.apply(x * 1), "changes what it is given"), (lambda x: Calling.apply(x, F.relu), "to call")],
)
def test_what_one_node_cannot_stand_for_is_refused(function: Any, why: str) -> None:
    class Odd(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(function(x))

    model = Odd()
    (entry, *_) = schedule.optimize(model, X, cost_guard=False).entries
    assert entry.status == "skipped" and why in entry.reason and type(model) is Odd


def test_checkpoints_are_entered() -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.mlp, x, use_reentrant=True)

    model = Checkpointed()
    sch = schedule.create_schedule(model, X)
    assert schedule.optimize(sch, cost_guard=False).applied == {"bias_gelu": 1}
    schedule.verify(sch, X, steps=1)


def test_functions_outside_a_trace_are_left_alone() -> None:
    before = vars(torch.autograd.Function)["apply"]
    assert schedule.create_schedule(One(), X).specializations
    assert vars(torch.autograd.Function)["apply"] is before


@torch.jit.script
def size_root(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1) * factor, dtype=torch.float))


class Scripted(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x[:, :8] / size_root(x, 2))


def test_a_scripted_function_is_one_node_and_runs_at_other_sizes() -> None:
    model = Scripted()
    twin = copy.deepcopy(model)
    example = torch.linspace(-2, 2, 36).reshape(3, 12)
    targets = [node.target for node in schedule.create_schedule(Scripted(), example).graph.nodes]
    assert targets.count(Applied(size_root)) == 1
    assert schedule.optimize(model, example, cost_guard=False).applied == {"bias_gelu": 1}
    for columns in (12, 20):
        x = torch.randn(5, columns)
        torch.testing.assert_close(copy.deepcopy(model)(x), twin(x), rtol=1e-6, atol=1e-6)


# Its functions compile what they compute, and keep it by the types of what they are given, as einx does.
LIBRARY = """
known = {}

class Kind:
    def __init__(self, of): self.of = of
    def __hash__(self): return id(self)
    def __eq__(self, other): return self is other

def outer(pattern, a, b):
    kind = known.setdefault(type(a), Kind(type(a)))
    known[kind] = eval("lambda a, b: a[:, None] * b[None, :]")
    return known[kind](a, b)
"""


class Outer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.library = sys.modules["einx.tests"]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.library.outer("i, j -> i j", x.sum(1), x.mean(0))
        return self.mlp(result)


def test_a_function_of_a_library_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("einx.tests")
    exec(LIBRARY, vars(library))
    monkeypatch.setitem(sys.modules, "einx.tests", library)
    model, twin = Outer(), Outer()
    twin.load_state_dict(model.state_dict())
    sch = schedule.create_schedule(model, X).trace(flatten=True)
    assert [node.target for node in sch.graph.nodes].count(Applied(vars(library)["outer"])) == 1
    assert schedule.optimize(sch, cost_guard=False).applied == {"bias_gelu": 1}
    for rows in (3, 5):
        x, other = (torch.linspace(-2, 2, 8 * rows).reshape(rows, 8).requires_grad_() for _ in range(2))
        model(x).sum().backward(), twin(other).sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    assert state_of(model).fallbacks == 0
