"""Which autograd functions are entered: those whose backward is the derivative of their forward, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import schedule
from schedule.capture.effects.autograd_functions import Applied

Tensor = torch.Tensor


class Swish(Function):
    """x·σ(x), as many models have it to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class TwoPartSwish(Swish):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class Scaled(Swish):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 1.01 * Swish.backward(ctx, g)


class StraightThrough(Swish):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Clipped(Swish):
    """Right but for large gradients: no sample would tell."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Swish.backward(ctx, g).clamp(-1e6, 1e6)


class Branching(Swish):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Swish.backward(ctx, g) if float(g.detach().abs().max()) < 1e6 else g


class Model(nn.Module):
    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x))


@pytest.mark.parametrize("function", [Swish, TwoPartSwish])
def test_a_derivative_is_entered_and_rewritten(function: type[Function]) -> None:
    model, x = Model(function), torch.randn(3, 4)
    sch = schedule.create_schedule(model, x)
    state = torch.get_rng_state()
    report = schedule.optimize(sch, cost_guard=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.applied == {"bias_silu": 1}
    schedule.verify(sch, x)
    model(torch.randn(5, 4))
    assert not report.fallbacks, "the number of rows stays open"


@pytest.mark.parametrize("function", [Scaled, StraightThrough, Clipped, Branching])
def test_any_other_backward_stays(function: type[Function]) -> None:
    sch = schedule.create_schedule(Model(function), torch.randn(3, 4))
    assert any(isinstance(node.target, Applied) for node in sch.graph.nodes)
    assert not schedule.optimize(sch, cost_guard=False).applied
