"""Graphs for further kinds of calls of modules whose submodules have hooks, which act on what those return."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of


class Layer(nn.Module):
    """A layer that a hook is put on, or on what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Root(nn.Module):
    """Calls layers, and has something to rewrite after them."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers, self.bias = nn.ModuleList([Layer() for _ in range(count)]), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = F.gelu(x + self.bias)
        return x if scale is None else x * scale


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def in_bfloat16(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.bfloat16()


def of_another_kind_the_second_time(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    count = vars(module)["count"] = vars(module).get("count", 0) + 1
    return output if count % 2 else output.bfloat16()


def pair() -> tuple[Root, Root]:
    torch.manual_seed(0)
    model = Root()
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, torch.randn(2, 3, 8), cost_guard=False).applied
    return model, twin


def seen(model: nn.Module, *args: Any) -> list[Tensor]:
    out = model(*args)
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), list(model.parameters()))]


def root_state(model: nn.Module) -> Any:
    state = state_of(model)
    assert state is not None
    return state


@pytest.mark.parametrize("place", ["layers.1", "layers.1.inner"])
@pytest.mark.parametrize("hook", [doubled, in_bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_another_kind_of_call(hook: Callable[..., Any], place: str, training: bool) -> None:
    model, twin = pair()
    for each in (model, twin):
        each.train(training)
        each.get_submodule(place).register_forward_hook(hook)
    for size in (3, 3, 5):
        args = torch.randn(size, 4, 8), torch.randn(size, 4, 8)  # with a scale: not as it was recorded
        torch.testing.assert_close(seen(model, *args), seen(twin, *args), rtol=2e-2, atol=2e-2)
    assert root_state(model).fallbacks == 0 and root_state(model).ran == "graph"
    assert root_state(model).adaptations[-1].specializations


def test_the_hook_is_taken_away_again() -> None:
    model, twin = pair()
    handles = [each.layers[1].register_forward_hook(in_bfloat16) for each in (model, twin)]
    args = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    for _ in range(2):
        torch.testing.assert_close(seen(model, *args), seen(twin, *args), rtol=2e-2, atol=2e-2)
    for handle in handles:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.testing.assert_close(seen(model, *args), seen(twin, *args))


def test_results_of_several_kinds_are_declined() -> None:
    model, twin = pair()
    shared = [each.layers[0] for each in (model, twin)]
    for each, layer in zip((model, twin), shared, strict=True):
        each.layers[1] = layer
        layer.register_forward_hook(of_another_kind_the_second_time)
    args = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    with pytest.warns(schedule.FallbackWarning):
        torch.testing.assert_close(model(*args), twin(*args), rtol=2e-2, atol=2e-2)


def test_what_a_hook_raises_is_raised() -> None:
    model, _ = pair()

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        raise KeyError("of the user")

    handle = model.layers[1].register_forward_hook(fail)
    args = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    with pytest.raises(KeyError, match="of the user"):
        model(*args)
    handle.remove()
    model(*args)
    assert root_state(model).fallbacks == 0


def test_a_hook_on_what_the_graph_has_in_it_is_named() -> None:
    torch.manual_seed(0)
    model = Root()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, torch.randn(2, 3, 8))
    sch.trace(flatten=True)
    schedule.optimize(sch, cost_guard=False)
    for each in (model, twin):
        each.layers[1].register_forward_hook(doubled)
    args = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    with pytest.warns(schedule.FallbackWarning, match=r"layers.1 has a hook \(.*doubled\)"):
        torch.testing.assert_close(model(*args), twin(*args))


def test_a_hook_on_what_a_rewrite_would_take_in_runs_at_each_call() -> None:
    """The bias of the hooked layer and the GELU after it are one op in the graph of recorded calls."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, torch.randn(2, 3, 8), cost_guard=False)
    assert report.count() == 2
    for each in (model, twin):
        each[2].register_forward_hook(doubled)
    for _ in range(3):
        x = torch.randn(4, 3, 8)
        torch.testing.assert_close(seen(model, x), seen(twin, x))
