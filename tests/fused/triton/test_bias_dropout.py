"""The kernels of bias + dropout + residual."""

from __future__ import annotations

import importlib

import pytest
import torch

import fused
from fused.bias_dropout import BIAS_DROPOUT
from fused.philox import DropoutStream, threshold

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


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("columns", [8, 24, 1032])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vector", [4, 8])
def test_a_drawn_mask_is_that_of_the_stream(device, launches, dtype, columns, vector):
    stream = DropoutStream(2**63 + 2**35 + 7, 2**33 + 5, threads=512, vector=vector, threshold=threshold(0.7))
    rows = 9 if columns == 1032 else 300
    x, residual = (draw(device, rows, columns).to(dtype) for _ in range(2))
    bias, keep = draw(device, columns).to(dtype), stream.mask(x.shape, x.device)
    for args in ((x, bias, residual), (x, None, None)):
        drawn, read = (BIAS_DROPOUT.run("forward", (*args, kept, 1.5), "triton") for kept in (stream, keep))
        assert torch.equal(drawn, read)
    for dtypes in ({"x_dtype": dtype, "bias_dtype": dtype}, {"x_dtype": dtype, "bias_dtype": None}):
        drawn, read = (BIAS_DROPOUT.run("backward", (x, kept, 1.5), "triton", **dtypes) for kept in (stream, keep))
        assert torch.equal(drawn[0], read[0])
        assert drawn[1] is read[1] is None or torch.equal(drawn[1], read[1])
    assert launches == {"_forward": 4, "_backward": 4}


def test_double_backward_reads_the_mask_of_the_stream(device, monkeypatch):
    stream = DropoutStream(3, 2, threads=256, vector=4, threshold=threshold(0.5))
    monkeypatch.setattr(importlib.import_module("fused.bias_dropout"), "_stream", lambda *args: stream)
    x = draw(device, 4, 8).requires_grad_()
    with fused.backend("triton"):
        out = fused.bias_dropout(x, None, 0.5)
    (first,) = torch.autograd.grad(out, x, out.detach(), create_graph=True)
    torch.testing.assert_close(first, 4 * x.detach() * stream.mask(x.shape, x.device))
    assert torch.equal(out, 2 * x * stream.mask(x.shape, x.device))


def test_drawn_dropout_compiles_for_a_gpu(compile_for_hopper):
    code = """
import torch
import fused
from fused.bias_dropout import BIAS_DROPOUT
from fused.philox import DropoutStream, threshold
from fused.philox import DropoutStream
x = torch.zeros(16, 4096)
for seed, first, dtype, vector in ((1, 3, torch.float32, 4), (2**63, 2**40, torch.bfloat16, 8)):
    keep = DropoutStream(seed, first, 2**18, vector, 2**31)
    BIAS_DROPOUT.run("forward", (x.to(dtype), x[0], x, keep, 2.0), "triton")
    BIAS_DROPOUT.run("backward", (x.to(dtype), keep, 2.0), "triton", x_dtype=dtype, bias_dtype=dtype)
"""
    assert compile_for_hopper(code) == 4
