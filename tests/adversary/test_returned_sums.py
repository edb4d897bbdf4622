"""The sum before a norm, if a module returns it: the norm is computed from it, as autograd can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms": lambda t, w: w * (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "layer": lambda t, w: F.layer_norm(t, (8,), w),
}


class Block(nn.Module):
    def __init__(self, norm: Callable[[Tensor, Tensor], Tensor], returned: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.norm, self.returned = nn.Parameter(torch.ones(8)), norm, returned

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total, self.weight), self.returned(total)


def retained(normed: Tensor, total: Tensor, x: Tensor) -> Tensor | None:
    total.retain_grad()
    (normed.sin().sum() + total.sum()).backward()
    return total.grad


def asked(normed: Tensor, total: Tensor, x: Tensor) -> Tensor | None:
    return torch.autograd.grad(normed.sin().sum(), total)[0]


def hooked(normed: Tensor, total: Tensor, x: Tensor) -> Tensor | None:
    total.register_hook(lambda g: g * 0)
    (normed.sin().sum() + total.sum()).backward()
    return x.grad


@pytest.mark.parametrize("of", [retained, asked, hooked])
@pytest.mark.parametrize("returned", [lambda t: t, lambda t: t.contiguous(), lambda t: F.dropout(t, 0.1, False)])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_returned_sum(
    name: str, returned: Callable[[Tensor], Tensor], of: Callable[..., Tensor]
) -> None:
    found = []
    for scheduled in (True, False):
        torch.manual_seed(0)
        block, x, residual = Block(NORMS[name], returned), torch.randn(2, 8), torch.randn(2, 8)
        if scheduled:
            schedule.optimize(block, (x, residual), cost_guard=False)
        leaf = x.requires_grad_()
        found.append(of(*block(leaf, residual), leaf))
    torch.testing.assert_close(*found)


def test_a_sum_that_stays_inside_is_fused() -> None:
    block, x = Block(NORMS["rms"], lambda t: t * 2), torch.randn(2, 8)
    assert "add_rms_norm_llama" in schedule.optimize(block, (x, x), cost_guard=False).applied
