"""The interpreter of the tests notices illegal accesses."""

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
