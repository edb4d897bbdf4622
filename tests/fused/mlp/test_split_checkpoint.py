"""The state of an MLP, stored with the halves of a gated first layer apart."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

from fused.mlp import MLP, TransformerConfig, apply_swiglu_sharded_factory


def mlp(gated: bool, seed: int) -> MLP:
    torch.manual_seed(seed)
    made = MLP(TransformerConfig(hidden_size=12, gated_linear_unit=gated, activation_func=F.silu))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("gated", [True, False])
def test_saved_and_loaded(tmp_path, gated):
    saved, loaded = mlp(gated, 0), mlp(gated, 1)
    dcp.save(saved.sharded_state_dict("layers.0.mlp."), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(loaded.sharded_state_dict("layers.0.mlp."), checkpoint_id=tmp_path, no_dist=True)
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_halves_have_names_and_memory_of_the_parameter():
    gated = mlp(True, 0)
    state = gated.sharded_state_dict("m.", metadata={"any": 1})
    assert sorted(state) == [
        "m.linear_fc1.bias_v",
        "m.linear_fc1.bias_w",
        "m.linear_fc1.weight_v",
        "m.linear_fc1.weight_w",
        "m.linear_fc2.bias",
        "m.linear_fc2.weight",
    ]
    weight = gated.linear_fc1.weight
    assert torch.equal(state["m.linear_fc1.weight_w"], weight[:48])
    assert torch.equal(state["m.linear_fc1.weight_v"], weight[48:])
    state["m.linear_fc1.weight_v"].fill_(3)
    assert (weight[48:] == 3).all() and not (weight[:48] == 3).any()
    assert sorted(mlp(False, 0).sharded_state_dict()) == sorted(mlp(False, 0).state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_halves_put_together_from_the_parts_of_any_number_of_ranks(ranks):
    whole = torch.randn(16, 3)
    gate, up = whole.chunk(2)
    built = [
        apply_swiglu_sharded_factory("w", torch.cat(halves)).build()
        for halves in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)
    ]
    halves = {key: torch.cat([state[key] for state in built]) for key in ("w_w", "w_v")}
    assert torch.equal(apply_swiglu_sharded_factory("w", whole).merge(halves), whole)


def test_what_is_not_there_yet():
    with pytest.raises(NotImplementedError, match=r"sharded_offsets \(\(0, 1, 4\),\)"):
        mlp(True, 0).sharded_state_dict(sharded_offsets=((0, 1, 4),))
    with pytest.raises(NotImplementedError, match="sharded_offsets"):
        apply_swiglu_sharded_factory("w", torch.randn(4, 2), ((0, 1, 4),))
    with pytest.raises(ValueError, match=r"'w' \[3, 2\] does not have two halves"):
        apply_swiglu_sharded_factory("w", torch.randn(3, 2))
