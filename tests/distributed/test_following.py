"""Which attributes of a caller hold sizes of a shared dimension; no processes needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedule.api.simulate import simulate
from schedule.capture.recording.recording import record
from schedule.distributed.tensor_parallel.output_propagation import follow
from schedule.distributed.tensor_parallel.size_settings import Derived, Setting, whole_forward
from schedule.util.errors import ShardError
from tests.zoo import batch, build


class Attention(nn.Module):
    """The skeleton of an attention, its sizes kept in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dim, self.width, self.unrelated = 4, 8, 32, 4
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)


class ByChunk(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(*x.shape[:2], self.heads, self.dim).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v) * self.unrelated
        result: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.width))
        return result


class ByKeyword(Attention):
    """Every argument by name."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.split(self.qkv(x), split_size_or_sections=self.width, dim=-1)
        q, k, v = (t.unflatten(dim=-1, sizes=(self.heads, self.dim)).permute(dims=(0, 2, 1, 3)) for t in (q, k, v))
        y = ((q @ k.swapdims(dim0=2, dim1=3)).unsqueeze(dim=0).softmax(dim=-1).squeeze(dim=0)) @ v
        result: Tensor = self.out(y.transpose(dim0=1, dim1=2).reshape(shape=(*x.shape[:2], self.width)))
        return result


class ByView(Attention):
    """Packed inside each part: q, k, v outermost, batch and heads merged for bmm."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x).view(b, s, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        q, k, v = (packed[i].reshape(b * self.heads, s, self.dim) for i in range(3))
        y = torch.bmm((q @ k.transpose(1, 2)).softmax(-1), v).view(b, self.heads, s, self.dim)
        result: Tensor = self.out(y.transpose(1, 2).reshape(b, s, -1))
        return result


class ByHead(Attention):
    """Packed inside each head, as Bloom and GPT-NeoX have it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, self.dim).unbind(3)
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        result: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class OverHeads(Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(*x.shape[:2], self.heads, -1).softmax(2)
        result: Tensor = y.flatten(2)
        return result


class ByPosition(Attention):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.qkv(x)[..., : self.width])
        return result


class Grouped(Attention):
    """Packed by groups of a key, a value and the queries that read them, as Falcon-40B has it."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_heads, self.qkv = 2, nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x).view(b, s, -1, self.heads // self.kv_heads + 2, self.dim)
        q, k, v = packed[:, :, :, :-2], packed[:, :, :, [-2]], packed[:, :, :, [-1]]
        k, v = (torch.broadcast_to(t, q.shape).flatten(2, 3).transpose(1, 2) for t in (k, v))
        q = q.flatten(2, 3).transpose(1, 2).reshape(b, self.heads, s, self.dim)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.out(y.transpose(1, 2).reshape(b, s, self.heads * self.dim))
        return result


