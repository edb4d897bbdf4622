"""Which kinds of Linear are projections like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from schedule.api.simulate import planned
from schedule.distributed.tensor_parallel.linears import computes_linear
from schedule.distributed.tensor_parallel.sharded_modules import LINEAR, projection_of


class Initialized(nn.Linear):
    """Only its weights begin otherwise."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Swapped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.bias + torch.matmul(x, self.weight.transpose(1, 0))


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias if self.bias is not None else F.linear(x, self.weight)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Untransposed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Weighted(nn.Linear):
    """Of its bias another multiple is added."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight.T, self.bias, alpha=2)


class OnlyInEvaluation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) if self.training else y


class Adapted(nn.Linear):
    """Reads more than a weight and a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("cls", [nn.Linear, Initialized, Swapped, Functional, FalconLinear])
def test_what_computes_linear(cls: type[nn.Linear]) -> None:
    assert computes_linear(cls, True) and projection_of(cls(3, 2)) == LINEAR


@pytest.mark.parametrize(
    "cls", [Scaled, Twice, Untransposed, Weighted, OnlyInEvaluation, Adapted, TwoInputs, nn.LayerNorm]
)
def test_what_does_not(cls: type[nn.Module]) -> None:
    assert not computes_linear(cls, True)


def test_without_a_bias() -> None:
    assert computes_linear(Functional, False) and computes_linear(FalconLinear, False)
    assert not computes_linear(Swapped, False), "it adds a bias that is not there"
    assert projection_of(Functional(3, 2, bias=False)) == LINEAR


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Swapped(16, 32), Functional(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


def test_they_are_shared_out_like_any_other() -> None:
    plan, seen = planned(Block(), torch.randn(2, 5, 16), 2)
    assert {(step.path, step.axis) for step in plan.shards if step.name == "weight"} == {("up", 0), ("down", 1)}
    assert seen.equal(1e-4) and [one.op for one in seen.forward] == ["all_reduce"]
