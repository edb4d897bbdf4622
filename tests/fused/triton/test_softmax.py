"""The kernels of the masked softmax."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import fused
from fused.backends.triton import softmax as kernels
from fused.softmax_autograd import MASKED_SOFTMAX

COLUMNS = (1, 2, 3, 17, 63, 64, 65, 127, 1000, 4097, 50257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=["once", "in blocks"])
def rows_held(request, monkeypatch):
    """Both ways through the kernels, whatever the number of keys: blocks of 16."""
    if request.param == "in blocks":
        monkeypatch.setattr(kernels, "WHOLE", 16)
        monkeypatch.setattr("fused.backends.triton.launch.BLOCK", 16)


@pytest.fixture
def check(check_against_float64, device):
    """``check(x, mask, sink, keep, scale, dtype=…, **settings)``: both parts against float64, with all gradients."""

    def run(x, mask=None, sink=None, keep=None, scale=1.0, window=None, shift=0, out_dtype=None, fill=None):
        out_dtype = out_dtype or x.dtype
        args = [x, mask, sink, keep, scale, 1.25]
        settings = {"window": window, "shift": shift}
        results = check_against_float64(MASKED_SOFTMAX, "forward", args, out_dtype=out_dtype, fill=fill, **settings)
        out, signed, p_sink, _ = results
        additive = mask is not None and mask.dtype != torch.bool
        p, g, filled = out if keep is None else signed, torch.randn_like(out), None if fill is None else mask
        check_against_float64(
            MASKED_SOFTMAX,
            "backward",
            (p, p_sink, None, g, None, None, filled, scale, 1.25),
            sums=(1, 2),
            dropout=keep is not None,
            x_dtype=x.dtype,
            mask_sum=(-3, -4) if additive else None,
            sink_sum=None if sink is None else (-4, -2),
            **settings,
        )
        return out

    return run


def normal(*shape, dtype=torch.float32, device="cpu"):
    return (3 * torch.randn(shape)).to(device, dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("columns", COLUMNS)
@every_dtype
def test_every_width(check, device, columns, dtype):
    check(normal(1, 1, 2, columns, dtype=dtype, device=device), scale=0.5)


@pytest.mark.one_in(2)
@every_dtype
@pytest.mark.parametrize(
    "parts",
    [
        "bool",
        "additive",
        "sink",
        "keep",
        "bool sink",
        "additive sink keep",
        "bool keep window",
        "bool fill",
        "bool fill sink keep window",
        "sink window",
        "window",
    ],
)
def test_every_part(check, device, rows_held, dtype, parts):
    x = normal(2, 3, 5, 37, dtype=dtype, device=device)
    mask = None
    if "bool" in parts:
        mask = torch.rand(2, 1, 5, 37, device=device) < 0.4
        mask[0, 0, 1] = True
    if "additive" in parts:
        mask = normal(5, 37, dtype=dtype, device=device).expand(2, 1, 5, 37)
    check(
        x,
        mask,
        normal(3, 1, 1, dtype=dtype, device=device) if "sink" in parts else None,
        torch.rand(x.shape, device=device) < 0.8 if "keep" in parts else None,
        scale=0.125,
        window=(7, 2) if "window" in parts else None,
        fill=-1.5 if "fill" in parts else None,
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (-1, 3), (4, -1), (3, 1), (100, 100)])
@pytest.mark.parametrize(("queries", "keys", "shift"), [(5, 5, 0), (3, 40, 0), (40, 3, 0), (6, 20, -4), (1, 33, 0)])
def test_windows(check, device, rows_held, window, queries, keys, shift):
    x = normal(2, 2, queries, keys, device=device)
    check(x, window=window, shift=shift)


def test_what_a_window_hides_is_not_read(device, rows_held):
    x = normal(1, 2, 40, 40, device=device)
    hidden = torch.ones(40, 40, dtype=torch.bool, device=device).triu(1)
    poisoned = x.masked_fill(hidden, math.nan)
    expected = MASKED_SOFTMAX.run("forward", (x, None, None, None, 1.0, 1.0), "triton", **causal())[0]
    out = MASKED_SOFTMAX.run("forward", (poisoned, None, None, None, 1.0, 1.0), "triton", **causal())[0]
    assert torch.equal(out, expected) and not out[..., hidden].any()
    g = torch.randn_like(x)
    gradients = [backward(out, g), backward(out.masked_fill(hidden, math.nan), g.masked_fill(hidden, math.nan))]
    assert torch.equal(*gradients) and not gradients[0][..., hidden].any()


def causal():
    return {"window": (-1, 0), "shift": 0, "out_dtype": torch.float32}


def backward(p, g):
    statics = {"dropout": False, "x_dtype": p.dtype, "mask_sum": None, "sink_sum": None, "window": (-1, 0), "shift": 0}
    return MASKED_SOFTMAX.run("backward", (p, None, None, g, None, None, None, 1.0, 1.0), "triton", **statics)[0]


@pytest.mark.parametrize("queries", [1, 2, 33])
@pytest.mark.parametrize("keys", [16, 33, 64])
def test_every_number_of_queries(check, device, queries, keys):
    mask = torch.rand(2, 1, queries, keys, device=device) < 0.3
    check(normal(2, 3, queries, keys, device=device), mask, normal(3, 1, 1, device=device), window=(20, 5))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_ranks_and_strides(check, device, shape):
    check(normal(*shape, device=device))
    if len(shape) == 4:
        check(normal(5, 3, 2, 4, device=device).permute(2, 1, 3, 0))
        check(normal(2, 4, 3, 5, device=device).transpose(1, 2), torch.rand(5, 4, device=device).T < 0.3)


def test_other_dtypes_of_the_result_and_the_mask(check, device):
    x = normal(2, 3, 4, 5, dtype=torch.bfloat16, device=device)
    assert check(x, out_dtype=torch.float32).dtype == torch.float32
    check(x.float(), normal(2, 1, 4, 5, dtype=torch.float16, device=device), out_dtype=torch.bfloat16)


def test_infinities_and_nan_are_as_in_the_formula(device, rows_held):
    x = normal(7, 40, device=device)
    x[0, 3], x[1, 3], x[2, 3], x[3] = math.nan, math.inf, -math.inf, -math.inf
    x[5, :20] = -math.inf
    mask = torch.zeros(7, 40, dtype=torch.bool, device=device)
    mask[4], mask[5, 20:] = True, True
    sinks = (None, torch.zeros(7, 1, device=device), torch.full((7, 1), -math.inf, device=device))
    for sink, fill in itertools.product(sinks, (None, -math.inf, torch.finfo(torch.float32).min)):
        args, statics = (
            (x, mask, sink, None, 1.0, 1.0),
            {"window": None, "shift": 0, "out_dtype": x.dtype, "fill": fill},
        )
        ours, plain = MASKED_SOFTMAX.run("forward", args, "triton", **statics), MASKED_SOFTMAX.forward(*args, **statics)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1.3e-6, atol=1e-6, equal_nan=True)


@every_dtype
def test_rows_hidden_by_an_additive_mask_are_as_in_the_formula(device, rows_held, dtype):
    """Such as those of left padding in transformers; the lowest number times log₂ e would overflow."""
    x, mask = normal(4, 40, dtype=dtype, device=device), torch.zeros(4, 40, dtype=dtype, device=device)
    mask[2] = torch.finfo(dtype).min
    args, statics = (x, mask, None, None, 0.5, 1.0), {"window": None, "shift": 0, "out_dtype": torch.float32}
    ours, plain = (
        MASKED_SOFTMAX.run("forward", args, "triton", **statics)[0],
        MASKED_SOFTMAX.forward(*args, **statics)[0],
    )
    torch.testing.assert_close(ours, plain, rtol=1.3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_gradient_is_rounded_once(device, launches, values_and_gradients, assert_no_worse, dtype, dropout_p):
    x, g = normal(2, 3, 8, 65, dtype=dtype, device=device), torch.randn(2, 3, 8, 65).to(device, dtype)
    mask = normal(2, 1, 8, 65, dtype=dtype, device=device)

    def ours(x, mask):
        torch.manual_seed(0)
        return fused.scaled_masked_softmax(x, mask, 0.25, dropout_p=dropout_p)

    def eager(x, mask):
        torch.manual_seed(0)
        p = torch.softmax(0.25 * x.to(torch.promote_types(x.dtype, torch.float32)) + mask, -1)
        return torch.nn.functional.dropout(p.to(x.dtype), dropout_p)

    with fused.backend("triton"):
        results = values_and_gradients(ours, g, x, mask)
    assert dict(launches) == {"_masked_softmax": 1, "_masked_softmax_backward": 1}
    exact = values_and_gradients(eager, g.double(), x.double(), mask.double())
    assert_no_worse(results, values_and_gradients(eager, g, x, mask), exact)


def test_what_rounding_takes_is_that_of_the_formula(device):
    for dtype in (torch.bfloat16, torch.float16):
        args = (normal(4, 33, dtype=dtype, device=device), None, None, None, 1.0, 1.0)
        statics = {"window": None, "shift": 0, "out_dtype": dtype, "rounding": True}
        ours, plain = MASKED_SOFTMAX.run("forward", args, "triton", **statics), MASKED_SOFTMAX.forward(*args, **statics)
        same = ours[0] == plain[0]
        assert same.float().mean() > 0.99
        assert (ours[3].int() - plain[3].int()).abs()[same].max() <= 1


def test_rows_far_apart(far_rows, device):
    numbers = torch.randn(2, 17, dtype=torch.float16)
    with fused.backend("triton"):
        far = fused.scaled_masked_softmax(far_rows(numbers))
        near = fused.scaled_masked_softmax(numbers.to(device))
        masked = fused.scaled_masked_softmax(numbers.to(device), far_rows(numbers))
    assert torch.equal(far, near)
    torch.testing.assert_close(masked, torch.softmax(2 * numbers.float(), -1).half().to(device))


def test_a_mutation_is_caught(check, device, monkeypatch):
    run = kernels.masked_softmax

    def wrong(x, mask, sink, keep, scale, keep_scale, **statics):
        return run(x, mask, sink, keep, scale * 1.001, keep_scale, **statics)

    check(normal(2, 3, device=device))
    monkeypatch.setitem(MASKED_SOFTMAX.implementations["triton"], "forward", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check(normal(2, 3, device=device))


def test_kernels_compile_for_a_gpu(compile_for_hopper):
    code = """
import torch, fused
fused.backend("triton")
def both(shape, mask=None, sink=None, dtype=torch.bfloat16, **settings):
    x = torch.randn(shape).to(dtype).requires_grad_()
    out = fused.scaled_masked_softmax(x, mask, 0.125, sink=sink, **settings)
    out.backward(torch.ones_like(out))
for shape in ((2, 3, 64, 64), (1, 1, 2, 2**14 + 1)):
    both(shape, causal=True)
    both(shape, torch.zeros(shape[-2:], requires_grad=True), torch.zeros(shape[1], requires_grad=True), dropout_p=0.5)
    both(shape, torch.zeros(shape[-2:], dtype=torch.bool), dtype=torch.float32, window=(3, 0), dropout_p=0.5)
both((2, 2, 3, 2**14), torch.zeros(2, 1, 1, 2**14), dtype=torch.float16)
"""
    assert compile_for_hopper(code) == 2 * 7
