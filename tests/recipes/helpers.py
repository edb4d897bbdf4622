"""What recipes in tests refer to, and how a recipe is taken through JSON and Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Recipe, Schedule, scalar


def softmax_dropout(scores: torch.Tensor) -> torch.Tensor:
    """A pattern."""
    return F.dropout(F.softmax(scores, dim=-1), p=scalar("p"), training=scalar("training"))


def projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A pattern with parallel matches."""
    return F.linear(x, weight) + bias


def projections(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In place of parallel ones: their weights, then their biases."""
    count = len(given) // 2
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(given[:count], given[count:], strict=True))


def gelu_of_sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """In place of a match."""
    return F.gelu(x + bias, approximate="tanh")


def half_dropout(path: str, module: nn.Module) -> nn.Module:
    """For ``replace_all``."""
    assert isinstance(module, nn.Dropout)
    return nn.Dropout(module.p / 2)


def scripted(recipe: Recipe, sch: Schedule) -> Schedule:
    """Run the recipe as a script."""
    namespace: dict[str, Any] = {}
    exec(compile(recipe.to_python(), "recipe.py", "exec"), namespace)
    namespace["apply"](sch)
    return sch


def round_trip(sch: Schedule, fresh: Callable[[], nn.Module], batch: Any) -> Recipe:
    """Through JSON and Python onto fresh models: the same recipe, and the same results to the bit."""
    recipe = sch.recipe()
    read = Recipe.from_json(recipe.to_json())
    assert read == recipe and not read.diff(recipe) and read.to_json() == recipe.to_json()
    twins = [
        schedule.replay(fresh(), read, batch, trust="tests"),
        scripted(read, schedule.create_schedule(fresh(), batch)),
    ]
    expected = observed(sch.root.module, batch)
    for twin in twins:
        assert not recipe.diff(twin.recipe())
        assert [step.description for step in twin.history] or not recipe.steps
        for one, other in zip(observed(twin.module, batch), expected, strict=True):
            assert torch.equal(one, other)
    return recipe


def observed(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Outputs in training, with dropout, and gradients, and outputs in evaluation."""
    model.train()
    torch.manual_seed(0)
    model.zero_grad()
    first = tensor_of(model(**batch))
    first.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.eval()
    with torch.no_grad():
        last = tensor_of(model(**batch))
    model.train()
    assert gradients
    return [first.detach(), last, *gradients]


def tensor_of(output: Any) -> torch.Tensor:
    """The first tensor of an output."""
    if isinstance(output, torch.Tensor):
        return output
    found: torch.Tensor = output[0]
    return found
