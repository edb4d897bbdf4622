"""The kernel of rotary position embedding."""

from __future__ import annotations

import itertools

import pytest
import torch

import fused
from fused.rotary import ROTARY

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])


@pytest.fixture
def normal(device):
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=device).to(dtype)


@pytest.fixture
def check(check_against_float64):
    """Both parts. The two of a pair have angles of their own."""

    def run(q, k, cos, sin, interleaved=False):
        out = check_against_float64(ROTARY, "forward", (q, k, cos, sin), interleaved=interleaved)
        return *out, *check_against_float64(ROTARY, "backward", (*out, cos, sin), interleaved=interleaved)

    return run


@pytest.mark.one_in(4)
@every_dtype
@every_pairing
@pytest.mark.parametrize(("width", "passed"), [(2, 0), (6, 0), (6, 5), (2, 1), (64, 0), (80, 16)])
def test_every_width(check, normal, width, passed, interleaved, dtype):
    q, k = (normal(2, heads, 7, width + passed, dtype=dtype) for heads in (3, 1))
    cos, sin = normal(2, 1, 7, width, dtype=dtype), normal(2, 1, 7, width, dtype=dtype)
    check(q, k, cos, sin, interleaved)
    check(q, None, cos, sin, interleaved)


@every_pairing
def test_angles_are_broadcast_over_any_dimensions(check, normal, interleaved):
    q, k = normal(2, 3, 5, 8), normal(2, 3, 5, 8)
    for sizes in itertools.product((2, 1), (3, 1), (5, 1)):
        check(q, k, normal(*sizes, 8), normal(*sizes, 8), interleaved)
    check(q, k, normal(5, 8), normal(5, 8), interleaved)
    check(q[0, 0], k[0, 0, :, :], normal(8), normal(8), interleaved)
    check(q[0, 0, 0], None, normal(8), normal(8), interleaved)


@every_pairing
def test_results_of_another_dtype(normal, interleaved):
    q, k = (normal(2, heads, 7, 11, dtype=torch.bfloat16) for heads in (3, 1))
    angles, options = (normal(7, 8), normal(7, 8)), {"interleaved": interleaved, "out_dtype": torch.bfloat16}
    for part in ("forward", "backward"):
        ours, plain = (ROTARY.run(part, (q, k, *angles), name, **options) for name in ("triton", "reference"))
        for mine, other in zip(ours, plain, strict=True):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, other)


@every_pairing
def test_heads_stay_where_they_are_in_memory(check, normal, interleaved):
    q, k = normal(2, 5, 4, 8).transpose(1, 2), normal(2, 5, 3, 2, 8)[:, :, :, 0].transpose(1, 2)
    out, *_ = check(q, k, normal(2, 1, 5, 8), normal(2, 1, 5, 8), interleaved)
    assert out.stride() == q.stride()
    apart = normal(2, 1, 5, 16)[..., ::2]
    check(normal(2, 4, 8, 5).mT, normal(1, 4, 5, 8).expand(2, 4, 5, 8), apart, apart, interleaved)


def test_mixed_dtypes(check, normal):
    q, k, cos = normal(2, 3, 5, 8, dtype=torch.bfloat16), normal(2, 3, 5, 8), normal(2, 1, 5, 8)
    turned_q, turned_k, *_ = check(q, k, cos, cos)
    assert turned_q.dtype == turned_k.dtype == torch.float32
    turned_q, turned_k, *_ = check(k, q, cos.bfloat16(), cos.bfloat16())
    assert (turned_q.dtype, turned_k.dtype) == (torch.float32, torch.bfloat16)


@every_pairing
def test_one_launch_for_queries_and_keys(check, launches, normal, interleaved):
    check(normal(40, 9, 33, 8), normal(40, 3, 33, 8), normal(40, 1, 33, 8), normal(40, 1, 33, 8), interleaved)
    assert launches == {"_turn": 2}
    q, k = normal(2, 33, 70, 80).transpose(1, 2), normal(2, 33, 1, 80).transpose(1, 2)
    check(q, k, normal(33, 64), normal(33, 64), interleaved)
    assert launches == {"_turn": 4}


def test_keys_of_other_positions_take_a_launch_of_their_own(check, launches, normal):
    check(normal(2, 3, 5, 8), normal(5, 8), normal(5, 8), normal(5, 8))
    check(normal(1, 3, 5, 8), normal(2, 3, 5, 8), normal(5, 8), normal(5, 8))
    assert launches == {"_turn": 8}


def test_more_dimensions_are_left_to_others(launches, normal):
    x = normal(2, 2, 2, 2, 8)
    with fused.backend("triton"):
        fused.apply_rotary(x, x[0, 0], x[0, 0])
    assert not launches


def test_offsets_beyond_two_to_the_31st(far_rows):
    numbers, angles = torch.randn(2, 64, dtype=torch.float16), torch.rand(2, 64, dtype=torch.float16)
    far = far_rows(numbers)
    with fused.backend("triton"):
        out = fused.apply_rotary(far.expand(1, 2, 64)[0], angles.to(far.device), angles.to(far.device))
    with fused.backend("reference"):
        torch.testing.assert_close(out.cpu(), fused.apply_rotary(numbers, angles, angles), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_compiles_for_a_hopper(compile_for_hopper):
    code = """
import fused
for dtype in (torch.float32, torch.bfloat16):
    for width in (128, 96):
        q, k = (torch.randn(2, heads, 64, 128, dtype=dtype).requires_grad_() for heads in (8, 2))
        cos = torch.randn(2, 64, width, dtype=dtype)
        with fused.backend("triton"):
            for interleaved in (False, True):
                q_out, k_out = fused.rotary_embedding(q, k, cos, cos, interleaved=interleaved)
                (q_out.sum() + k_out.sum()).backward()
"""
    assert compile_for_hopper(code) == 16
