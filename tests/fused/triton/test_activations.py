"""The kernels of bias + activation."""

from __future__ import annotations

import math

import pytest
import torch

import fused
from fused.activations import BIAS_ACTIVATION, WEIGHTED_SQUARED_RELU
from fused.backends.reference.activations import ACTIVATIONS

COLUMNS = (1, 2, 3, 17, 63, 64, 65, 127, 1000, 4097, 50257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
every_width = pytest.mark.parametrize("columns", COLUMNS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BOTH = (True, True)


def normal(*shape, dtype, device, spread=2.0):
    return (spread * torch.randn(shape)).to(device, dtype)


@every_activation
@every_dtype
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_every_activation(check_against_float64, device, name, dtype, biased):
    x, g = (normal(3, 7, 65, dtype=dtype, device=device) for _ in range(2))
    bias = normal(65, dtype=dtype, device=device) if biased else None
    (out,) = check_against_float64(BIAS_ACTIVATION, "forward", (x, bias), activation=name)
    saved = out if ACTIVATIONS[name].saves_result(dtype) else x
    needs = (True, biased)
    check_against_float64(BIAS_ACTIVATION, "backward", (g, saved, bias), sums=(1,), activation=name, needs=needs)


@pytest.mark.one_in(4)
@every_width
@every_dtype
def test_every_width(check_against_float64, device, columns, dtype):
    x, g = (normal(5, columns, dtype=dtype, device=device) for _ in range(2))
    bias = normal(columns, dtype=dtype, device=device)
    check_against_float64(BIAS_ACTIVATION, "forward", (x, bias), activation="gelu_tanh")
    check_against_float64(BIAS_ACTIVATION, "backward", (g, x, bias), sums=(1,), activation="gelu_tanh", needs=BOTH)
    weights = normal(5, 1, dtype=torch.float32, device=device)
    check_against_float64(WEIGHTED_SQUARED_RELU, "forward", (x, weights))
    check_against_float64(WEIGHTED_SQUARED_RELU, "backward", (g, x, weights), sums=(1,), needs=BOTH)


@pytest.mark.parametrize("rows", [1, 2, 63, 300])
def test_the_bias_gradient_over_many_rows(check_against_float64, device, rows):
    x, g = (normal(rows, 130, dtype=torch.float32, device=device) for _ in range(2))
    bias = normal(130, dtype=torch.float32, device=device)
    first, second = (
        check_against_float64(BIAS_ACTIVATION, "backward", (g, x, bias), sums=(1,), activation="silu", needs=BOTH)
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_mixed_dtypes_strides_and_only_what_is_needed(check_against_float64, device):
    x = normal(6, 5, 8, dtype=torch.bfloat16, device=device).permute(2, 1, 0)[::2]
    g = normal(1, 1, 6, dtype=torch.float32, device=device).expand(4, 5, 6)
    bias = normal(12, dtype=torch.float32, device=device)[::2]
    (out,) = check_against_float64(BIAS_ACTIVATION, "forward", (x, bias), activation="gelu")
    assert out.dtype == torch.float32
    for needs in ((True, False), (False, True), BOTH):
        dx, dbias = check_against_float64(
            BIAS_ACTIVATION, "backward", (g, x, bias), sums=(1,), activation="gelu", needs=needs
        )
        assert (dx is not None, dbias is not None) == needs
    weights = normal(4, 5, 2, dtype=torch.float16, device=device)[..., :1]
    check_against_float64(WEIGHTED_SQUARED_RELU, "forward", (x, weights))
    for needs in ((True, False), (False, True), BOTH):
        check_against_float64(WEIGHTED_SQUARED_RELU, "backward", (g, x, weights), needs=needs)


@every_activation
def test_large_numbers_infinities_and_nan(name, device):
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, 100.0, -100.0, 1e15, -1e15], device=device)
    if name in ("relu6", "hard_swish"):  # torch's kernels for a vector and for its rest differ in the slope at NaN
        x = x[1:]
    results = []
    for backend in ("triton", "reference"):
        leaf = x.clone().requires_grad_()
        with fused.backend(backend):
            out = fused.bias_activation(leaf, None, name)
            results.append((out, *torch.autograd.grad(out, leaf, torch.ones_like(x))))
    torch.testing.assert_close(results[0], results[1], rtol=1.3e-6, atol=1e-6, equal_nan=True)


def test_tanh_keeps_its_digits_near_zero(device):
    x = torch.logspace(-30, 2, 2001, dtype=torch.float64).float().to(device)
    with fused.backend("triton"):
        out = fused.bias_activation(torch.cat([x, -x]), None, "tanh")
    torch.testing.assert_close(out.double(), torch.cat([x, -x]).double().tanh(), rtol=5e-7, atol=0)


def test_erf_gelu_keeps_its_digits_below_zero(device):
    x = torch.linspace(-5, 5, 20001).to(device).requires_grad_()
    with fused.backend("triton"):
        out = fused.bias_activation(x, None, "gelu")
    exact = x.detach().double().requires_grad_()
    expected = torch.nn.functional.gelu(exact)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=0)
    slope, exact_slope = (torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in ((out, x), (expected, exact)))
    torch.testing.assert_close(slope.double(), exact_slope, rtol=0, atol=4e-7)


