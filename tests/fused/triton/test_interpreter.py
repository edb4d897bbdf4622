"""The interpreter of the tests notices illegal accesses, and reduces by functions of kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.fused.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels run on a card")


@triton.jit
def _copied(x, out, count, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(out + lane, tl.load(x + lane, mask=lane < count), mask=lane < count)


def test_a_lane_outside_of_the_tensors_is_an_error() -> None:
    x, out = torch.arange(6.0), torch.zeros(6)
    _copied[(1,)](x, out, 6, LANES=8)
    assert torch.equal(x, out)
    with pytest.raises(Exception, match="1 of 8 lanes are outside"):
        _copied[(1,)](x, out, 7, LANES=8)


@triton.jit
def _larger_with_count(value, count, other_value, other_count):
    return tl.maximum(value, other_value), count + other_count


@triton.jit
def _reduced(x, largest, counts, ROWS: tl.constexpr, LANES: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    value = tl.load(x + tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :])
    found, count = tl.reduce((value, (value > 0).to(tl.int32)), AXIS, _larger_with_count, keep_dims=KEEP)
    place = tl.arange(0, LANES if AXIS == 0 else ROWS)
    if KEEP:
        place = tl.expand_dims(place, AXIS)
    tl.store(largest + place, found)
    tl.store(counts + place, count)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (4, 8), (2, 1), (16, 2)])
def test_reductions_by_a_function(shape: tuple[int, int], axis: int, keep: bool) -> None:
    x = torch.randn(shape)
    largest, counts = torch.zeros(shape[1 - axis]), torch.zeros(shape[1 - axis], dtype=torch.int32)
    _reduced[(1,)](x, largest, counts, *shape, axis, keep)
    assert torch.equal(largest, x.amax(axis))
    assert torch.equal(counts, (x > 0).sum(axis).int())
