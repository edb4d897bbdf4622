"""``F.rms_norm`` without an eps, which is then the epsilon of the dtype that it computes in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class _Norm(nn.Module):
    def __init__(self, has_residual: bool) -> None:
        super().__init__()
        self.norm, self.has_residual = nn.RMSNorm(16), has_residual

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual if self.has_residual else x
        return total + F.gelu(self.norm(total)) * residual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("has_residual", [False, True])
def test_default_eps(dtype: torch.dtype, has_residual: bool) -> None:
    torch.manual_seed(0)
    model = _Norm(has_residual).to(dtype)
    # The mean square of these rows is near the epsilon of float32, so that it matters to the result.
    x, residual = (torch.randn(3, 5, 16, dtype=dtype) * 3e-4 for _ in range(2))
    expected, gradient = _results(model, x, residual)
    report = schedule.optimize(model, (x, residual), rules=["rms_norm"], cost_guard=False)
    assert report.count() == 1
    result, got = _results(model, x, residual)
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype.itemsize > 2 else {}
    torch.testing.assert_close(result, expected, **tolerance)
    torch.testing.assert_close(got, gradient, **tolerance)


def _results(model: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = model(x, residual)
    return result.detach(), torch.autograd.grad(result.double().square().sum(), x)[0]
