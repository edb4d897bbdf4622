"""The kernels of bias + dropout + residual."""

from __future__ import annotations

import pytest
import torch

from fused.bias_dropout import BIAS_DROPOUT

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def draw(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device)


@pytest.mark.parametrize("columns", [1, 3, 65, 600])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_forward(check_against_float64, device, dtype, columns):
    x, residual = draw(device, 3, 5, columns).to(dtype), draw(device, 3, 5, columns).to(dtype)
    bias, keep = draw(device, columns).to(dtype), draw(device, 3, 5, columns) > 0
    for args in (
        (x, bias, residual, keep, 1.25),
        (x, None, residual, keep, 1.25),
        (x, bias, None, keep, 1.25),
        (x, bias, residual, None, 1.0),
        (x[0, 0], bias, residual[0, 0], keep[0, 0], 1.25),
    ):
        check_against_float64(BIAS_DROPOUT, "forward", args)


def test_forward_of_mixed_dtypes_and_strides(check_against_float64, device):
    x, bias = draw(device, 7, 130)[:, ::2].bfloat16(), draw(device, 130)[::2]
    residual, keep = draw(device, 65, 7).t(), draw(device, 65, 7).t() > 0
    (out,) = check_against_float64(BIAS_DROPOUT, "forward", (x, bias, residual, keep, 2.0))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("columns", [1, 3, 65, 600])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_backward(check_against_float64, device, dtype, columns):
    rows = 70 if columns == 600 else 5
    g, keep = draw(device, rows, 2, columns).to(dtype), draw(device, rows, 2, columns) > 0
    for x_dtype, bias_dtype in ((dtype, dtype), (None, dtype), (dtype, None), (torch.bfloat16, torch.float32)):
        if x_dtype is not None and x_dtype.itemsize > dtype.itemsize:
            continue
        dtypes = {"x_dtype": x_dtype, "bias_dtype": bias_dtype}
        check_against_float64(BIAS_DROPOUT, "backward", (g, keep, 1.25), sums=(1,), **dtypes)
        check_against_float64(BIAS_DROPOUT, "backward", (g, None, 1.0), sums=(1,), **dtypes)


def test_a_dropped_nan_stays(check_against_float64, device):
    x, keep = draw(device, 2, 8), torch.zeros(2, 8, dtype=torch.bool, device=device)
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    (out,) = check_against_float64(BIAS_DROPOUT, "forward", (x, None, None, keep, 1.25))
    assert out.isnan().sum() == 2


def test_float64(check_against_float64, device, launches):
    x, bias, residual = (draw(device, 4, 7).double() for _ in range(3))
    check_against_float64(BIAS_DROPOUT, "forward", (x, bias[0], residual, None, 1.0))
    check_against_float64(BIAS_DROPOUT, "backward", (x, None, 1.0), x_dtype=torch.float64, bias_dtype=torch.float64)
    with pytest.raises(AssertionError, match="no kernel"):
        check_against_float64(BIAS_DROPOUT, "forward", (x, bias[0], residual, x > 0, 1 / 0.9))
    with pytest.raises(AssertionError, match="no kernel"):
        dtypes = {"x_dtype": torch.float64, "bias_dtype": None}
        check_against_float64(BIAS_DROPOUT, "backward", (x, x > 0, 1 / 0.9), **dtypes)
