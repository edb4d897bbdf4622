"""The kernels of the norms."""

from __future__ import annotations

import pytest
import torch

import fused
from fused.backends.triton.norms import WHOLE
from fused.norms_autograd import LAYER_NORM, RMS_NORM

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 2, 17, 65, 600, 1025)
CASTINGS = ("llama", "gemma", "torch")
EPS = 1e-5
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def normal(device):
    """Numbers with a mean."""
    return lambda *shape, dtype=torch.float32: (torch.randn(shape, device=device) + 0.5).to(dtype)


@pytest.fixture
def check_rms(check_against_float64):
    """Both parts of the op, with all gradients or those asked for."""

    def run(g, x, residual=None, weight=None, g_total=None, casting="llama", needs=None):
        operands = (x, residual, weight)
        # In float64 neither the sum is rounded nor what Llama's weights multiply.
        loose = (0, 2) if x.dtype.itemsize == 2 else ()
        out, total, rstd = check_against_float64(RMS_NORM, "forward", operands, loose, eps=EPS, casting=casting)
        needs = needs or (True, weight is not None)
        saved = (x if total is None else total, weight, rstd)
        gradients = check_against_float64(
            RMS_NORM, "backward", (g, g_total, *saved), sums=(0, 1), casting=casting, needs=needs
        )
        assert tuple(gradient is not None for gradient in gradients) == needs
        return out, total, *gradients

    return run


@pytest.fixture
def check_layer(check_against_float64):
    """As `check_rms`."""

    def run(g, x, residual=None, weight=None, bias=None, g_total=None, needs=None):
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        operands = (x, residual, weight, bias)
        loose = (0,) if residual is None else (0, 2, 3)
        out, total, *statistics = check_against_float64(
            LAYER_NORM, "forward", operands, loose, eps=EPS, out_dtype=dtype
        )
        needs = needs or (True, weight is not None, bias is not None)
        gradients = check_against_float64(
            LAYER_NORM,
            "backward",
            (g, g_total, x if total is None else total, weight, *statistics),
            sums=(0, 1, 2),
            needs=needs[:2],
            bias_dtype=bias.dtype if needs[2] else None,
        )
        assert tuple(gradient is not None for gradient in gradients) == needs
        return out, total, *gradients

    return run


@pytest.mark.one_in(4)
@every_dtype
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_width(check_rms, check_layer, normal, columns, dtype):
    x, residual, g, g_total = (normal(2, 5, columns, dtype=dtype) for _ in range(4))
    weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
    check_rms(g, x, None, weight)
    check_rms(g, x, residual, weight, g_total)
    check_layer(g, x, None, weight, bias)
    check_layer(g, x, residual, weight, bias, g_total)


@every_dtype
@pytest.mark.parametrize("casting", CASTINGS)
def test_every_casting(check_rms, normal, casting, dtype):
    check_rms(normal(6, 65, dtype=dtype), normal(6, 65, dtype=dtype), weight=normal(65, dtype=dtype), casting=casting)


@pytest.mark.one_in(3)
@every_dtype
@pytest.mark.parametrize("columns", [pytest.param(WHOLE, marks=pytest.mark.slow), WHOLE + 1, 2 * WHOLE + 777])
def test_rows_longer_than_a_block(check_rms, check_layer, launches, normal, columns, dtype):
    x, residual, g, g_total = (normal(11, columns, dtype=dtype) for _ in range(4))
    weight, bias = normal(columns, dtype=dtype), normal(columns, dtype=dtype)
    check_rms(g, x, residual, weight, g_total)
    check_layer(g, x, residual, weight, bias, g_total)
    assert launches == {"_norm": 2, "_norm_backward" if columns == WHOLE else "_long_norm_backward": 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 2, 63, pytest.param(300, marks=pytest.mark.slow)])
def test_sums_over_many_rows(check_rms, check_layer, normal, rows):
    x, g, weight, bias = normal(rows, 600), normal(rows, 600), normal(600), normal(600)
    for check, parameters in ((check_rms, (weight,)), (check_layer, (weight, bias))):
        first, second = (check(g, x, None, *parameters) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True) if pair[0] is not None)


def test_a_large_mean_does_not_hide_the_deviation(check_layer, normal):
    for columns in (600, WHOLE + 5000):
        check_layer(normal(4, columns), normal(4, columns) + 300)


def test_strides_ranks_and_mixed_dtypes(check_rms, check_layer, normal):
    x, residual = normal(4, 6, 130, dtype=torch.bfloat16)[..., ::2], normal(6, 4, 65).transpose(0, 1)
    g, weight, bias = normal(1, 1, 65).expand(4, 6, 65), normal(130)[::2], normal(65, dtype=torch.bfloat16)
    for check, parameters in ((check_rms, (weight,)), (check_layer, (weight, bias))):
        out, total, dx, *_ = check(g, x, residual, *parameters)
        assert out.dtype == total.dtype == dx.dtype == torch.float32
        check(g[0, 0], residual[0, 0], None, *parameters)
        check(g, residual, None)
    out, _, dx, dweight = check_rms(g, x, None, weight)
    assert (out.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert check_layer(g.bfloat16(), x, None, weight, bias)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("columns", [65, WHOLE + 1])
def test_only_what_is_needed(check_rms, check_layer, normal, columns):
    g, x, weight, bias = normal(5, columns), normal(5, columns), normal(columns), normal(columns)
    for needs in ((True, False), (False, True)):
        check_rms(g, x, None, weight, needs=needs)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        check_layer(g, x, None, weight, bias, needs=needs)


@pytest.mark.parametrize("columns", [8, WHOLE + 1])
def test_infinities_and_nan_stay_in_their_row(normal, columns):
    x, weight, bias = normal(4, columns), normal(columns), normal(columns)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    for op in (lambda: fused.rms_norm(x, weight), lambda: fused.layer_norm(x, weight, bias)):
        with fused.backend("triton"):
            out = op()
        with fused.backend("reference"):
            torch.testing.assert_close(out, op(), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert out[3].isfinite().all()


def test_offsets_beyond_two_to_the_31st(far_rows):
    numbers, weight = torch.randn(2, 130, dtype=torch.float16), torch.randn(130, dtype=torch.float16)
    far = far_rows(numbers)
    with fused.backend("triton"):
        out = fused.rms_norm(far, weight.to(far.device))
    with fused.backend("reference"):
        torch.testing.assert_close(out.cpu(), fused.rms_norm(numbers, weight), rtol=1e-3, atol=1e-5)


def test_float64_is_left_to_others(device, launches):
    x = torch.randn(3, 8, dtype=torch.float64, device=device, requires_grad=True)
    with fused.backend("triton"):
        fused.rms_norm(x, x[0]).sum().backward()
        fused.layer_norm(x, x[0], x[1]).sum().backward()
    assert not launches and x.grad is not None


@pytest.mark.slow
def test_compiles_for_a_hopper(compile_for_hopper):
    code = f"""
import fused
for columns in (512, {2 * WHOLE}):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(*shape, dtype=dtype) for shape in ((64, columns), (64, columns), (columns,), (columns,))]
        x, residual, weight, bias = (t.requires_grad_() for t in inputs)
        with fused.backend("triton"):
            for casting in ("llama", "gemma", "torch"):
                fused.rms_norm(x, weight, casting=casting).sum().backward()
            fused.layer_norm(x, weight, bias).sum().backward()
            for pair in (fused.add_rms_norm(x, residual, weight), fused.add_layer_norm(x, residual, weight, bias)):
                (pair[0].sum() + pair[1].sum()).backward()
"""
    assert compile_for_hopper(code) == 48
