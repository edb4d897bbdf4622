"""Gradients that flow out of what the ranks share into what is whole: where they are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import simulate
from schedule.util.errors import ShardError
from tests.distributed.constructs import Attention, ReadsWhole, Wrapper, X, planned, sharded


class WrittenWhole(Attention):
    """What is whole is written into a tensor that heads on all ranks read: its gradient is a partial sum there."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        offset = x.new_zeros(*x.shape[:2], 4)
        self.write(offset, self.positions(x))
        result: Tensor = self.o(((q @ (k + offset[:, None]).mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result

    def write(self, offset: Tensor, value: Tensor) -> None:
        offset[:, :, :4] = value


class Flattened(WrittenWhole):
    def write(self, offset: Tensor, value: Tensor) -> None:
        offset.flatten(0, 1).copy_(value.flatten(0, 1))


class Reshaped(WrittenWhole):
    def write(self, offset: Tensor, value: Tensor) -> None:
        offset.reshape(-1, 4).add_(value.reshape(-1, 4))


class Moved(WrittenWhole):
    def write(self, offset: Tensor, value: Tensor) -> None:
        offset.movedim(0, 1)[...] = value.movedim(0, 1)


class Diagonal(WrittenWhole):
    def write(self, offset: Tensor, value: Tensor) -> None:
        offset.diagonal(0, 1, 2).copy_(value.diagonal(0, 1, 2))


class Strided(WrittenWhole):
    """By a function whose results the vocabulary says nothing about."""

    def write(self, offset: Tensor, value: Tensor) -> None:
        torch.as_strided(offset, offset.shape, offset.stride()).copy_(value)


@pytest.mark.parametrize("kind", [WrittenWhole, Flattened, Reshaped, Moved, Diagonal, Strided])
def test_what_is_written_in_place_has_a_gradient(kind: type[WrittenWhole]) -> None:
    plan, _ = planned(kind())
    assert "would be a partial sum" in plan.whole["q.weight"]


class OneKey(Attention):
    """Keys and values of one head, repeated for all."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(16, 4), nn.Linear(16, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[0], 1, self.heads, x.shape[1], 4
        q = self.q(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
        k, v = (one[:, None, None].expand(shape).reshape(x.shape[0], -1, x.shape[1], 4) for one in self.given(x))
        result: Tensor = self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result

    def given(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.k(x)), self.v(x)


def test_one_key_for_all_heads() -> None:
    """Every rank's gradient of what is whole is a part of the sum: summed where a module gives it."""
    plan, seen = planned(OneKey())
    assert sharded(plan) == {"q": 0, "o": 1}
    assert {step.path for step in plan.syncs if step.mode == "bwd_pre"} == {"norm", "v"}
    assert "2 all_reduce" in str(plan) and (len(seen.forward), len(seen.backward)) == (1, 2)


class Latent(nn.Module):
    """A latent that keys and values of all heads are made of, with a part of the keys beside it, as DeepSeek's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.o = nn.Linear(16, 16), nn.Linear(16, 10), nn.Linear(16, 16)
        self.scale, self.up = nn.Parameter(torch.rand(8)), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
        latent, beside = self.down(x).split((8, 2), -1)
        both = self.up(latent * self.scale).view(*x.shape[:2], -1, 6).transpose(1, 2)
        k, v = both.split((2, 4), -1)
        k = torch.cat((k, beside[:, None].expand(*k.shape[:-1], 2)), -1)
        result: Tensor = self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


def test_a_latent_for_all_heads() -> None:
    """The projection up from the latent leaves its partial gradient to the module that gives both parts."""
    plan, _ = planned(Latent())
    assert sharded(plan) == {"q": 0, "up": 0, "o": 1}
    assert [(s.path, s.mode, s.argument) for s in plan.syncs if s.mode != "fwd_post" and s.path != "q"] == [
        ("down", "bwd_pre", None),
        ("", "bwd_post", "scale"),
    ]


class UsedTwice(OneKey):
    """The key is read by something whole as well."""

    def given(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k(x)
        return k, self.v(x) + k.cumsum(1).softmax(-1).sum()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + self.k(x).mean()
        return result


def test_a_gradient_that_is_partial_in_part_leaves_attention_whole() -> None:
    plan, _ = planned(UsedTwice())
    assert not sharded(plan)
    assert "would be a partial sum in" in plan.whole["q.weight"]


def test_gradients_of_outputs_that_are_no_partial_sums() -> None:
    def apply(sch: Any) -> None:
        sch["up"].shard("weight", axis=0)
        sch["up"].shard("bias", axis=0)
        with pytest.raises(ShardError, match="each rank has the gradient of its own outputs"):
            sch["up"].sync("bwd_pre", "all_reduce")
        with pytest.raises(ShardError, match="whole, or a partial sum"):
            sch["down"].sync("bwd_pre", "all_gather", axis=-1)
        sch["down"].sync("bwd_pre", "all_reduce")
        with pytest.raises(ShardError, match="already"):
            sch["down"].sync("bwd_pre", "all_reduce")
        sch.undo()
        sch.undo()
        sch.undo()

    assert simulate(Wrapper(ReadsWhole()), X, apply, 2).equal(1e-4)


class Scaled(nn.Module):
    """What is whole scales each of four groups of features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(*x.shape[:2], -1, 4) * self.scale(x)[:, :, None]
        result: Tensor = x + self.down(y.flatten(2))
        return result


def test_a_partial_gradient_of_what_is_whole_needs_the_whole_sequence() -> None:
    model, given = nn.Sequential(Scaled(), Scaled()), torch.randn(2, 6, 16)
    plan = schedule.create_schedule(model, given).shard_plan(2, sequence=True)
    assert "partial gradient" in plan.whole["sequence of 0"] and not plan.boundaries
    assert [step.path for step in plan.syncs if step.mode == "bwd_pre"] == ["0.scale", "1.scale"]
    assert simulate(model, given, lambda sch: sch.apply_plan(plan), 2).equal(1e-4)
