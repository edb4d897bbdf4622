"""Modules put in, taken out and exchanged after scheduling: what runs is what the model is then."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning
from tests.core.adapting.counting import X, adaptations, fallbacks
from tests.small import Mlp


class Gated(nn.Module):
    """An MLP with a gate that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(16), nn.LayerNorm(16)
        self.gate = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(x))
        return x + (y if self.gate is None else y * self.gate(x))


class Model(nn.Module):
    """Goes through modules in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated(), Gated()])
        self.branches = nn.ModuleDict({"a": nn.Linear(16, 16)})
        self.stages = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.adapters = nn.ModuleList()
        self.register_module("spare", None)
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList([Gated()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x) if hasattr(self, "before") else x
        for block in self.blocks:
            x = block(x)
        for layer in self.inner.layers:
            x = layer(x)
        for number, adapter in enumerate(self.adapters):
            x = x + number * adapter(x)
        for branch in self.branches.values():
            x = x + F.gelu(branch(x))
        for stage in self.stages:
            x = stage(x)
        return x


def _shortened(model: Model) -> None:
    model.blocks = model.blocks[:1]


def _removed(model: Model) -> None:
    del model.blocks[1]


CHANGES: dict[str, Callable[[Model], object]] = {
    "appended": lambda model: model.blocks.append(Gated()),
    "appended to what was empty": lambda model: model.adapters.extend([nn.Linear(16, 16), nn.Linear(16, 16)]),
    "appended further in": lambda model: model.inner.layers.append(Gated()),
    "inserted": lambda model: model.blocks.insert(0, Gated()),
    "shortened": _shortened,
    "removed": _removed,
    "exchanged": lambda model: model.blocks.__setitem__(0, model.blocks[1]),
    "a stage": lambda model: model.stages.append(nn.Linear(16, 16)),
    "a branch": lambda model: model.branches.update({"b": nn.Linear(16, 16)}),
    "no branch": lambda model: model.branches.pop("a"),
    "no gate": lambda model: setattr(model.blocks[1], "gate", None),
    "what was asked for in vain": lambda model: setattr(model, "before", nn.Linear(16, 16)),
    "beside": lambda model: setattr(model, "head", nn.Linear(16, 2)),
}


def changed(change: Callable[[Model], object], scheduled: bool, first: bool) -> Model:
    """A model of fixed weights, changed after it was scheduled, or before if ``first``."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(1)
    if first:
        change(model)
    if scheduled:
        schedule.optimize(model, X, rules="all", cost_guard=False)
    if not first:
        torch.manual_seed(1)
        change(model)
    return model


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("training", [True, False])
def test_what_runs_is_what_the_model_is_now(name: str, training: bool) -> None:
    model, twin = changed(CHANGES[name], True, False), changed(CHANGES[name], False, False)
    model.train(training), twin.train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows in (2, 5):
            x = torch.randn(rows, 3, 16)
            torch.testing.assert_close(step(model, x), step(twin, x))


def test_a_gate_put_in_where_none_was() -> None:
    def without(model: Model) -> None:
        model.blocks[1].gate = None

    model, twin = changed(without, True, True), changed(without, False, True)
    model.blocks[1].gate = twin.blocks[1].gate = nn.Linear(16, 16)
    torch.testing.assert_close(step(model, X), step(twin, X))


def test_what_is_put_beside_the_rest_is_no_other_model() -> None:
    model = changed(CHANGES["beside"], True, False)
    for training in (True, False):
        model.train(training)(X)
    assert fallbacks(model) == adaptations(model) == 0


@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_all_modules_acts(register: str) -> None:
    def doubled(*args: object) -> object:
        if not isinstance(args[0], nn.Linear):
            return None
        last = args[-1 if register == "forward" else 1]
        return tuple(each if each is None else 2 * each for each in last) if isinstance(last, tuple) else 2 * last  # type: ignore[operator]

    model, twin = changed(lambda model: None, True, False), changed(lambda model: None, False, False)
    expected = step(twin, X)
    torch.testing.assert_close(step(model, X), expected)
    assert fallbacks(model) == 0
    handle = getattr(nn.modules.module, f"register_module_{register}_hook")(doubled)
    try:
        with pytest.warns(FallbackWarning, match="a hook on all modules"):
            got = step(model, X)
        torch.testing.assert_close(got, step(twin, X))
        assert not all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    finally:
        handle.remove()
    before = fallbacks(model)
    torch.testing.assert_close(step(model, X), expected)
    assert fallbacks(model) == before > 0