def test_rows_far_apart(far_rows, device):
    numbers = torch.randn(2, 17, dtype=torch.float16)
    far, bias = far_rows(numbers), torch.randn(17, dtype=torch.float16, device=device)
    backward = {"activation": "gelu_tanh", "needs": BOTH}
    ours = [
        BIAS_ACTIVATION.run("forward", (far, bias), "triton", activation="gelu_tanh"),
        *BIAS_ACTIVATION.run("backward", (far, far, bias), "triton", **backward),
    ]
    near = numbers.to(device)
    plain = [
        BIAS_ACTIVATION.run("forward", (near, bias), "triton", activation="gelu_tanh"),
        *BIAS_ACTIVATION.run("backward", (near, near, bias), "triton", **backward),
    ]
    assert all(map(torch.equal, ours, plain))


def test_float64_is_left_to_torch(device, launches):
    x = torch.randn(2, 3, dtype=torch.float64, device=device)
    with fused.backend("triton"):
        out = fused.weighted_squared_relu(fused.new_gelu(x), x[:, :1])
    assert not launches and out.dtype == torch.float64


def test_the_public_functions_run_the_kernels(device, launches):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    with fused.backend("triton"):
        out = fused.bias_gelu(x, torch.randn(6, device=device))
        fused.weighted_squared_relu(out, x[:, :1]).sum().backward()
    assert dict(launches) == {
        "_activation": 1,
        "_squared_relu": 1,
        "_squared_relu_backward": 1,
        "_activation_backward": 1,
    }


def test_kernels_compile_for_a_gpu(compile_for_hopper):
    code = """
import torch, fused
from fused.backends.reference.activations import ACTIVATIONS
fused.backend("triton")
def both(dtype, columns, name, biased):
    x, bias = torch.randn(3, columns).to(dtype).requires_grad_(), torch.randn(columns, requires_grad=True)
    out = fused.bias_activation(x, bias.to(dtype) if biased else None, name)
    out.backward(torch.ones_like(out))
for name in ACTIVATIONS:
    both(torch.bfloat16, 3072, name, True)
both(torch.float16, 1, "silu", True)
both(torch.float32, 50257, "silu", True)
both(torch.float32, 50257, "silu", False)
x = torch.randn(3, 3072, requires_grad=True)
fused.weighted_squared_relu(x, torch.randn(3, 1, requires_grad=True)).backward(torch.ones_like(x))
"""
    assert compile_for_hopper(code) == 2 * (11 + 3 + 1)
