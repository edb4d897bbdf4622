"""The product of a layer norm without parameters with a weight becomes one call of ``F.layer_norm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused
import schedule

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
FORMS: dict[str, Form] = {
    "unit offset": lambda n, gamma, beta: n * (gamma + 1),
    "weight": lambda n, gamma, beta: gamma * n,
    "weight and bias": lambda n, gamma, beta: n * gamma + beta,
    "unit offset and bias": lambda n, gamma, beta: beta + (1 + gamma) * n,
}


class Scaled(nn.Module):
    """x-transformers' layer norm, with a linear layer behind it."""

    def __init__(self, form: Form, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.gamma, self.beta = (nn.Parameter(torch.randn(16, dtype=dtype)) for _ in range(2))
        self.out = nn.Linear(16, 4, dtype=dtype)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.form(self.norm(x), self.gamma, self.beta))


def scheduled(model: nn.Module, dtype: torch.dtype = torch.float32, rules: tuple[str, ...] = ("default",)) -> set[Any]:
    """Schedule the model, and return the functions in its graph."""
    x = torch.randn(3, 5, 16, dtype=dtype)
    sch = schedule.create_schedule(model, (x,))
    schedule.optimize(sch, rules=list(rules), cost_guard=False).verify()
    return {node.target for node in sch.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_one_call(name: str) -> None:
    called = scheduled(Scaled(FORMS[name]))
    assert F.layer_norm in called
    assert not called & {torch.mul, fused.layer_norm, fused.adaptive_layer_norm}


@pytest.mark.parametrize("rules", [("default", "memory"), ("memory",)])
def test_for_memory_it_can_be_computed_again(rules: tuple[str, ...]) -> None:
    assert {fused.layer_norm} <= scheduled(Scaled(FORMS["unit offset"]), rules=rules)


def test_the_weight_may_be_narrower() -> None:
    model = Scaled(FORMS["weight and bias"])
    model.gamma.data = model.gamma.data.bfloat16()
    assert fused.layer_norm in scheduled(model)


def test_the_gradient_of_a_16_bit_weight_is_summed_in_32_bits() -> None:
    assert fused.layer_norm in scheduled(Scaled(FORMS["weight"], torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(
    "form",
    [
        lambda n, gamma, beta: n * gamma.double(),  # which makes the result wider
        lambda n, gamma, beta: n * gamma[:1],
        lambda n, gamma, beta: n * gamma[0],
        lambda n, gamma, beta: n * gamma + n,
    ],
)
def test_what_is_no_weight_is_left_alone(form: Form) -> None:
    model = Scaled(form)
    model.out = nn.Linear(16, 4, dtype=form(torch.ones(16), model.gamma, model.beta).dtype)
    assert not {each for each in scheduled(model) if each is F.layer_norm or "norm" in getattr(each, "__name__", "")}
