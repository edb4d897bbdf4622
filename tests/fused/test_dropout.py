"""The random bits of dropout are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fused.dropout import check_probability, keep_mask, keep_scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 33, 65), (1001,)])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_keeps_what_eager_keeps_and_leaves_the_generator_where_eager_does(dtype, shape, p):
    ones = torch.ones(shape, dtype=dtype)
    torch.manual_seed(5)
    eager, after = F.dropout(ones, p) != 0, torch.rand(3)
    torch.manual_seed(5)
    ours, after_ours = keep_mask(ones, p, dtype), torch.rand(3)
    assert torch.equal(ours, eager)
    assert torch.equal(after, after_ours)


def test_scale():
    assert keep_scale(0.5) == 2.0
    assert keep_scale(1.0) == 0.0


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_probabilities_outside_of_0_and_1(p):
    with pytest.raises(ValueError, match=f"some_op: .*{p}"):
        check_probability("some_op", p)
