"""Small modules for plans, and what two simulated ranks make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import Simulation, simulate
from schedule.distributed.planning.plan_data import Plan

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def planned(model: nn.Module, given: Any = X, ranks: int = 2) -> tuple[Plan, Simulation]:
    """The plan, and what the ranks make of it; equal to the whole model in any case."""
    plan = schedule.create_schedule(model, given).shard_plan(ranks)
    seen = simulate(model, given, lambda sch: sch.apply_plan(plan), ranks)
    assert seen.equal(1e-4), seen.where
    return plan, seen


def sharded(plan: Plan) -> dict[str, int]:
    """Path of each module with a shared weight → its axis."""
    return {step.path: step.axis for step in plan.shards if step.name == "weight"}


class Attention(nn.Module):
    """Four heads of four."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], self.heads, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2)


class ReadsWhole(Attention):
    """The size of what the ranks share is read off what is whole."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        result: Tensor = self.o(self.mixed(x).reshape(batch, length, width))
        return result


class Wrapper(nn.Module):
    """A module, which is given objects that are made for it, and an MLP."""

    def __init__(self, inner: nn.Module, *given: type) -> None:
        super().__init__()
        self.given = given
        self.inner, self.up, self.down = inner, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x, *(make() for make in self.given))
        result: Tensor = x + self.down(self.up(x).relu())
        return result
