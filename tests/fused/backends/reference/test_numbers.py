"""Rounding by the bits is the rounding of a cast; sums of compiled code are as exact as those of plain torch."""

from __future__ import annotations

import pytest
import torch

from fused.backends import inductor
from fused.backends.reference.numbers import rounded_to, sum_over, sum_over_rows, with_block_sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_under_a_compiler_is_that_of_a_cast(dtype):
    torch.manual_seed(0)
    steps = torch.arange(0, 2**13) * 2.0**-25  # float16's subnormal numbers, and the ties between them
    ties = torch.rand(1000).to(dtype).float() * (1 + torch.finfo(dtype).eps / 2)
    p = torch.cat([torch.rand(10_000), torch.rand(10_000) ** 20, steps, ties.clamp(max=1), torch.tensor([1.0])])
    compiled = torch.compile(lambda p: rounded_to(p, dtype), backend="eager", fullgraph=True)
    expected = p.to(dtype).float()
    assert torch.equal(rounded_to(p, dtype), expected)
    assert torch.equal(compiled(p), expected)


def _total(x, *, dims):
    return sum_over(x, dims)


def _halved(g, x):
    return g.float() * x.float() / 2


def _gradient_and_sum(g, x):
    gradient, of_blocks, nothing = with_block_sums(lambda g, x: (_halved(g, x).to(x.dtype), _halved(g, x), None), g, x)
    return gradient, sum_over_rows(of_blocks), nothing


@pytest.mark.usefixtures("warm_inductor")
@pytest.mark.parametrize("shape", [(4096, 24), (4099, 24), (5, 24), (3, 4096), (3, 4099)])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_sums_of_compiled_code_are_exact(shape, dims):
    torch.manual_seed(0)
    x = torch.randn(shape) + 100
    exact = x.double().sum(dims)
    found = inductor.run(_total, [x], {"dims": dims}, "cpu")
    assert ((found - exact).abs() / exact).max() <= 4e-7


@pytest.mark.usefixtures("warm_inductor")
@pytest.mark.parametrize("rows", [1, 8, 16, 1000, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_comes_with_its_unrounded_sum(rows, dtype):
    torch.manual_seed(0)
    g, x = torch.randn(2, rows, 40).to(dtype)
    gradient, total, nothing = inductor.run(_gradient_and_sum, [g, x], {}, "cpu")
    assert torch.equal(gradient, _halved(g, x).to(dtype)) and total.dtype == torch.float32
    assert nothing is None
    torch.testing.assert_close(total, _halved(g, x).double().sum(0).float(), rtol=1e-6, atol=2e-6)
