"""What plans make of single constructs, each in the smallest module that has it, on two simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import schedule
from schedule.distributed.plan import Plan
from schedule.distributed.simulate import Simulation, simulate

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def planned(model: nn.Module, given: Any = X) -> tuple[Plan, Simulation]:
    """The plan, and what two ranks make of it; equal to the whole model in any case."""
    plan = schedule.create_schedule(model, given).shard_plan(2)
    seen = simulate(model, given, lambda sch: sch.apply_plan(plan), 2)
    assert seen.equal(1e-4), seen.where
    return plan, seen


def sharded(plan: Plan) -> dict[str, int]:
    """Path of each module with a shared weight → its axis."""
    return {step.path: step.axis for step in plan.shards if step.name == "weight"}


class TwoVocabularies(nn.Module):
    """An encoder's embedding, and a decoder's that is tied to the head, of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 8), nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.target.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.source(input_ids) + self.target(input_ids))
        return result


def test_a_head_goes_with_the_embedding_that_it_is_tied_to() -> None:
    plan, _ = planned(TwoVocabularies(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert [[step.path for step in group.shards] for group in plan.groups] == [["source"], ["target"]]


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


class Store:
    """Something that is passed between modules and gives back what it gets, as a cache does at first."""

    def update(self, x: Tensor) -> Tensor:
        return x


class Branches(Attention):
    """Cannot be traced alone: a branch depends on what the store gives back."""

    def forward(self, x: Tensor, store: Store) -> Tensor:
        y = store.update(self.mixed(x))
        if y.size() != (*x.shape[:2], self.heads, 4):
            raise ValueError("not the size of the heads")
        result: Tensor = self.o(y.flatten(2))
        return result


class Around(nn.Module):
    """A module, which is given objects that are made for it, and an MLP."""

    def __init__(self, inner: nn.Module, *given: type) -> None:
        super().__init__()
        self.given = given
        self.inner, self.up, self.down = inner, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x, *(make() for make in self.given))
        result: Tensor = x + self.down(self.up(x).relu())
        return result


def test_sizes_read_off_a_whole_tensor_leave_attention_whole() -> None:
    plan, _ = planned(Around(ReadsWhole()))
    assert sharded(plan) == {"up": 0, "down": 1}
    assert "read off a tensor that is whole" in plan.whole["inner.q.weight"]


def test_what_cannot_be_traced_stays_whole() -> None:
    plan, _ = planned(Around(Branches(), Store))
    assert sharded(plan) == {"up": 0, "down": 1}
    assert "sizes in Branches cannot be followed: a branch depends on" in plan.whole["inner.q.weight"]
