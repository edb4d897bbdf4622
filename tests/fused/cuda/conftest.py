"""Shared by the tests marked `cuda`: the card, and every op on its Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import fused
from tests.fused.cases import Case, Function, Tensor


@pytest.fixture(autouse=True)
def plain_backend() -> Iterator[None]:
    """The kernels of Triton instead of the reference."""
    with fused.backend("triton"):
        yield


@pytest.fixture
def on_card(card: torch.device) -> Callable[..., list[Tensor]]:
    """``on_card(case, dtype, seed=0)``: inputs of a case on the card, with gradients for those that get one."""

    def make(case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        torch.manual_seed(seed)
        given = case.inputs(24, 64)
        wanted = case.differentiable(given)
        made = [tensor.to(card, dtype if tensor.is_floating_point() else None) for tensor in given]
        return [tensor.requires_grad_(n in wanted) for n, tensor in enumerate(made)]

    return make


@pytest.fixture
def results_and_gradients() -> Callable[[Function, Sequence[Tensor]], tuple[Tensor, ...]]:
    """``run(f, inputs)``: the results of f, and the gradients for results weighted by 1, 1/2, 1/3, …."""

    def run(function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        weights = [torch.arange(1, one.numel() + 1, device=one.device).reciprocal().view_as(one) for one in outs]
        found = torch.autograd.grad(
            outs,
            [one for one in inputs if one.requires_grad],
            [w.to(one.dtype) for w, one in zip(weights, outs, strict=True)],
        )
        return (*(one.detach() for one in outs), *found)

    return run
