"""Second derivatives, forward-mode differentiation and torch.func of what rules rewrite, beside eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.autograd import forward_ad

import schedule
from schedule.rules import Rule, list_rules
from tests.adversary.rewritten import arity, assert_same, rewritten

CASES = [
    pytest.param(rule, number, id=f"{rule.name}-{number}")
    for rule in list_rules()
    if rule.proof is not None and rule.name != "sdpa_without_weights"  # its forms are those of sdpa
    for number in range(len(rule.proof.forms))
]


def _first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


def double_backward(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    wanted = [t for t in inputs if t.requires_grad]
    torch.manual_seed(7)
    out = _first(function(*inputs))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    first = torch.autograd.grad((out * weights).sin().sum(), wanted, create_graph=True, allow_unused=True)
    total = sum((g * torch.linspace(1, 2, g.numel()).reshape(g.shape).to(g)).sum() for g in first if g is not None)
    second = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted * 2, (*first, *second), strict=True)]


def forward_mode(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.randn_like(t)) if t.is_floating_point() else t for t in tensors]
        torch.manual_seed(7)
        primal, tangent = forward_ad.unpack_dual(_first(function(*duals)))
    assert tangent is not None
    return [primal, tangent]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("derivative", [double_backward, forward_mode])
@pytest.mark.parametrize(("rule", "number"), CASES)
def test_derivatives_of_every_rule(rule: Rule, number: int, derivative: Callable[..., list[Tensor]]) -> None:
    assert rule.proof is not None
    form, dtype = rule.proof.forms[number], rule.proof.dtypes[0]
    torch.manual_seed(3)
    tensors = list(rule.proof.inputs(rule.proof.shapes[0], dtype)[: arity(form)])
    module, count = rewritten(form, tensors, [rule])
    assert count
    assert_same(derivative(module, tensors), derivative(form, tensors), dtype)


class Loss(nn.Module):
    """The loss of a tiny Llama by its embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs_embeds=embeddings, attention_mask=mask, labels=labels, use_cache=False).loss
        return loss


def tiny() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=19,
    )  # fmt: skip
    config._attn_implementation = "eager"
    batch = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.long), torch.randint(0, 19, (2, 5))
    return Loss(hf.LlamaForCausalLM(config)).eval(), batch


def _jvp(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
    torch.manual_seed(1)
    return torch.func.jvp(lambda x: model(x, *batch[1:]), (batch[0],), (torch.randn_like(batch[0]),))


def _jacfwd(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
    return torch.func.jacfwd(lambda x: model(x, *batch[1:]))(batch[0])


def _hessian_product(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
    torch.manual_seed(1)
    gradient = torch.func.grad(lambda x: model(x, *batch[1:]))
    return torch.func.jvp(gradient, (batch[0],), (torch.randn_like(batch[0]),))


def _dual(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
    torch.manual_seed(1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch[0], torch.randn_like(batch[0]))
        return tuple(forward_ad.unpack_dual(model(dual, *batch[1:])))


def _penalty(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
    """A gradient penalty: backward through a backward pass, as far as the parameters."""
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, *batch[1:]), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("derivative", [_jvp, _jacfwd, _hessian_product, _dual, _penalty])
@pytest.mark.parametrize("rules", ["default", "memory", "attention", "all"])
def test_derivatives_of_a_model(rules: str, derivative: Callable[..., Any]) -> None:
    model, batch = tiny()
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, batch, rules=rules, cost_guard=False).count()
    torch.testing.assert_close(derivative(model, batch), derivative(twin, batch), rtol=1e-4, atol=1e-6)
