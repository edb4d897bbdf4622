"""Submodules that stay calls and change, amid what a rule rewrites, a tensor that is none of their arguments."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fused
import schedule
from fused.torch_internals.tensor_kinds import ObservingFakeMode


class Changes(nn.Module):
    """Changes a tensor that it holds; it has a child, so that it is no leaf to inline."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held, self.child = [held], nn.Identity()

    def forward(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            self.held[0].add_(1.0)
        return self.child(z * 2)


class Keeps(nn.Module):
    """Keeps what it is given or returns, and changes it at its second call."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.returned, self.child = returned, nn.Identity()

    def forward(self, x: Tensor, changes: bool) -> Tensor:
        if changes:
            self.kept.add_(1.0)
            return x
        y = self.child(x * 2)
        self.kept = y if self.returned else x
        return y


class OfAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8))
        self.changes = Changes(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        t = self.linear(x) + self.bias
        z = self.changes(x)
        return F.gelu(t) + z


class OfABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(8))
        self.changes = Changes(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        t = x * 2 + self.bias
        z = self.changes(x)
        return F.gelu(t) + z


class OfAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.changes = Changes(self.norm.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x + x.sin()
        z = self.changes(total * 2)
        return self.norm(total), z


class OfWhatItWasGiven(nn.Module):
    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.keeps, self.bias = Keeps(returned), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.keeps(x, False)
        x = y if self.keeps.returned else x
        t = x + self.bias
        self.keeps(x * 2, True)
        return F.gelu(t)


def compared(module: nn.Module) -> int:
    twin, x = copy.deepcopy(module), torch.randn(2, 8)
    applied = schedule.optimize(module, (x,), rules="default", cost_guard=False).count()
    for _ in range(2):
        with fused.backend("reference"), torch.no_grad():
            torch.testing.assert_close(module(x.clone()), twin(x.clone()))
    return applied


@pytest.mark.parametrize(
    "make",
    [
        OfAParameter,
        OfABuffer,
        OfAWeight,
        lambda: OfWhatItWasGiven(False),
        lambda: OfWhatItWasGiven(True),
    ],
)
def test_a_call_changes_what_the_match_reads(make: Any) -> None:
    torch.manual_seed(0)
    compared(make())


class OfSomethingElse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        t = x * 2
        inner = math.sqrt(2 / math.pi) * (t + 0.044715 * torch.pow(t, 3.0))
        z = self.changes(x)
        return 0.5 * t * (1.0 + torch.tanh(inner)) + z


def test_a_call_has_no_reference_to_what_the_match_reads() -> None:
    torch.manual_seed(0)
    assert compared(OfSomethingElse())


def test_a_view_that_is_decomposed_writes_nothing() -> None:
    FakeTensorMode.cache_clear()  # what is known from an earlier call is not decomposed again
    mode = ObservingFakeMode()
    with mode:
        rows = torch.empty(2, 12, 0)[..., None].expand(2, 12, 0, 16)
        mode.observe()
        rows.flatten(-2)
        assert not mode.written
        rows.sum(-1).add_(1.0)
        assert mode.written
