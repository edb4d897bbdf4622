"""What plans make of single constructs, each in the smallest module that has it, on two simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.distributed.plan import HEADS, Plan
from schedule.distributed.simulate import Simulation, simulate
from schedule.errors import ShardError

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


class TwoStacks(nn.Module):
    """Embeddings of one weight, the first of which is not called, and a head of its own: an untied T5."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.source, self.target = (nn.Embedding(40, 8) for _ in range(3))
        self.source.weight = self.target.weight = self.shared.weight
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 40, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.source(input_ids) + self.target(input_ids).tanh()))
        return result


def test_an_embedding_of_two_stacks_is_shared_out_once() -> None:
    plan, _ = planned(TwoStacks(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert sharded(plan) == {"source": 0, "head": 0} and len(plan.shards) == 2


class OwnEmbedding(nn.Module):
    """Looks rows up in code of its own, which knows nothing of shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.plain = OwnEmbedding(), nn.Embedding(40, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + self.plain(input_ids)
        result: Tensor = self.head(x) @ self.plain.weight.t()
        return result


def test_tables_that_other_code_reads_stay_whole() -> None:
    plan, _ = planned(Looks(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert not plan.shards
    assert "read by the code of another module" in plan.whole["plain.weight"]


class Masked(Attention):
    """A mask as large as the scores, a sink beside them, and their largest taken off before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.mT
        far = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(far[None, None].expand_as(scores), -1e9)
        scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        result: Tensor = self.o((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))
        return result


class InPlace(Attention):
    """Keys are written into an empty tensor, the first half from elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        keys = k.new_empty(*k.shape[:-1], 4)
        keys[..., :2] = k[..., 2:].tanh()
        keys[..., 2:] = k[..., :2]
        result: Tensor = self.o(((q @ keys.mT).softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class Turned(Attention):
    """Queries turned as complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * x.new_ones(2)
        pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], 2, 2)) * torch.polar(torch.ones_like(angles), angles)
        q = torch.view_as_real(pairs).flatten(-2)
        result: Tensor = self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("make", [Masked, InPlace, Turned])
def test_attention_is_shared_out_by_heads(make: type[nn.Module]) -> None:
    plan, seen = planned(make())
    assert sharded(plan) == {"q": 0, "k": 0, "v": 0, "o": 1} and plan.groups[0].kind == HEADS
    assert len(seen.forward) == 1


class WrittenWhole(Attention):
    """What is whole is written into a tensor that heads on all ranks read: its gradient is a partial sum there."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        offset = x.new_empty(*x.shape[:2], 4)
        offset[:, :, :4] = self.positions(x)
        result: Tensor = self.o(((q @ (k + offset[:, None]).mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


def test_what_is_written_in_place_has_a_gradient() -> None:
    plan, _ = planned(WrittenWhole())
    assert "would be a partial sum" in plan.whole["q.weight"]


class Act(nn.Module):
    """An activation that is a module of two inputs."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up


class OwnLinear(nn.Module):
    """A weight of its own, for each of two groups of features."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, wide, narrow) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[0]) + nn.functional.linear(x, self.weight[1])


class PackedOutside(nn.Module):
    """Gate and up packed in a weight that knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = OwnLinear(32, 16), Act(), OwnLinear(16, 16)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        result: Tensor = self.second(self.act(gate, up)) + self.empty.sum()
        return result


class PackedInside(nn.Module):
    """The same in one module, with the activation below it, as experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(32, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
        self.act = Act()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.first).chunk(2, -1)
        return nn.functional.linear(self.act(gate, up), self.second)


@pytest.mark.parametrize("make", [PackedOutside, PackedInside])
def test_packed_weights_of_modules_with_code_of_their_own(make: type[nn.Module]) -> None:
    plan, seen = planned(make())
    assert sorted(step.parts for step in plan.shards) == [1, 2]
    assert len(seen.forward) == 1


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
    """Every rank's gradient of what is whole is a part of the sum: added up where a module gives it."""
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

    assert simulate(Around(ReadsWhole()), X, apply, 2).equal(1e-4)


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


class Unused(nn.Module):
    """Of one projection only the size is used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.one(x.new_zeros(self.other(x).relu().shape) + x)
        return result


def test_what_nothing_is_made_of_stays_whole() -> None:
    plan, _ = planned(Unused())
    assert not sharded(plan) and "nothing that is returned" in plan.whole["other.weight"]
