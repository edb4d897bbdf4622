"""Rounding by the bits is the rounding of a cast."""

from __future__ import annotations

import pytest
import torch

from fused.backends.reference.numbers import rounded_to


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_under_a_compiler_is_that_of_a_cast(dtype):
    torch.manual_seed(0)
    steps = torch.arange(0, 2**13) * 2.0**-25  # float16's subnormal numbers, and the ties between them
    ties = torch.rand(1000).to(dtype).float() * (1 + torch.finfo(dtype).eps / 2)
    p = torch.cat([torch.rand(10_000), torch.rand(10_000) ** 20, steps, ties.clamp(max=1), torch.tensor([1.0])])
    compiled = torch.compile(lambda p: rounded_to(p, dtype), backend="eager", fullgraph=True)
    expected = p.to(dtype).float()
    assert torch.equal(rounded_to(p, dtype), expected)
    assert torch.equal(compiled(p), expected)
