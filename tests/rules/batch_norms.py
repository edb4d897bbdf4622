"""Modules with batch norms, and their steps beside those of an untouched twin."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import state_of

Tensor = torch.Tensor


class Block(nn.Module):
    """A convolution, a batch norm and an activation."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, **settings)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Residual(nn.Module):
    """As in ResNet, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = Block(), nn.Conv2d(4, 3, 1)
        self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.first(x)))
        h += x
        return self.act(h)


class Functional(nn.Module):
    """A batch norm that keeps its statistics itself, as timm's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return F.silu(F.batch_norm(x, self.mean, self.var, self.weight, self.bias, self.training, 0.2, 1e-4))


def images(samples: int = 4, width: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(samples, 3, width, 5, dtype=dtype)


def randomized(model: nn.Module) -> nn.Module:
    """Statistics and parameters that are not those of a new batch norm."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def optimized(model: nn.Module, rules: object = "all", **options: object) -> tuple[nn.Module, nn.Module, object]:
    """The scheduled model, a twin left as it is, and the report."""
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, images(), rules=rules, cost_guard=False, **options)
    return model, twin, report


def applied(report: object) -> set[str]:
    return {entry.rule for entry in report.entries if entry.status == "applied"}  # type: ignore[attr-defined]


def fallbacks(model: nn.Module) -> int:
    return sum(state_of(each).fallbacks for each in model.modules() if state_of(each) is not None)


def assert_same_step(model: nn.Module, twin: nn.Module, x: Tensor, exact: bool = True) -> None:
    """Results, gradients and buffers, those to the bit unless the parameters differ by rounding already."""
    given = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model(given[0]), twin(given[1])
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()
    weights = torch.linspace(-1, 1, ours.numel()).view(ours.shape).to(ours.dtype)
    for out in (ours, theirs):
        if out.requires_grad:
            (out * weights).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, mine), other in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other[1], msg=name)
        assert not exact or torch.equal(mine, other[1]), name
