"""A function as a module that rules rewrite, and its results beside those of the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import schedule
from schedule.rules import Rule
from schedule.rules.rule import Form


class Applied(nn.Module):
    """``form`` of the inputs."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: Tensor) -> Any:
        return self.form(*tensors)


def arity(form: Form) -> int:
    """How many tensors a form takes."""
    return len(inspect.signature(form.forward if isinstance(form, nn.Module) else form).parameters)


def rewritten(form: Callable[..., Any], tensors: Sequence[Tensor], rules: str | Sequence[Rule]) -> tuple[Any, int]:
    """The form as a scheduled module, and how many matches were rewritten."""
    module = Applied(form).train()
    report = schedule.optimize(module, tuple(tensors), rules=rules, cost_guard=False)
    return module, report.count()


def results(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all floating inputs, under one seed."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.manual_seed(7)
    returned = function(*inputs)
    outputs = [each for each in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(each, Tensor)]
    torch.manual_seed(8)
    total = torch.stack([(each * torch.randn_like(each)).sum().double() for each in outputs]).sum()
    wanted = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=True))
    return [each.detach() for each in outputs] + list(zeros)


def assert_same(ours: Sequence[Tensor], eager: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Shapes, dtypes and values agree, within the rounding of ``dtype``."""
    close = {torch.float64: 1e-10, torch.float32: 2e-5}[dtype]
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=close, atol=close, equal_nan=True)