class ByNumber(Attention):
    """Its number of heads is written in the code."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 3, self.dim).unbind(3)
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class ByWidth(Attention):
    """The size of a head is worked out from what the ranks share and what they do not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(*x.shape[:2], self.heads, 3 * self.width // self.heads)
        result: Tensor = y.relu().flatten(2)
        return result


def followed(module: nn.Module, columns: dict[str, int], ranks: int = 2, every: bool = False) -> dict[str, Any]:
    recording = record(module, torch.randn(2, 5, 32))
    return follow(whole_forward(module, recording).graph, module, columns, ranks, every=every)


@pytest.mark.parametrize(
    ("cls", "parts", "expected"),
    [
        (ByChunk, 3, {"heads": (4, 2), "width": (32, 16)}),
        (ByKeyword, 3, {"heads": (4, 2), "width": (32, 16)}),
        (ByView, 3, {"heads": (4, 2)}),
        (ByHead, 1, {"heads": (4, 2)}),
        (Grouped, 1, {"heads": (4, 2), "kv_heads": (2, 1)}),
        (ByWidth, 1, {"heads": (4, 2), "width": (32, 16)}),
    ],
)
def test_sizes_are_found(cls: type[Attention], parts: int, expected: dict[str, Any]) -> None:
    module = cls()
    found = followed(module, {"qkv": parts})
    found.pop("width", None) if "width" not in expected else None
    assert found == expected
    assert type(module.heads) is int and module.heads == 4


@pytest.mark.parametrize(
    ("cls", "parts", "ranks", "why"),
    [
        (ByChunk, 1, 2, "splits the shared features into 3 pieces"),
        (ByChunk, 3, 3, "cannot be divided among 3 ranks"),
        (ByHead, 1, 3, "cannot be divided among 3 ranks"),
        (OverHeads, 1, 2, "softmax over shared features"),
        (ByPosition, 1, 2, "picks from shared features by position"),
    ],
)
def test_what_cannot_be_followed(cls: type[Attention], parts: int, ranks: int, why: str) -> None:
    with pytest.raises(ShardError, match=why) as caught:
        followed(cls(), {"qkv": parts}, ranks)
    assert caught.value.fix and "test_following.py" in caught.value.where


def test_a_size_that_cannot_follow_alone() -> None:
    """What the code itself says is the same on every rank."""
    assert followed(ByNumber(), {"qkv": 1}) == {}
    with pytest.raises(ShardError, match="4 of the shared features is a number in the code"):
        followed(ByNumber(), {"qkv": 1}, every=True)


def test_sizes_remember_what_they_are_made_of() -> None:
    heads, groups = Setting(8, "heads"), Setting(4, "groups")
    for size in (heads // groups + 2, 2 + heads // groups, 1 + heads % 3 + heads // 8, 2**groups // groups):
        assert isinstance(size, Derived) and size == 4
    assert (heads // groups + 2).given({"heads": 4}) == 3
    assert (heads // groups + 2).given({"heads": 4, "groups": 2}) == 4
    assert (100 - heads).given({"heads": 4}) == 96 and (heads - 1).given({}) == 7
    assert [one.name for one in (3 * heads - groups).settings()] == ["heads", "groups"]
    assert type(heads / groups) is float and type(heads == groups) is bool and not heads < groups


@pytest.mark.parametrize(
    ("name", "path", "columns", "expected"),
    [
        ("gpt2", "transformer.h.0.attn", {"c_attn": 3}, {"split_size"}),
        ("llama", "model.layers.0.self_attn", {"q_proj": 1, "k_proj": 1, "v_proj": 1}, set()),
        ("opt", "model.decoder.layers.0.self_attn", {"q_proj": 1}, {"num_heads"}),
        ("bloom", "transformer.h.0.self_attention", {"query_key_value": 1}, {"num_heads"}),
        ("gpt_neox", "gpt_neox.layers.0.attention", {"query_key_value": 1}, set()),
        ("bert", "bert.encoder.layer.0.attention.self", {"query": 1, "key": 1, "value": 1}, set()),
    ],
)
def test_architectures(name: str, path: str, columns: dict[str, int], expected: set[str]) -> None:
    model = build(name)
    module, recording = model.get_submodule(path), record(model, batch(name))
    found = follow(whole_forward(module, recording).graph, module, columns, 2)
    assert set(found) == expected
    assert all(own * 2 == whole for whole, own in found.values())


class Reduced(nn.Module):
    """Heads of features, reduced by ``reduce``."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.up, self.heads, self.reduce = nn.Linear(8, 16), 4, reduce

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.reduce(self.up(x).relu().view(*x.shape[:2], self.heads, 4))
        return y


@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.sum(-1).sum(-1),
        lambda y: y.mean(dim=3).softmax(-1),
        lambda y: y.sum(1).sum(1),
        lambda y: y.sum((1, 3)).mean(1),
        lambda y: y.sum(-1, keepdim=True).sum(2),
    ],
)
def test_the_sharded_dimension_is_followed_through_reductions_of_others(reduce: Any) -> None:
    def shard(sch: Any) -> None:
        sch["up"].shard("weight", axis=0)
        sch["up"].shard("bias", axis=0)

    with pytest.raises(ShardError, match="over shared features"):
        simulate(Reduced(reduce), (torch.randn(2, 4, 8),), shard, 2)


class Squeezed(nn.Module):
    """Channels of an image, averaged over its positions and scaled, through convolutions in groups or not."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.channels = 16
        self.up, self.middle = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1, groups=groups)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.up(x))
        result: Tensor = self.last(y * y.mean((2, 3)).view(-1, self.channels, 1, 1))
        return result


@pytest.mark.parametrize(("groups", "expected"), [(1, {}), (4, {"channels": (16, 8)})])
def test_the_channels_of_convolutions_are_followed(groups: int, expected: dict[str, Any]) -> None:
    module = Squeezed(groups)
    graph = whole_forward(module, record(module, torch.randn(2, 3, 4, 16))).graph
    assert follow(graph, module, {"up": 1}, 2) == expected
