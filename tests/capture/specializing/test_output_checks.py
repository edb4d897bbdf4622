"""What submodules return is checked while the graph runs: their structure is theirs to decide."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of

Tensor = torch.Tensor


class Child(nn.Module):
    """Returns a second item, a third one, or fewer, by flags that nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.second, self.third = True, False

    def forward(self, x: Tensor) -> tuple[Tensor | None, ...]:
        x = self.dropout(self.linear(x))
        found = (x, x * 2 if self.second else None)
        return (*found, x) if self.third else found


class Parent(nn.Module):
    """Goes on by what its child returned."""

    def __init__(self, names: bool = False) -> None:
        super().__init__()
        self.child, self.bias = Child(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second, *more = self.child(F.dropout(x, 0.5, self.training))
        total = F.gelu(first + self.bias) if second is None else F.gelu(second + self.bias)
        return total + sum(more) if more else total


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Parent()
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, torch.randn(3, 4), cost_guard=False).applied
    return model, twin


def alike(model: nn.Module, twin: nn.Module, training: bool) -> bool:
    x = torch.randn(5, 4)
    outs = []
    for each in (model, twin):
        torch.manual_seed(1)
        outs.append(each.train(training)(x))
    return torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("flags", [dict(second=False), dict(third=True)], ids=["None", "one more"])
def test_another_structure_runs_the_original(flags: dict[str, bool], training: bool) -> None:
    model, twin = pair()
    assert alike(model, twin, training)
    for each in (model, twin):
        vars(each.child).update(flags)
    with pytest.warns(FallbackWarning, match="the output of child"):
        assert alike(model, twin, training)
    state = state_of(model)
    assert state is not None and state.fallbacks == 1
    assert alike(model, twin, training) and state.fallbacks == 1  # a graph for the new structure was made
    for each in (model, twin):
        vars(each.child).update(dict.fromkeys(flags, next(iter(flags.values())) is False))
    assert alike(model, twin, training)


def test_a_training_call_reads_no_generator_that_dropout_does_not_draw_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's and Python's take 40 µs to read, at every call of every block."""
    model, twin = pair()

    def read() -> None:
        raise AssertionError("read")

    monkeypatch.setattr(random, "getstate", read)
    assert alike(model, twin, training=True)


class Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return torch.cat(self.kept)


class Caching(Child):
    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor | None, ...]:
        return super().forward(cache.update(x))


class Holder(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.child = Caching()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        first, second = self.child(x, cache)
        return F.gelu((first if second is None else second) + self.bias)


def test_a_cache_that_the_child_has_written_to_is_written_to_once() -> None:
    torch.manual_seed(0)
    model = Holder().eval()
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(3, 4), Cache()), cost_guard=False)
    assert state_of(model) is not None
    ours, theirs, x = Cache(), Cache(), torch.randn(3, 4)
    for second in (True, False, True):
        model.child.second = twin.child.second = second
        torch.testing.assert_close(model(x, ours), twin(x, theirs))
        torch.testing.assert_close(ours.kept, theirs.kept)


class Changing(Parent):
    """Changes what its first child returned in place, before it calls the second."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x).mul_(2))


@pytest.mark.unreplayable("the model raises by then")
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_after_a_change_in_place_of_what_a_call_returned_nothing_is_done_twice() -> None:
    torch.manual_seed(0)
    model = Changing().eval()
    twin = copy.deepcopy(model)
    schedule.optimize(model, torch.randn(3, 4), cost_guard=False)
    model.child.second = twin.child.second = False
    x = torch.randn(3, 4)
    try:
        torch.testing.assert_close(model(x), twin(x))
    except schedule.ScheduleError as error:
        assert "output of child" in str(error) and "fix: undo" in str(error)


@dataclasses.dataclass
class Intermediates:
    scores: Tensor | None = None
    keys: tuple[Tensor, Tensor] | None = None


class Attend(nn.Module):
    def __init__(self, container: str) -> None:
        super().__init__()
        self.container, self.linear = container, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        scores = self.linear(x)
        made = {"dataclass": Intermediates(scores), "dict": {"scores": scores, "keys": None}, "list": [scores]}
        return scores.tanh(), made[self.container]


class Completing(Parent):
    """Completes the container that its child made, as the attention of x-transformers does."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.child = Attend(container)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        result, made = self.child(x)
        keys = (x[:, :2], x[:, 2:])
        if isinstance(made, Intermediates):
            made.keys = keys
        elif isinstance(made, dict):
            made["keys"] = keys
        else:
            made.extend(keys)
        return F.gelu(result + self.bias), made


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("container", ["dataclass", "dict", "list"])
def test_the_caller_completes_what_a_call_returned(container: str) -> None:
    torch.manual_seed(0)
    model = Completing(container)
    twin = copy.deepcopy(model)
    schedule.optimize(model, torch.randn(3, 4), cost_guard=False)
    x = torch.randn(5, 4)
    for training in (True, False):
        ours, theirs = (each.train(training)(x) for each in (model, twin))
        torch.testing.assert_close(ours[0], theirs[0])
        torch.testing.assert_close(*(vars(out[1]) if container == "dataclass" else out[1] for out in (ours, theirs)))
