"""Gradient checkpointing of scheduled models: the recomputation takes the path of the first run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.runtime import state_of
from tests.zoo import batch, build

NAMES = ["gpt2", "llama", "mistral", "qwen3", "bert", "t5"]


def fallbacks(model: nn.Module) -> int:
    """Calls of the original forward so far."""
    return sum(state.fallbacks for module in model.modules() if (state := state_of(module)) is not None)


def step(model: nn.Module, inputs: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a training step, drawing from one seed."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_steps_alike(model: nn.Module, twin: nn.Module, batches: list[dict[str, Any]]) -> None:
    """Compare loss and all gradients, step by step."""
    for seed, inputs in enumerate(batches):
        ours, theirs = step(model, inputs, seed), step(twin, inputs, seed)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_training_steps_with_gradient_checkpointing(name: str, reentrant: bool, rules: str) -> None:
    model, twin = build(name), build(name)
    assert schedule.optimize(model, batch(name), rules=rules, cost_guard=False).applied
    for each in (model, twin):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batches = [batch(name), batch(name), batch(name, 3, 5), batch(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_steps_alike(model, twin, batches[:2])
        settled = fallbacks(model)
        assert_steps_alike(model, twin, batches[2:])
    assert fallbacks(model) == settled
