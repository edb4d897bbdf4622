"""Star-ReLU: shapes of the scale, dtypes, errors; `cases_star_relu.py` has the quality lines."""

from __future__ import annotations

import pytest
import torch

import fused
from tests.fused.cases_star_relu import eager_star_relu

Tensor = torch.Tensor


def gradients(function: object, *tensors: Tensor) -> tuple[Tensor, ...]:
    result = function(*tensors)  # type: ignore[operator]
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad((result * weights).sum(), [t for t in tensors if t.requires_grad])


@pytest.mark.parametrize("shape", [(), (1,), (8,)], ids=str)
@pytest.mark.parametrize("needing", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_only_what_needs_a_gradient(shape: tuple[int, ...], needing: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(each, dtype=torch.float64) for each in ((3, 5, 8), shape, shape)]
    tensors = [tensor.requires_grad_(n in needing) for n, tensor in enumerate(drawn)]
    torch.testing.assert_close(gradients(fused.star_relu, *tensors), gradients(eager_star_relu, *tensors))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_dtypes_of_mixed_tensors(shape: tuple[int, ...]) -> None:
    for of_x, of_scale in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        given = (torch.randn(2, 8).to(of_x), torch.ones(shape, dtype=of_scale), torch.zeros(shape, dtype=of_scale))
        tensors = [tensor.requires_grad_() for tensor in given]
        mine, theirs = gradients(fused.star_relu, *tensors), gradients(eager_star_relu, *tensors)
        assert [t.dtype for t in mine] == [t.dtype for t in theirs]


def test_errors_say_what_to_do() -> None:
    x, one = torch.randn(3, 8), torch.ones(1)
    with pytest.raises(ValueError, match=r"scale must be \[8\], \[1\] or \[\] for x \[3, 8\], got \[3\]"):
        fused.star_relu(x, torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"scale \[1\] and bias \[8\] must have one shape"):
        fused.star_relu(x, one, torch.ones(8))
    with pytest.raises(TypeError, match="bias must be float16"):
        fused.star_relu(x, one, one.long())
    with pytest.raises(ValueError, match="is on meta"):
        fused.star_relu(x, one.to("meta"), one)
