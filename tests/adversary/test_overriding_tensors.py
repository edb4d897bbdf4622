"""Tensors and modes that change torch operations: what they do to a formula they do to its gradients too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import schedule

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")


class Overriding(Tensor):
    """Doubles what some functions return."""

    changed: tuple[Any, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return result * 2 if func in cls.changed else result


class OverridingParameter(Overriding, nn.Parameter):
    """Does so as a parameter."""


class OverridingMode(TorchDispatchMode):
    """Doubles what some operators return, in the forward pass."""

    def __init__(self, *changed: Any) -> None:
        super().__init__()
        self.changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in self.changed else result


class Norm(nn.Module):
    """RMS norm, as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x


class Gated(nn.Module):
    """Two products of a linear layer and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Activation(nn.Module):
    """Bias and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias)


class Scores(nn.Module):
    """Scale, mask, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[-2], x.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        return torch.softmax((x * 0.5).masked_fill(mask, -1e9), -1) * self.scale


class Loss(nn.Module):
    """A product and its cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x).view(-1, 16)
        return F.cross_entropy(logits, torch.arange(logits.shape[0], device=x.device) % 16)


FUNCTIONS = {
    Norm: (torch.rsqrt, Tensor.mul, Tensor.__mul__, torch.mul),
    Gated: (F.silu, Tensor.mul, Tensor.__mul__),
    Activation: (F.gelu, Tensor.add, Tensor.__add__),
    Scores: (torch.softmax, Tensor.softmax, Tensor.masked_fill),
    Loss: (F.cross_entropy, F.linear),
}
aten = torch.ops.aten
OPERATORS = {
    Norm: (aten.rsqrt.default, aten.mul.Tensor),
    Gated: (aten.silu.default, aten.mul.Tensor),
    Activation: (aten.gelu.default, aten.add.Tensor),
    Scores: (aten._softmax.default, aten.masked_fill.Scalar),
    Loss: (aten._log_softmax.default, aten.mm.default),
}
KINDS = list(FUNCTIONS)


def pair(kind: type[nn.Module], rules: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    twin = nn.Sequential(kind())
    model = copy.deepcopy(twin)
    assert schedule.optimize(model, torch.randn(2, 4, 8), rules=rules, cost_guard=False).applied
    return model, twin


def seen(model: nn.Module, given: Callable[[], Tensor]) -> list[Tensor]:
    """The output and all gradients, as plain tensors."""
    torch.manual_seed(1)
    x = given().requires_grad_()
    out = model(x)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(out.sin().sum(), [x, *parameters], allow_unused=True)
    return [each.as_subclass(Tensor) for each in (out, *grads) if each is not None]


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_inputs_that_override_functions(kind: type[nn.Module], rules: str) -> None:
    model, twin = pair(kind, rules)
    for function in FUNCTIONS[kind]:
        own = type("Own", (Overriding,), {"changed": (function,)})
        given = lambda own=own: torch.randn(3, 4, 8).as_subclass(own)  # noqa: E731
        torch.testing.assert_close(seen(model, given), seen(twin, given), msg=lambda m, f=function: f"{f}: {m}")


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_parameters_that_override_functions(kind: type[nn.Module], rules: str) -> None:
    for function in FUNCTIONS[kind]:
        model, twin = pair(kind, rules)
        own = type("Own", (OverridingParameter,), {"changed": (function,)})
        for each in (model, twin):
            for module in each.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    setattr(module, name, parameter.detach().clone().as_subclass(own).requires_grad_())
        given = lambda: torch.randn(3, 4, 8)  # noqa: E731
        torch.testing.assert_close(seen(model, given), seen(twin, given), msg=lambda m, f=function: f"{f}: {m}")


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_modes_that_change_operators(kind: type[nn.Module], rules: str) -> None:
    model, twin = pair(kind, rules)

    def run(each: nn.Module, mode: OverridingMode) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(3, 4, 8, requires_grad=True)
        with mode:
            out = each(x)
        grads = torch.autograd.grad(out.sin().sum(), [x, *each.parameters()])
        return [out, *grads]

    for operator in OPERATORS[kind]:
        found, expected = run(model, OverridingMode(operator)), run(twin, OverridingMode(operator))
        torch.testing.assert_close(found, expected, msg=lambda m, o=operator: f"{o}: {m}")
