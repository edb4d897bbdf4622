"""What plans make of single constructs, each in the smallest module that has it, on two simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedule.distributed.planning.plan_steps import HEADS
from tests.distributed.constructs import Attention, ReadsWhole, Wrapper, planned, sharded


class Store:
    """Something that is passed between modules and gives back what it gets, as a cache does at first."""

    def update(self, x: Tensor) -> Tensor:
        return x


class Rewritten(Store):
    """Writes to what it keeps in place, as static caches do, so that it cannot be put back."""

    def update(self, x: Tensor) -> Tensor:
        self.kept = x.clone().mul_(1.0)
        return self.kept


class Branches(Attention):
    """A branch depends on what the store gives back."""

    def forward(self, x: Tensor, store: Store) -> Tensor:
        y = store.update(self.mixed(x))
        if y.size() != (*x.shape[:2], self.heads, 4):
            raise ValueError("not the size of the heads")
        result: Tensor = self.o(y.flatten(2))
        return result


def test_sizes_read_off_a_whole_tensor_leave_attention_whole() -> None:
    plan, _ = planned(Wrapper(ReadsWhole()))
    assert sharded(plan) == {"up": 0, "down": 1}
    assert "read off a tensor that is whole" in plan.whole["inner.q.weight"]


def test_what_cannot_be_traced_stays_whole() -> None:
    plan, _ = planned(Wrapper(Branches(), Rewritten))
    assert sharded(plan) == {"up": 0, "down": 1}
    assert "sizes in Branches cannot be followed: a branch depends on" in plan.whole["inner.q.weight"]


def test_a_branch_on_what_was_given_to_a_store_is_followed() -> None:
    plan, _ = planned(Wrapper(Branches(), Store))
    assert sharded(plan).items() >= {"inner.q": 0, "inner.k": 0, "inner.v": 0, "inner.o": 1}.items()


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


class CachesTable(Attention):
    """It keeps a table for the next call of the same length: the model read it, and has none yet."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.size(0) != x.size(1):
            self.table = torch.linspace(0.5, 2.0, x.size(1))[:, None]
        result: Tensor = self.o(self.mixed(x * self.table).flatten(2))
        return result


class Twice(nn.Module):
    """Two calls of one module, the second of which reads what the first keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CachesTable()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.inner(x))
        return result


def test_a_table_that_the_model_does_not_hold_yet() -> None:
    plan, _ = planned(Twice())
    assert [group.kind for group in plan.groups] == [HEADS]


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


class PackedKey(Attention):
    """Queries of all heads, then one key and one value, in one projection: multi-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.width = 4, 16
        self.qkv = nn.Linear(16, 24)
        del self.q, self.k, self.v

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, seq, heads, 4] and twice [batch, seq, 1, 4], by positions from the end, as Falcon does it."""
        packed = self.qkv(x).view(*x.shape[:2], self.heads + 2, self.dim)
        return packed[..., :-2, :], packed[..., [-2], :], packed[..., -1:, :]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.taken(x))
        q = q.reshape(x.shape[0], self.heads, x.shape[1], self.dim)
        result: Tensor = self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


class PackedBySizes(PackedKey):
    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, both = self.qkv(x).split((self.width, 2 * self.dim), dim=-1)
        k, v = both.unsqueeze(2).split((self.dim, self.dim), dim=-1)
        return q.view(*x.shape[:2], self.heads, self.dim), k, v


class PackedByHeads(PackedKey):
    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x).unsqueeze(1).reshape(*x.shape[:2], -1, self.dim)
        return packed[:, :, : self.heads], packed[:, :, -2:-1], packed[:, :, [-1]]


@pytest.mark.parametrize("make", [PackedKey, PackedBySizes, PackedByHeads])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_packed_key_is_every_ranks(make: type[nn.Module], ranks: int) -> None:
    """Its weight stays whole, with one sum of its gradient; each rank has its heads' queries, and the key and value."""
    model = make()
    plan, seen = planned(model, ranks=ranks)
    assert sharded(plan) == {"qkv": 0, "o": 1} and plan.groups[0].kind == HEADS
    assert {(step.name, step.common) for step in plan.shards if step.path == "qkv"} == {("weight", 8), ("bias", 8)}
    assert (len(seen.forward), len(seen.backward)) == (1, 2), "the gradients of the weight and the bias"
    assert plan.bytes_moved() == sum(2 * one.nbytes * (ranks - 1) // ranks for one in (*seen.forward, *seen.backward))


class NormedKey(PackedKey):
    """A norm of the key on the way: its own gradient is summed there, so that what is before has a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().taken(x)
        return q, self.norm(k), v


class KeyUsedTwice(PackedKey):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + self.taken(x)[2].mean()
        return result


class FromTheFront(PackedKey):
    """The key before the queries: positions that change."""

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x).view(*x.shape[:2], self.heads + 2, self.dim)
        return packed[..., 2:, :], packed[..., :1, :], packed[..., 1:2, :]


class ByPlace(PackedKey):
    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x).view(*x.shape[:2], self.heads + 2, self.dim)
        return packed[..., :4, :], packed[..., 4:5, :], packed[..., 5:, :]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NormedKey, "would be reduced although it is whole"),
        (KeyUsedTwice, "would be"),
        (FromTheFront, "picked from by position"),
        (ByPlace, "by position"),
    ],
)
def test_a_packed_key_that_cannot_be_every_ranks(make: type[nn.Module], why: str) -> None:
    plan, _ = planned(make())
    assert not plan.shards and why in plan.whole["qkv.weight"]
