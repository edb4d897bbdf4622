"""The adaptive layer norm: broadcasting, dtypes, errors; `cases_adaptive_norm.py` has the quality lines."""

from __future__ import annotations

import pytest
import torch

import fused
from tests.fused.cases_adaptive_norm import EPS, adaptive, eager_adaptive

Tensor = torch.Tensor


@pytest.mark.parametrize("shape", [(3, 1, 8), (1, 5, 1), (5, 8), (8,), (1,), (3, 5, 8)])
def test_factors_of_any_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(each, dtype=torch.float64, requires_grad=True) for each in ((3, 5, 8), shape, shape)]
    mine, theirs = adaptive(*tensors), eager_adaptive(*tensors)
    torch.testing.assert_close(mine, theirs)
    weights = torch.randn_like(mine)
    for ours, eager in zip(
        torch.autograd.grad((mine * weights).sum(), tensors),
        torch.autograd.grad((theirs * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


def test_a_result_that_is_larger_than_the_input() -> None:
    x, scale = torch.randn(1, 5, 8), torch.randn(3, 1, 8)
    torch.testing.assert_close(adaptive(x, scale, scale), eager_adaptive(x, scale, scale))


def test_the_dtypes_of_mixed_tensors() -> None:
    x, scale = torch.randn(2, 5, 8).bfloat16(), torch.randn(2, 1, 8)
    for given in ((x, scale, scale), (x, scale.bfloat16(), scale), (x, scale.bfloat16(), scale.bfloat16())):
        assert adaptive(*given).dtype == eager_adaptive(*given).dtype
    one = torch.tensor(0.5, dtype=torch.float64)
    assert adaptive(x.float(), one, None).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(3, 4), torch.ones(5), None), ValueError, "do not broadcast"),
        ((torch.ones(3, 4), torch.ones(4, dtype=torch.int64), None), TypeError, "scale must be float16"),
        ((torch.ones(3, 4), None, None, torch.ones(3)), ValueError, r"weight must have shape \[4\]"),
        ((torch.ones(3, 4), None, None, None, None, "small"), TypeError, "eps must be a number"),
        (([1.0], None, None), TypeError, "input must be a tensor"),
    ],
)
def test_errors(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fused.adaptive_layer_norm(*arguments)


def test_without_factors_it_is_a_layer_norm() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    mine = fused.adaptive_layer_norm(x, None, None, weight, eps=EPS)
    torch.testing.assert_close(mine, eager_adaptive(x, None, None, weight))
