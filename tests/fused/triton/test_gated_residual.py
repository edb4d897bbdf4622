"""The kernels of the gated residual sum."""

from __future__ import annotations

import importlib

import pytest
import torch

import fused
from fused.gated_residual import GATED_RESIDUAL

SHAPES = [
    ((3, 7, 65), (3, 1, 65)),
    ((300, 130), (130,)),
    ((2, 9, 2, 600), (2, 1, 1, 600)),
    ((3, 7, 65), (3, 7, 1)),
    ((2, 5, 3, 700), (5, 1, 1)),
    ((4, 6), ()),
    ((4, 6), (4, 6)),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("shape", "of_gate"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gate(check_against_float64, device, shape, of_gate, dtype):
    residual, value, g = (torch.randn(shape).to(device, dtype) for _ in range(3))
    gate = torch.randn(of_gate).to(device, dtype)
    check_against_float64(GATED_RESIDUAL, "forward", (residual, value, gate))
    for given, value_dtype in ((value, dtype), (None, dtype), (value, None)):
        check_against_float64(GATED_RESIDUAL, "backward", (g, given, gate), sums=(1,), value_dtype=value_dtype)


def test_mixed_dtypes_and_strides(check_against_float64, device):
    residual = torch.randn(65, 7, 3).to(device).permute(2, 1, 0)
    value = torch.randn(3, 7, 130).to(device, torch.bfloat16)[..., ::2]
    gate = torch.randn(3, 2, 65).to(device, torch.float16)[:, :1]
    (out,) = check_against_float64(GATED_RESIDUAL, "forward", (residual, value, gate))
    assert out.dtype == torch.float32
    given = (residual, value, gate)
    _, of_gate = check_against_float64(GATED_RESIDUAL, "backward", given, sums=(1,), value_dtype=torch.bfloat16)
    assert of_gate.dtype == torch.float16


def test_the_public_function_runs_the_kernels(device, launches):
    residual, value = (torch.randn(2, 5, 8, device=device, requires_grad=True) for _ in range(2))
    with fused.backend("triton"):
        for shape in ((2, 1, 8), (5, 1)):
            fused.gated_residual(
                residual, value, torch.randn(shape, device=device, requires_grad=True)
            ).sum().backward()
    assert dict(launches) == {"_forward": 2, "_backward_along": 1, "_backward_across": 1}


def test_other_gates_and_float64_are_left_to_torch(device):
    kernels = importlib.import_module("fused.backends.triton.gated_residual")
    x, gate = torch.randn(2, 3, 4, 5, device=device), torch.randn(1, 3, 1, 5, device=device)
    for given in ((x, x, gate), (x.double(), x, x[0, 0, 0])):
        assert kernels.gated_residual(*given) is NotImplemented
        assert kernels.gated_residual_backward(*given, value_dtype=x.dtype) is NotImplemented


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(compile_for_hopper):
    code = """
import torch, fused
fused.backend("triton")
for dtype in (torch.float32, torch.bfloat16):
    for shape, of_gate in (((2, 64, 1152), (2, 1, 1152)), ((2, 96, 56, 56), (96, 1, 1))):
        tensors = [torch.randn(each).to(dtype).requires_grad_() for each in (shape, shape, of_gate)]
        fused.gated_residual(*tensors).sum().backward()
"""
    assert compile_for_hopper(code) == 8
