"""The kernels of cross entropy."""

from __future__ import annotations

import pytest
import torch

import fused
from fused.backends.reference.losses import RowSettings
from fused.loss_autograd import LOGIT_STATISTICS

COLUMNS = (1, 2, 3, 17, 64, 65, 1000, 8193, 50257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def check(check_against_float64):
    """``check(logits, index, softcap, total, z_loss)``: both parts against float64."""

    def run(logits, index, softcap=None, total=False, z_loss=0.0):
        rows = RowSettings(int(index.flatten()[0]), logits.shape[-1], 0.1 if total else 0.0, z_loss)
        for whole in (True, False):
            highest, lse, *_ = check_against_float64(
                LOGIT_STATISTICS, "forward", (logits, index, softcap), sums=(3,), settings=rows, whole=whole
            )
        count = torch.tensor(3, device=logits.device)
        for g, divisor in ((torch.randn_like(lse), None), (torch.randn((), device=logits.device), count)):
            args = (logits, g, divisor, index, highest, lse, softcap)
            check_against_float64(LOGIT_STATISTICS, "backward", args, settings=rows, inplace=False)
        return lse

    return run


def sample(rows, columns, dtype, device):
    logits = (3 * torch.randn(rows, columns)).to(device, dtype)
    return logits, torch.randint(columns, (rows,), device=device)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("columns", COLUMNS)
@every_dtype
def test_every_width(check, device, columns, dtype):
    check(*sample(3, columns, dtype, device))


@pytest.mark.one_in(2)
@every_dtype
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_options(check, device, dtype, total, softcap, z_loss):
    logits, index = sample(6, 9000, dtype, device)
    check(logits.view(2, 3, -1), index.view(2, 3), softcap, total, z_loss)


@every_dtype
@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("columns", [8200, 8201])
def test_any_alignment_of_rows(check, device, dtype, start, columns):
    logits, index = sample(3, columns + start, dtype, device)
    check(logits[:, start:], index.clamp(max=columns - 1), total=True)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_logits_keep_their_digits(check, device, softcap):
    logits, index = sample(4, 20000, torch.float32, device)
    logits[0] *= 300
    logits[1] += 5000
    logits[2, 9000:] = -torch.inf
    check(logits, index.clamp(max=8999), softcap)


@every_dtype
def test_an_index_outside_picks_nothing(device, dtype, launches):
    logits, index = sample(4, 10, dtype, device)
    index[0], index[1] = -100, 10
    settings = RowSettings(-1, 10, 0.0, 0.0)
    for whole in (False, True):
        highest, lse, result, *_ = LOGIT_STATISTICS.run(
            "forward", (logits, index, None), "triton", settings=settings, whole=whole
        )
        assert torch.equal(highest, logits.float().amax(-1))
        picked = logits.gather(1, index.clamp(0, 9)[:, None])[:, 0].float() - highest
        expected = lse - picked if whole else picked
        expected[:2] = torch.nan if whole else 0.0
        torch.testing.assert_close(result, expected, equal_nan=True)
    assert launches.total() == 2


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_are_as_in_the_formula(device, value):
    logits, index = sample(3, 10, torch.float32, device)
    logits[0, 3] = logits[1] = value
    with fused.backend("triton"):
        ours = fused.cross_entropy(logits, index, reduction="none")
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, index, reduction="none"), equal_nan=True)


def test_rows_far_apart(device, far_rows):
    logits, index = sample(2, 50, torch.bfloat16, device)
    with fused.backend("triton"):
        far = far_rows(logits).requires_grad_()
        near = logits.clone().requires_grad_()
        for one in (far, near):
            fused.cross_entropy(one, index).backward()
    assert torch.equal(far.grad, near.grad)


@every_dtype
def test_gradient_written_over_the_logits(device, dtype):
    logits, index = sample(3, 9000, dtype, device)
    leaf = logits.requires_grad_()
    computed = leaf * 1
    with fused.backend("triton"):
        fused.cross_entropy(computed, index, inplace_backward=True).backward()
    expected = torch.autograd.grad(fused.cross_entropy(leaf, index), leaf)[0]
    assert torch.equal(computed.detach(), leaf.grad)
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.one_in(4)
@every_dtype
@pytest.mark.parametrize("columns", [1, 17, 65, 9001])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_column_of_the_highest_logit_and_token_scaling(check_against_float64, device, columns, dtype, softcap):
    logits, index = sample(5, columns, dtype, device)
    logits = logits.round()
    settings = RowSettings(int(index[1]), columns, 0.1, 1e-2)
    for whole in (True, False):
        statics = {"settings": settings, "whole": whole, "token_scaling": True, "predicts": True}
        check_against_float64(LOGIT_STATISTICS, "forward", (logits, index, softcap), sums=(3,), **statics)


def test_kernels_compile_for_a_gpu(compile_for_hopper):
    code = """
import torch, fused
fused.backend("triton")
def both(columns, dtype=torch.bfloat16, **settings):
    logits = torch.zeros(3, columns, dtype=dtype).requires_grad_()
    fused.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), **settings).backward()
both(10)
both(50257, softcap=30.0)
both(50264, torch.float32, label_smoothing=0.1)
both(128256, torch.float16, softcap=30.0, z_loss=1e-4, label_smoothing=0.1)
logits = torch.zeros(3, 50264, dtype=torch.bfloat16)
fused.cross_entropy_with_metrics(logits, torch.zeros(3, dtype=torch.int64), softcap=30.0, token_scaling=True)
"""
    assert compile_for_hopper(code) == 2 * 4 + 1
