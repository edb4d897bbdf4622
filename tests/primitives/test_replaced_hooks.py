"""Hooks of a layer whose call is replaced by that of a module: each runs once a call, on one of the two."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule import MatchError, call_module
from schedule.runtime.scheduled import state_of
from tests.fingerprint import fingerprint

pytestmark = pytest.mark.unwritable("a module with weights takes the place of matches")

ROWS = torch.linspace(-1, 1, 32).view(4, 8)
SEEN: list[str] = []


class Chain(nn.Module):
    """Two layers in a row, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x)))


class Both(nn.Module):
    """What the two layers compute."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside = nn.Sequential(copy.deepcopy(model.linear), copy.deepcopy(model.norm))
        for module in self.inside:
            for table in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
                table.clear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def normalized(x: Tensor) -> Tensor:
    return call_module("norm")(call_module("linear")(x))


def doubled(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    SEEN.append(type(module).__name__)
    return tuple(2 * each for each in inputs)


def doubled_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return doubled(module, args), kwargs


def halved(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    SEEN.append(type(module).__name__)
    return tuple(each / 2 for each in inputs)


Register = Callable[[nn.Module], Any]
HOOKS: dict[str, Register] = {
    "pre": lambda layer: layer.register_forward_pre_hook(doubled),
    "pre with keywords": lambda layer: layer.register_forward_pre_hook(doubled_by_name, with_kwargs=True),
    "backward": lambda layer: layer.register_full_backward_hook(halved),
}


def replaced(register: Register) -> tuple[schedule.Schedule, nn.Module, Any]:
    """A schedule after the replacement, an untouched twin with the hook, and the handle."""
    model = Chain()
    handle, twin = register(model.linear), copy.deepcopy(model)
    sch = schedule.create_schedule(model, ROWS)
    sch.replace(Both(model), sch.find(normalized, expect=1), name="both")
    return sch, twin, handle


def seen_in(model: nn.Module, rows: Tensor = ROWS) -> tuple[list[str], list[Tensor]]:
    """The classes of modules that the hook has seen, the result and the gradient of the input."""
    SEEN.clear()
    x = rows.clone().requires_grad_()
    result = model(x)
    result.square().sum().backward()
    return SEEN.copy(), [result.detach(), x.grad]  # type: ignore[list-item]


def ran_graph(model: nn.Module) -> bool:
    state: Any = state_of(model)
    return state.fallbacks == 0


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_runs_once_a_call_on_the_module_or_on_the_layer(kind: str) -> None:
    sch, twin, handle = replaced(HOOKS[kind])
    expected = seen_in(twin)[1]
    for training in (True, False):
        seen, values = seen_in(sch.module.train(training), ROWS)
        assert seen == ["Both"] and ran_graph(sch.module)
        torch.testing.assert_close(values, expected)
    other = sch.module.linear.register_forward_hook(lambda *_: None)
    with pytest.warns(schedule.FallbackWarning):
        seen, values = seen_in(sch.module)
    assert seen == ["Linear"] and not ran_graph(sch.module)
    torch.testing.assert_close(values, expected)
    other.remove()
    handle.remove()
    assert seen_in(sch.module)[0] == [] and not sch.module.both._forward_pre_hooks
    assert not sch.module.both._backward_hooks


@pytest.mark.parametrize("kind", ["pre with keywords", "backward"])
def test_undo_gives_each_its_own_hooks(kind: str) -> None:
    model = Chain()
    HOOKS[kind](model.linear)
    new, sch = Both(model), schedule.create_schedule(model, ROWS)
    found = sch.find(normalized, expect=1)
    before = fingerprint(sch, new)
    sch.replace(new, found)
    after = fingerprint(sch, new)
    sch.undo()
    assert fingerprint(sch, new) == before
    sch.redo()
    assert fingerprint(sch, new) == after
    assert seen_in(model)[0] == ["Both"]
    sch.undo()
    assert seen_in(model)[0] == ["Linear"]


@pytest.mark.parametrize("kind", ["pre with keywords", "backward"])
def test_copies_have_hooks_of_their_own(kind: str) -> None:
    sch, _, handle = replaced(HOOKS[kind])
    copies = [copy.deepcopy(sch.module), pickle.loads(pickle.dumps(sch.module))]
    handle.remove()
    assert seen_in(sch.module)[0] == []
    for model in copies:
        assert seen_in(model)[0] == ["Both"]
        assert model.both._forward_pre_hooks is not sch.module.both._forward_pre_hooks
        assert model.both._forward_pre_hooks == model.linear._forward_pre_hooks


def test_hooks_registered_afterwards_run_once() -> None:
    """Of a shared kind in the graph, of another on the layer."""
    sch, _, _ = replaced(HOOKS["pre"])
    HOOKS["pre"](sch.module.linear)
    assert seen_in(sch.module)[0] == ["Both"] * 2 and ran_graph(sch.module)
    HOOKS["backward"](sch.module.linear)
    with pytest.warns(schedule.FallbackWarning):
        assert seen_in(sch.module)[0] == ["Linear"] * 3


def test_a_hook_that_calls_the_model_runs_in_both_calls() -> None:
    sch, _, _ = replaced(HOOKS["pre"])

    def again(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(SEEN) == 1:
            sch.module(ROWS)

    sch.module.linear.register_forward_pre_hook(again)
    assert seen_in(sch.module)[0] == ["Both"] * 2 and ran_graph(sch.module)


class Residual(Chain):
    """Reads the input of the chain once more."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x)) + x)


