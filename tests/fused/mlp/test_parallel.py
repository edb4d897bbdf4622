"""The MLP over a tensor-parallel group, and its checkpoints from one size of the group to another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

from fused.mlp import MLP, TransformerConfig
from tests.distributed import launch

KINDS = {"plain": (False, F.gelu), "gated": (True, F.silu)}


def made(kind: str, group: Any = None) -> MLP:
    """The same weights whatever the group: they are initialized whole."""
    gated, activation = KINDS[kind]
    torch.manual_seed(3)
    config = TransformerConfig(8, ffn_hidden_size=16, gated_linear_unit=gated, activation_func=activation)
    mlp = MLP(config, tp_group=group)
    for layer, axis in ((mlp.linear_fc1, 0), (mlp.linear_fc2, None)):
        whole = torch.linspace(-1, 1, 32 if gated and axis == 0 else 16 if axis == 0 else 8)
        with torch.no_grad():
            layer.bias.copy_(
                whole if group is None or group.size() == 1 or axis is None else layer.shares.cut(whole, axis)
            )
    return mlp


def run(mlp: MLP) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 48).view(3, 2, 8).requires_grad_()
    out, bias = mlp(x)
    assert bias is not None
    ((out + bias) * torch.linspace(-1, 1, 48).view(3, 2, 8)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def computes_the_same(mesh: Any) -> None:
    for kind in KINDS:
        ours, theirs = made(kind, mesh.get_group()), made(kind)
        for a, b in zip(run(ours), run(theirs), strict=True):
            torch.testing.assert_close(a, b)
        for name, axis in (("linear_fc1", 0), ("linear_fc2", 1)):
            layer, whole = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(layer.weight.grad, layer.shares.cut(whole.weight.grad, axis))
        torch.testing.assert_close(ours.linear_fc2.bias.grad, theirs.linear_fc2.bias.grad)
        share = ours.linear_fc1.shares.cut(theirs.linear_fc1.bias.grad, 0)
        torch.testing.assert_close(ours.linear_fc1.bias.grad, share)


def saved(path: str, mesh: Any) -> None:
    for kind in KINDS:
        dcp.save(made(kind, mesh.get_group()).sharded_state_dict("mlp."), checkpoint_id=f"{path}/{kind}")


def loaded(path: str, mesh: Any) -> None:
    """To the bit what a group of this size has."""
    for kind in KINDS:
        group = None if mesh is None else mesh.get_group()
        expected, mlp = made(kind, group), made(kind, group)
        for parameter in mlp.parameters():
            torch.nn.init.constant_(parameter, 7.0)
        dcp.load(mlp.sharded_state_dict("mlp."), checkpoint_id=f"{path}/{kind}")
        for (name, ours), theirs in zip(mlp.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs), (kind, name)


def test_two_ranks() -> None:
    launch.passes(computes_the_same)


def test_saved_at_two_ranks_loads_at_one_and_four(tmp_path: Path) -> None:
    launch.passes(partial(saved, str(tmp_path)))
    loaded(str(tmp_path), None)
    launch.passes(partial(loaded, str(tmp_path)), 4)
    launch.passes(partial(loaded, str(tmp_path)))


def test_without_the_factory_the_halves_mix() -> None:
    """A rank's share of a gated layer is a part of the gate above a part of the other half, no slice of the whole."""
    from fused.mlp.shares import Shares

    whole = torch.arange(8.0)
    share = Shares(None, 2, 0, parts=2).cut(whole, 0)
    assert share.tolist() == [0, 1, 4, 5] and share.tolist() != whole[:4].tolist()


class Ranks:
    """A group of no more than a size and a rank."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.numbers = size, rank

    def size(self) -> int:
        return self.numbers[0]

    def rank(self) -> int:
        return self.numbers[1]


def test_uneven_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="16 outputs cannot be shared evenly by 3 ranks"):
        MLP(TransformerConfig(8, ffn_hidden_size=16), tp_group=Ranks(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_need_not_be_one_of_torch(kind: str) -> None:
    """Not for one rank, and for several not to have their weights."""
    for ours, theirs in zip(run(made(kind, Ranks(1))), run(made(kind)), strict=True):
        assert torch.equal(ours, theirs)
    whole = made(kind)
    for rank in range(2):
        own = made(kind, Ranks(2, rank))
        assert torch.equal(own.linear_fc1.weight, own.linear_fc1.shares.cut(whole.linear_fc1.weight, 0))
        assert torch.equal(own.linear_fc2.weight, whole.linear_fc2.weight.chunk(2, 1)[rank])
        for use in (run, MLP.sharded_state_dict):
            with pytest.raises(
                TypeError, match=r"group is a Ranks of 2 ranks.* give a torch\.distributed\.ProcessGroup"
            ):
                use(own)


def test_the_group_of_a_collection() -> None:
    groups = SimpleNamespace(tp=Ranks(2), expt_tp=Ranks(4))
    config = TransformerConfig(8, ffn_hidden_size=16)
    assert MLP(config, pg_collection=groups).linear_fc1.weight.shape == (8, 8)
    assert MLP(config, None, True, None, 16, pg_collection=groups).linear_fc1.weight.shape == (4, 8)
    assert MLP(config, tp_group=Ranks(1), pg_collection=groups).linear_fc1.weight.shape == (16, 8)
    assert MLP(config, pg_collection=SimpleNamespace()).linear_fc1.weight.shape == (16, 8)
