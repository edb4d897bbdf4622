"""A branch on data that comes out otherwise, after effects: the original forward runs, each effect is there once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")


class Plain(nn.Module):
    """Only computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(F.gelu(self.linear(x) + self.bias))


class Buffered(Plain):
    """Counts in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Assigning(Buffered):
    """Counts in a buffer that it assigns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return Plain.forward(self, x)


class Attribute(Plain):
    """Counts in an attribute."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Logging(Plain):
    """Keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x.shape[0])
        return super().forward(x)

    def note(self, value: int) -> None:
        """Keep ``value``."""
        self.log.append(value)


class Told(Plain):
    """Calls what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.tell = self.log.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell(1)
        return super().forward(x)


class InTraining(Buffered):
    """Counts in training alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return Plain.forward(self, x)


class Statistics(Plain):
    """Keeps statistics in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Wrapper(nn.Module):
    """Holds another one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


class Branching(nn.Module):
    """Calls a child, and only then looks at its data."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.bias = child, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.child(x) + self.bias)
        return x * 2 if (x > -100).all() and x.shape[0] < 100 and x.abs().max() < 50 else x - 1


CHILDREN = [Buffered, Assigning, Attribute, Logging, Told, InTraining, Statistics]


def same(model: nn.Module, twin: nn.Module, x: torch.Tensor) -> None:
    outs = []
    for each in (model, twin):
        torch.manual_seed(3)
        outs.append((each(x), torch.rand(2)))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        for name in ("calls", "log"):
            assert vars(ours).get(name) == vars(theirs).get(name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("deeper", [False, True])
@pytest.mark.parametrize("kind", CHILDREN)
def test_effects_before_a_branch_are_there_once(kind: type[Any], deeper: bool, training: bool) -> None:
    torch.manual_seed(0)
    model = Branching(Wrapper(kind()) if deeper else kind())
    twin = copy.deepcopy(model)
    if kind is Told:
        for each in (model, twin):
            told = next(m for m in each.modules() if isinstance(m, Told))
            told.tell = told.log.append
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    model.train(training), twin.train(training)
    for x in (torch.randn(4, 8), torch.randn(4, 8) * 1000, torch.randn(5, 8), torch.randn(5, 8) * 1000):
        same(model, twin, x)


@pytest.mark.parametrize("at", ["child", "child.linear"])
def test_a_hook_registered_later_runs_once(at: str) -> None:
    torch.manual_seed(0)
    model = Branching(Plain()).eval()
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    assert state_of(model) is not None
    seen: list[Any] = [[], []]
    for each, log in zip((model, twin), seen, strict=True):
        each.get_submodule(at).register_forward_hook(lambda *_, log=log: log.append(1))
    for x in (torch.randn(4, 8), torch.randn(4, 8) * 1000):
        same(model, twin, x)
    assert len(seen[0]) == len(seen[1]) == 2


def test_a_hook_that_is_there_already_runs_once() -> None:
    torch.manual_seed(0)
    model = Branching(Plain()).eval()
    log: list[int] = []
    model.child.register_forward_hook(lambda *_: log.append(1))
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    assert log == []
    for count, x in enumerate((torch.randn(4, 8), torch.randn(4, 8) * 1000), 1):
        model(x)
        assert len(log) == count


def test_a_pure_child_costs_no_graph() -> None:
    model = Branching(Wrapper(Plain())).eval()
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    state = state_of(model)
    assert state is not None and state.specializations[0].has_checks
    model(torch.randn(4, 8))
    assert state.fallbacks == 0


class Deciding(Plain):
    """Returns a second item or not, and counts."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.second, self.counting = True, counting
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.counting:
            self.calls += 1
        return super().forward(x), x if self.second else None


class Pure(Plain):
    """Returns a second item or not."""

    second = True

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x if self.second else None


class Parent(nn.Module):
    """Goes on by what its child returned."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.bias = child, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.child(x)
        return F.gelu((first if second is None else second) + self.bias)


def test_an_output_of_another_structure_of_a_pure_child_runs_the_original() -> None:
    torch.manual_seed(0)
    model = Parent(Pure()).eval()
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    model.child.second = twin.child.second = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        same(model, twin, torch.randn(4, 8))


@pytest.mark.parametrize("at", [None, "child", "child.linear"])
@pytest.mark.parametrize("training", [True, False])
def test_a_child_that_gives_another_structure_is_called_once(at: str | None, training: bool) -> None:
    torch.manual_seed(0)
    model = Parent(Deciding(counting=True)).train(training)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    seen: list[Any] = [[], []]
    for each, log in zip((model, twin), seen, strict=True):
        if at is not None:
            each.get_submodule(at).register_forward_hook(lambda *_, log=log: log.append(1))
    for second in (True, False, False, True):
        model.child.second = twin.child.second = second
        same(model, twin, torch.randn(4, 8))
    assert len(seen[0]) == len(seen[1])


def test_what_a_child_returned_the_first_time_is_part_of_the_graph_of_gradients() -> None:
    torch.manual_seed(0)
    model = Parent(Deciding(counting=True))
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(4, 8),), cost_guard=False)
    model.child.second = twin.child.second = False
    x = torch.randn(4, 8)
    for each in (model, twin):
        torch.manual_seed(3)
        each(x).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
