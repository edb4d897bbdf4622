"""RMS norms written with F.normalize, in a model that trains, and rows that such a norm treats in its own way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class Norm(nn.Module):
    """As in x-transformers: a weight for each feature, or one for all, stored less the offset."""

    def __init__(self, features: int, single: bool, offset: float) -> None:
        super().__init__()
        self.scale, self.offset = features**0.5, offset
        self.g = nn.Parameter(torch.randn(1 if single else features))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * (self.g + self.offset)


class Block(nn.Module):
    def __init__(self, single: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(16, single, offset), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_training_follows_the_original(single: bool, offset: float) -> None:
    torch.manual_seed(0)
    twin = Block(single, offset)
    model = copy.deepcopy(twin)
    report = schedule.optimize(model, torch.randn(2, 5, 16), rules=["rms_norm_normalize"], cost_guard=False)
    assert report.count("rms_norm_normalize") == 1
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin)]
    for step in range(5):
        x = torch.randn(3, 4 + step, 16)
        x[0, 1] = 0  # padding
        losses = [each(x).square().mean() for each in (model, twin)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0.0, 1e-8, 1e-4, 1e8])
def test_rows_of_all_lengths(length: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    twin = Norm(16, False, 0.0).to(dtype)
    model = copy.deepcopy(twin)
    x = (F.normalize(torch.randn(4, 16, dtype=dtype), dim=-1) * length).requires_grad_()
    schedule.optimize(model, x.detach(), rules=["rms_norm_normalize"], cost_guard=False)
    results = [each(x) for each in (model, twin)]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(each.square().sum() + each.sum(), x)[0] for each in results]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=0.0 if length == 0 else 1e-5 / length)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_left_alone(dtype: torch.dtype) -> None:
    model = Block().to(dtype)
    report = schedule.optimize(model, torch.randn(2, 5, 16, dtype=dtype), rules=["rms_norm_normalize"])
    (found,) = report.select("rms_norm_normalize")
    assert "which the fused op does not imitate" in found.reason
