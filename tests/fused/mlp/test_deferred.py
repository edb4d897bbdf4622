"""Weight gradients put off and computed later."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused.mlp import MLP, Linear, TransformerConfig


def pair(**settings) -> tuple[MLP, MLP]:
    """An MLP that puts gradients off, and the same that does not."""
    torch.manual_seed(0)
    common = {"hidden_size": 12, "ffn_hidden_size": 48, **settings}
    later = MLP(TransformerConfig(**common, delay_wgrad_compute=True))
    now = MLP(TransformerConfig(**common))
    for parameter in later.parameters():
        nn.init.normal_(parameter)
    now.load_state_dict(later.state_dict())
    return later, now


def backward(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    out, bias = mlp(leaf)
    out = out if bias is None else out + bias
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return leaf.grad


def gradients(mlp: MLP) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in mlp.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_equals_the_ordinary_backward(gated, bias, dtype):
    later, now = pair(gated_linear_unit=gated, add_bias_linear=bias, activation_func=F.silu, params_dtype=dtype)
    x = torch.randn(5, 2, 12).to(dtype)
    torch.testing.assert_close(backward(later, x), backward(now, x))
    assert later.linear_fc1.weight.grad is None and later.linear_fc2.weight.grad is None
    later.backward_dw()
    torch.testing.assert_close(gradients(later), gradients(now))


def test_several_passes_add_up_and_nothing_is_counted_twice():
    later, now = pair()
    for seed in range(3):
        x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(seed))
        backward(later, x), backward(now, x)
        if seed == 1:
            later.backward_dw()
    later.backward_dw()
    later.backward_dw()
    torch.testing.assert_close(gradients(later), gradients(now))


def test_the_second_layer_comes_first_and_hooks_run():
    later, _ = pair()
    order = []
    for name, parameter in later.named_parameters():
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    backward(later, torch.randn(5, 2, 12))
    assert order == []
    later.backward_dw()
    assert order == ["linear_fc2.weight", "linear_fc1.weight"]


def test_under_autocast():
    later, now = pair()
    x = torch.randn(5, 2, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [mlp(x)[0] for mlp in (later, now)]
    for out in outs:
        out.float().square().sum().backward()
    later.backward_dw()
    assert later.linear_fc1.weight.grad.dtype == torch.float32
    torch.testing.assert_close(gradients(later), gradients(now), rtol=2e-2, atol=2e-1)


def test_a_frozen_weight_gets_no_gradient():
    later, now = pair()
    for mlp in (later, now):
        mlp.linear_fc1.weight.requires_grad_(False)
    x = torch.randn(5, 2, 12)
    torch.testing.assert_close(backward(later, x), backward(now, x))
    later.backward_dw()
    assert later.linear_fc1.weight.grad is None
    torch.testing.assert_close(gradients(later), gradients(now))


def test_a_linear_layer_adds_its_bias_if_told_and_is_copied_with_what_is_put_off():
    linear = Linear(3, 5, init_method=nn.init.normal_, delay_wgrad_compute=True)
    x = torch.randn(4, 3, requires_grad=True)
    out, bias = linear(x * 2)
    assert bias is None
    torch.testing.assert_close(out, F.linear(x * 2, linear.weight, linear.bias))
    out.sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((5,), 4.0))
    twin = copy.deepcopy(linear)
    linear.backward_dw(), twin.backward_dw()
    torch.testing.assert_close(linear.weight.grad, (2 * x).sum(0).expand(5, 3))
    assert torch.equal(linear.weight.grad, twin.weight.grad)


def test_torch_func_puts_nothing_off():
    later, now = pair()
    x = torch.randn(5, 2, 12)

    def loss(parameters, mlp):
        return torch.func.functional_call(mlp, parameters, (x,))[0].square().sum()

    mine, theirs = (torch.func.grad(loss)(dict(mlp.named_parameters()), mlp) for mlp in (later, now))
    torch.testing.assert_close(mine, theirs)


def test_an_input_without_gradient():
    later, now = pair()
    x = torch.randn(5, 2, 12)
    for mlp in (later, now):
        mlp(x)[0].square().sum().backward()
    later.backward_dw()
    torch.testing.assert_close(gradients(later), gradients(now))
