"""Verification with ``create_graph``: what is right once may be wrong when it is differentiated again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.util.errors import VerificationError
from schedule.verify import equivalent, verify

from .models import FakeSchedule, bert, floats, gpt2, llama, token_batch

pytestmark = pytest.mark.unwritable("its steps are of a fake primitive")

BATCH = floats(3, 4, 8)


class Squared(nn.Module):
    """The fourth power of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(self.linear(x)).pow(2)

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class _Once(torch.autograd.Function):
    """A square whose backward forgets that its operand has a history."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * grad


class _Raises(_Once):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Detached(Squared):
    def square(self, x: torch.Tensor) -> torch.Tensor:
        return _Once.apply(x)


class OnceDifferentiable(Squared):
    def square(self, x: torch.Tensor) -> torch.Tensor:
        return _Raises.apply(x)


class Same(Squared):
    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2)


def swapped(kind: type[Squared], original: type[Squared] = Squared) -> FakeSchedule:
    sch = FakeSchedule(nn.Sequential(original()))
    sch.swap_class("0", kind, "fuse(square)")
    return sch


@pytest.mark.parametrize("kind", [Detached, OnceDifferentiable])
def test_a_wrong_or_missing_second_derivative_is_found_where_asked_for(kind: type[Squared]) -> None:
    assert verify(swapped(kind), BATCH) and verify(swapped(kind), BATCH, steps=1, create_graph=False)
    for options in ({"steps": 1}, {"create_graph": True}):
        with pytest.raises(VerificationError, match=r"(?s)^fuse\(square\) changed .*gradient of the gradient norm"):
            verify(swapped(kind), BATCH, **options)


def test_equal_second_derivatives_pass_and_are_compared() -> None:
    report = verify(swapped(Same), BATCH, steps=1).report
    compared = [case for case in report.cases if any("norm" in d.kind for d in case.deviations)]
    assert [(case.mode, case.weights) for case in compared] == [("train", "own"), ("train", "perturbed")]
    assert not report.skipped
    twin = Squared()
    assert equivalent(twin, twin, BATCH, steps=1) and equivalent(twin, twin, BATCH, training=False, create_graph=True)


def test_an_original_without_them_is_named() -> None:
    report = verify(swapped(Same, OnceDifferentiable), BATCH, steps=1).report
    told = [reason for reason in report.skipped if "norm: the original raises trying to differentiate twice" in reason]
    assert report.equal and len(told) == 2


class Cornered(nn.Module):
    """|x|^1.5, with a gradient of zero at zero and no second derivative there."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.power((x + self.bias).abs())

    def power(self, size: torch.Tensor) -> torch.Tensor:
        return size**1.5


class Rounded(Cornered):
    """Flat beside zero."""

    def power(self, size: torch.Tensor) -> torch.Tensor:
        return size.clamp_min(1e-12) ** 1.5


class RoundedOnce(Cornered):
    def power(self, size: torch.Tensor) -> torch.Tensor:
        return _Once.apply(size.clamp_min(1e-12) ** 0.75)


def test_elements_without_a_second_derivative_in_the_original_are_left_out() -> None:
    batch = torch.cat([floats(3, 7), torch.zeros(3, 1)], dim=1)
    report = equivalent(Cornered(), Rounded(), batch, steps=1)
    told = [reason for reason in report.skipped if "norm: elements that are not finite in the original, of " in reason]
    assert report.equal and told
    assert not equivalent(Cornered(), RoundedOnce(), batch, steps=1).equal, "wrong in the others"
    assert not equivalent(Rounded(), Cornered(), batch, steps=1).equal, "lost, where the original has one"


def test_a_gradient_of_zero_has_a_norm_to_differentiate() -> None:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    zero = torch.zeros(2, 4)
    assert equivalent(model, model, zero, steps=1)


@pytest.mark.parametrize("rules", ["memory", "all"])
@pytest.mark.parametrize("make", [gpt2, bert, llama])
def test_optimized_models_have_the_second_derivatives_of_the_original(make: Any, rules: str) -> None:
    check = schedule.optimize(make(), token_batch(), rules=rules).verify(token_batch(), steps=1)
    assert check.equal and any("norm" in d.kind for case in check.cases for d in case.deviations)