def residual(x: Tensor) -> Tensor:
    return call_module("norm")(call_module("linear")(x)) + x


def both_of(model: Chain) -> nn.Module:
    return Both(model)


def around(model: Chain) -> nn.Module:
    return nn.Sequential(model.linear, nn.LayerNorm(8))


def hooked(model: Chain) -> nn.Module:
    new = Both(model)
    new.register_forward_pre_hook(lambda module, inputs: None)
    return new


REFUSED: dict[str, tuple[str, Register, Callable[[Chain], Any], type[Chain], Any]] = {
    "the input has another reader": ("linear", HOOKS["pre"], both_of, Residual, residual),
    "the gradient has another part": ("linear", HOOKS["backward"], both_of, Residual, residual),
    "the replacement calls the layer": ("linear", HOOKS["pre"], around, Chain, normalized),
    "the replacement has hooks": ("linear", HOOKS["pre"], hooked, Chain, normalized),
    "a function": ("linear", HOOKS["pre"], lambda model: lambda x: x, Chain, normalized),
    "a layer inside": ("norm", HOOKS["pre"], both_of, Chain, normalized),
    "a gradient inside": ("norm", HOOKS["backward"], both_of, Chain, normalized),
    "a result inside": ("linear", lambda m: m.register_forward_hook(lambda *_: None), both_of, Chain, normalized),
    "a gradient of a result": (
        *("linear", lambda m: m.register_full_backward_pre_hook(lambda *_: None)),
        *(both_of, Chain, normalized),
    ),
    "the older kind": ("linear", lambda m: m.register_backward_hook(lambda *_: None), both_of, Chain, normalized),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("why", REFUSED)
def test_a_hook_that_would_see_something_else_refuses_the_replacement(why: str) -> None:
    path, register, make, kind, pattern = REFUSED[why]
    model = kind()
    register(model.get_submodule(path))
    new, sch = make(model), schedule.create_schedule(model, ROWS)
    found = sch.find(pattern, expect=1)
    before = fingerprint(sch)
    with pytest.raises(MatchError, match=f"{path} has a hook that the rewrite would swallow"):
        sch.replace(new, found)
    assert fingerprint(sch) == before


class Twice(Chain):
    """Calls the two layers twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x)) + self.norm(self.linear(x.flip(0))))


def test_another_call_of_the_layer_is_not_replaced_by_what_runs_no_hooks() -> None:
    model = Twice()
    HOOKS["pre"](model.linear)
    sch = schedule.create_schedule(model, ROWS)
    first, second = sch.find(normalized, expect=2)
    sch.replace(Both(model), [first])
    assert seen_in(model)[0] == ["Both", "Linear"] and ran_graph(model)
    with pytest.raises(MatchError, match="linear has a hook that the rewrite would swallow"):
        sch.replace(torch.tanh, [second])
    assert seen_in(model)[0] == ["Both", "Linear"]


def test_two_calls_of_a_layer_become_two_of_the_module() -> None:
    model = Twice()
    handle = HOOKS["pre"](model.linear)
    sch = schedule.create_schedule(model, ROWS)
    sch.replace(nn.Identity(), sch.find(normalized, expect=2))
    assert seen_in(model)[0] == ["Identity"] * 2 and ran_graph(model)
    handle.remove()
    assert seen_in(model)[0] == [] and ran_graph(model)


class Tied(nn.Module):
    """The two layers on their own parameters."""

    def __init__(self, model: Chain) -> None:
        super().__init__()
        self.weights = nn.ParameterList([*model.linear.parameters(), *model.norm.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, scale, shift = self.weights
        return F.layer_norm(F.linear(x, weight, bias), (8,), scale, shift)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOOKS)
def test_a_replacement_with_hooks_is_verified(kind: str) -> None:
    model = Chain()
    HOOKS[kind](model.linear)
    sch = schedule.create_schedule(model, ROWS)
    sch.replace(Tied(model), sch.find(normalized, expect=1))
    assert schedule.verify(sch, ROWS, steps=1)
    assert seen_in(model)[0] == ["Tied"] and ran_graph(model)
