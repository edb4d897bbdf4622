"""The kernels of the gated activations."""

from __future__ import annotations

import math

import pytest
import torch

import fused
from fused.backends.reference.activations import ACTIVATIONS
from fused.gated_autograd import GATED_ACTIVATION

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 2, 3, 17, 65, 600, 1025)
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape, dtype=torch.float32, device="cpu"):
    """Of a size that products of three, which round where the slope cancels, keep to the tolerances."""
    return torch.randn(shape).to(device, dtype)


@pytest.fixture
def check(check_against_float64):
    """Both parts of the op; all gradients that there are, or those asked for."""

    def run(name, g, y, up=None, bias=None, weights=None, offset=None, clamp=None, needs=None):
        operands = (y, up, bias, weights, offset, clamp)
        (out,) = check_against_float64(GATED_ACTIVATION, "forward", operands, activation=name)
        needs = needs or tuple(tensor is not None for tensor in operands[:4])
        grads = check_against_float64(
            GATED_ACTIVATION, "backward", (g / 4, *operands), sums=(2, 3), activation=name, needs=needs
        )
        assert tuple(gradient is not None for gradient in grads) == needs
        return out, *grads

    return run


@every_activation
@every_dtype
def test_every_activation(check, device, name, dtype):
    g, gate, up = (normal(3, 7, 65, dtype=dtype, device=device) for _ in range(3))
    check(name, g, gate, up)
    check(name, g, torch.cat((gate, up), -1), bias=normal(130, dtype=dtype, device=device))


@every_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_width_with_everything(check, device, columns, dtype):
    y, g = normal(5, 2 * columns, dtype=dtype, device=device), normal(5, columns, dtype=dtype, device=device)
    bias, weights = normal(2 * columns, dtype=dtype, device=device), normal(5, 1, device=device)
    check("quick_gelu", g, y, bias=bias, weights=weights, offset=1.0, clamp=1.5)
    check("silu", g, y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 2, 63, 300])
def test_sums_over_many_rows_and_columns(check, device, rows):
    y, g, bias = normal(rows, 1300, device=device), normal(rows, 650, device=device), normal(1300, device=device)
    weights = normal(rows, 1, device=device)
    first, second = (check("gelu_tanh", g, y, bias=bias, weights=weights) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True) if pair[0] is not None)


def test_strides_ranks_and_mixed_dtypes(check, device):
    y = normal(4, 6, 130, dtype=torch.bfloat16, device=device)
    g = normal(1, 1, 65, device=device).expand(4, 6, 65)
    check("silu", g.bfloat16(), *y.chunk(2, -1))
    check("silu", g.bfloat16(), y[..., ::2], y[..., 1::2])
    out, dgate, dup, *_ = check("silu", g, y[..., :65], normal(4, 6, 65, device=device))
    assert (out.dtype, dgate.dtype, dup.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    check("silu", normal(65, device=device), normal(65, device=device), normal(65, device=device))
    check("silu", normal(65, device=device), normal(130, device=device), weights=normal(1, device=device))


def test_only_what_is_needed(check, device):
    g, gate, up = (normal(5, 65, device=device) for _ in range(3))
    bias, weights = normal(130, device=device), normal(5, 2, device=device)[:, :1]
    for needs in ((True, False, False, False), (False, True, False, False), (False, False, False, True)):
        check("relu", g, gate, up, weights=weights, needs=needs)
    for needs in ((True, False, False, False), (False, False, True, False)):
        check("relu", g, torch.cat((gate, up), -1), bias=bias, needs=needs)


@every_activation
@pytest.mark.parametrize("clamp", [None, 3.0])
def test_large_numbers_infinities_and_nan(device, name, clamp):
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-30, 100.0, -100.0, 3.0, -3.0], device=device)
    if name in ("relu6", "hard_swish"):  # torch's kernels for a vector and for its rest differ in the slope at NaN
        special = special[1:]
    usual = torch.tensor([-1.0, 0.5, 2.0], device=device)
    gate, up = torch.cat((torch.cartesian_prod(special, usual), torch.cartesian_prod(usual, special))).T
    results = []
    for backend in ("triton", "reference"):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        with fused.backend(backend):
            out = fused.gated_activation(*leaves, name, clamp_value=clamp)
            results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    torch.testing.assert_close(*results, rtol=1.3e-6, atol=1e-6, equal_nan=True)


def test_a_clamp_has_the_gradient_of_torch_at_its_limit(device):
    y = torch.tensor([[2.0, 2.5, -9.0, -2.0, 2.0, 2.5]], device=device, requires_grad=True)
    with fused.backend("triton"):
        fused.swiglu(y, clamp_value=2.0).sum().backward()
    limits = y.detach().requires_grad_()
    torch.cat((limits[:, :3].clamp(max=2), limits[:, 3:].clamp(-2, 2)), -1).sum().backward()
    assert (y.grad != 0).tolist() == (limits.grad != 0).tolist()


def test_offsets_beyond_two_to_the_31st(far_rows):
    numbers = torch.randn(2, 130, dtype=torch.float16)
    far = far_rows(numbers)
    with fused.backend("triton"):
        out = fused.swiglu(far)
    with fused.backend("reference"):
        torch.testing.assert_close(out.cpu(), fused.swiglu(numbers), rtol=1e-3, atol=1e-5)


def test_float64_is_left_to_others(device, launches):
    y = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    with fused.backend("triton"):
        fused.swiglu(y).sum().backward()
    assert not launches and y.grad is not None


@pytest.mark.slow
def test_compiles_for_a_hopper(compile_for_hopper):
    code = """
import fused
from fused.backends.reference.activations import ACTIVATIONS
y, bias, weights = torch.randn(64, 512), torch.randn(512), torch.rand(64, 1)
with fused.backend("triton"):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.to(dtype).requires_grad_() for t in (y, bias, weights)]
        fused.weighted_bias_quick_geglu(*inputs, 1.0, clamp_value=7.0).sum().backward()
        for name in ACTIVATIONS:
            fused.gated_activation(*inputs[0].chunk(2, -1), name).sum().backward()
"""
    assert compile_for_hopper(code) == 2 * 2 * (1 + len(ACTIVATIONS))  # dtypes, passes, ops
