"""Python state that is changed before or after ``torch.compile`` or ``torch.export`` of a scheduled model."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from fused.torch_internals.compiled_checks import CompiledCheck
from schedule.runtime.scheduled import state_of

SCALE: Any = 1.0


def helper(x: Tensor) -> Tensor:
    return x + 1


class Settings:
    """Holds a function and a number, as configs do."""

    def __init__(self) -> None:
        self.function, self.number = torch.sin, 2.0


class Net(nn.Module):
    """Reads attributes, a config, a dictionary, globals and a method beside an activation that is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.tied, self.act, self.settings = self.second, torch.tanh, Settings()
        self.table: dict[str, Any] = {"function": torch.cos}

    def tail(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(F.gelu(F.linear(x, self.first.weight) + self.first.bias))
        h = h + self.settings.function(h) * self.settings.number
        y = self.table["function"](self.second(h) + self.tied(h))
        return self.tail(helper(y)) * SCALE


def change_act(m: Any) -> None:
    m.act = torch.relu


def change_function_of_an_object(m: Any) -> None:
    m.settings.function = torch.exp


def change_number_of_an_object(m: Any) -> None:
    m.settings.number = 5.0


def change_table(m: Any) -> None:
    m.table["function"] = torch.exp


def untie(m: Any) -> None:
    torch.manual_seed(1)
    m.tied = nn.Linear(16, 8)


def change_global_number(m: Any) -> None:
    globals()["SCALE"] = 17.0


def change_global_function(m: Any) -> None:
    globals()["helper"] = lambda x: x * 13


def change_class(m: Any) -> None:
    Net.tail = lambda self, x: x * 11  # type: ignore[method-assign]


def change_method(m: Any) -> None:
    m.tail = types.MethodType(lambda self, x: x * 7, m)


CHANGES = [value for name, value in list(globals().items()) if name.startswith(("change_", "untie"))]
"""Each changes the result of :class:`Net`."""


@pytest.fixture(autouse=True)
def restored() -> Any:
    state, tail = {name: globals()[name] for name in ("SCALE", "helper")}, Net.tail
    torch._dynamo.reset()
    yield
    globals().update(state)
    Net.tail = tail  # type: ignore[method-assign]


def compiled(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, backend="eager", fullgraph=True)


def exported(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(module, (x,)).module()


def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    module, x = Net(), torch.randn(3, 8)
    twin = copy.deepcopy(module)
    assert schedule.optimize(module, (x,), cost_guard=False).applied
    return module, twin, x


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made", [compiled, exported])
def test_a_change_before(made: Callable[..., Callable[[Tensor], Tensor]], change: Callable[[Any], None]) -> None:
    module, twin, x = pair()
    before = twin(x)
    for each in (module, twin):
        change(each)
    assert not torch.equal(before, twin(x)), "the change matters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(made(module, x)(x), twin(x))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after(change: Callable[[Any], None]) -> None:
    module, twin, x = pair()
    run = compiled(module, x)
    torch.testing.assert_close(run(x), twin(x))
    for each in (module, twin):
        change(each)
    torch.testing.assert_close(run(x), twin(x))


def compiled_calls(module: nn.Module, x: Tensor) -> list[str]:
    """Return the names of the functions in the compiled graph."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(x)
    (graph,) = seen
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_the_graph_is_what_is_compiled_also_in_copies() -> None:
    module, twin, x = pair()
    ours = compiled_calls(module, x)
    assert state_of(module).fallbacks == 0  # type: ignore[union-attr]
    assert ours != compiled_calls(twin, x)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(nn.Sequential(module))[0]):
        assert compiled_calls(copied, x) == ours


@pytest.mark.parametrize("alone", [False, True])
def test_a_copy_is_checked_and_not_the_module_that_it_was_copied_from(alone: bool) -> None:
    module, twin, x = pair()
    for each in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        if alone:
            del module
            module = each
        untouched = copy.deepcopy(twin)
        torch._dynamo.reset()
        run = torch.compile(each, backend="eager")
        torch.testing.assert_close(run(x), twin(x))
        for changed in (each, untouched):
            changed.act = torch.relu
        torch.testing.assert_close(run(x), untouched(x))


def test_without_its_checks_compiled_code_would_miss_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, twin, x = pair()
    monkeypatch.setattr(CompiledCheck, "holds", lambda self: True)
    run = compiled(module, x)
    run(x)
    for each in (module, twin):
        change_class(each)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(run(x), twin(x))


class AsksForThreads(nn.Module):
    """Asks what torch.compile does not follow, so that its graph ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc(x))
        return h * 2 if torch.get_num_threads() == 2 else h


def test_a_graph_that_ends_at_a_check() -> None:
    model, x = AsksForThreads(), torch.randn(2, 8)
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, x, cost_guard=False).applied
    compiled = torch.compile(model, backend="eager")
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            torch.testing.assert_close(compiled(x), twin(x))
    finally:
        torch.set_num_threads(threads)
