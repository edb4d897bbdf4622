"""Gradient checkpointing of scheduled models: the recomputation takes the path of the first run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import schedule
from schedule.runtime.scheduled import state_of
from tests.zoo import batch, build

_LONG = ("t5", "mistral", "qwen3", "bert", "vit")
NAMES = ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in _LONG)]
everywhere = pytest.mark.parametrize("name", NAMES)
either_kind = pytest.mark.parametrize("reentrant", [False, True])


def layers(model: nn.Module) -> list[nn.Module]:
    """What gradient checkpointing computes again."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def fallbacks(modules: list[nn.Module]) -> int:
    """Calls of original forwards in these and all below."""
    states = [state_of(child) for module in modules for child in module.modules()]
    return sum(state.fallbacks for state in states if state is not None)


def step(model: nn.Module, inputs: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a training step, drawing from one seed."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_steps_alike(model: nn.Module, twin: nn.Module, name: str) -> None:
    """Compare loss and all gradients of some steps, of two shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, inputs in enumerate([batch(name), batch(name), batch(name, 3, 5), batch(name)]):
            ours, theirs = step(model, inputs, seed), step(twin, inputs, seed)
            assert ours.keys() == theirs.keys()
            for key, expected in theirs.items():
                torch.testing.assert_close(ours[key], expected, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def enable(model: nn.Module, reentrant: bool) -> None:
    """Switch gradient checkpointing on; the newest releases of transformers name the method after activations."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": reentrant})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rules", [pytest.param("default", marks=pytest.mark.slow), "all"])
@either_kind
@everywhere
def test_training_steps_with_checkpointing_switched_on_afterwards(name: str, reentrant: bool, rules: str) -> None:
    model, twin = build(name), build(name)
    assert schedule.optimize(model, batch(name), rules=rules, cost_guard=False).applied
    enable(model, reentrant)
    enable(twin, reentrant)
    assert_steps_alike(model, twin, name)
    if rules == "default":  # weights of attention that nothing reads are not computed, so its graphs do not adapt
        assert not fallbacks(layers(model))


@pytest.mark.one_in(2)
@either_kind
@everywhere
def test_training_steps_with_checkpointing_switched_on_before(name: str, reentrant: bool) -> None:
    model, twin = build(name), build(name)
    enable(model, reentrant)
    enable(twin, reentrant)
    assert schedule.optimize(model, batch(name), cost_guard=False).applied
    assert_steps_alike(model, twin, name)
    assert not fallbacks(layers(model))


def watched(model: nn.Module) -> list[Callable[..., Any]]:
    """Checkpoint the first layer by a function that runs what it was given last, as counters do; what it was given."""
    asked: list[Callable[..., Any]] = []

    def remembered(*args: Any) -> Any:
        return asked[-1](*args)

    def function(forward: Callable[..., Any], *args: Any) -> Any:
        asked.append(forward)
        return checkpoint(remembered, *args, use_reentrant=False)

    enable(model, reentrant=False)
    layers(model)[0]._gradient_checkpointing_func = function
    return asked


def called(forward: partial[Any]) -> Any:
    """The layer that a checkpointing function is given: as an argument, or before transformers 5.23 as a method's."""
    return forward.args[0] if forward.args else forward.func.__self__  # type: ignore[attr-defined]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("switched_on", ["before", "afterwards"])
@everywhere
def test_a_checkpointing_function_that_remembers_sees_the_live_layers_alone(name: str, switched_on: str) -> None:
    model, twin = build(name), build(name)
    given = [watched(each) for each in (model, twin)] if switched_on == "before" else []
    assert schedule.optimize(model, batch(name), cost_guard=False).applied
    ours, theirs = given or [watched(each) for each in (model, twin)]
    ours.clear()  # a model that is traced calls its layers on tensors without data
    assert_steps_alike(model, twin, name)
    once_more = len(ours) - len(theirs)  # the first call, if a graph finds on its way that it does not hold
    assert once_more in (0, 1)
    asked = [called(forward) for forward in ours if isinstance(forward, partial)]
    assert len(asked) == len(ours)
    assert all(each is layers(model)[0] for each in asked), "called with a copy of the layer"
    settled = len(ours), len(theirs)
    assert_steps_alike(model, twin, name)
    assert (len(ours) - settled[0], len(theirs) - settled[1]) == (4, 4)


@everywhere
def test_a_layer_is_traced_as_it_runs_inside_of_its_checkpoint(name: str) -> None:
    model = build(name)
    asked = watched(model)
    layer = layers(model)[0]
    sch = schedule.create_schedule(model, batch(name))
    path = next(path for path, module in model.named_modules() if module is layer)
    sch.tree.graphs.recording  # noqa: B018
    asked.clear()
    assert sch[path].graph
    assert not asked
    assert state_of(layer) is None
    assert type(layer).forward is type(build(name).get_submodule(path)).forward
