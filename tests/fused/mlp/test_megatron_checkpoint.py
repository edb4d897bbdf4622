"""What the MLP asks of Megatron's functions for a checkpoint; `tests/peers/megatron` compares with Megatron itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused.mlp import MLP, MLPSubmodules, TransformerConfig

DATA = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
OFFSETS = ((0, 1, 3),)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the names of Megatron's, whose functions return what they are given."""
    utils: Any = ModuleType("megatron.core.transformer.utils")
    mlp: Any = ModuleType("megatron.core.transformer.mlp")

    def sharded(
        state: Any, prefix: str, axes: Any, offsets: Any, *, tp_group: Any, dp_cp_group: Any
    ) -> dict[str, tuple[Any, ...]]:
        assert dp_cp_group is DATA and all(isinstance(tensor, nn.Parameter) for tensor in state.values())
        return {prefix + name: (axes.get(name), offsets, tp_group) for name in state}

    utils.make_sharded_tensors_for_checkpoint = sharded
    utils.ensure_metadata_has_dp_cp_group = lambda metadata: {"dp_cp_group": DATA} | (metadata or {})
    utils.sharded_state_dict_default = lambda part, *given: part.sharded_state_dict(*given)
    mlp.apply_swiglu_sharded_factory = lambda tensor, offsets, apart, **groups: ("halves", apart, *tensor)
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (utils, mlp):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def made(gated: bool, group: Any = None, parts: MLPSubmodules | None = None) -> MLP:
    config = TransformerConfig(4, ffn_hidden_size=8, gated_linear_unit=gated, activation_func=F.silu)
    return MLP(config, parts, tp_group=group)


@pytest.mark.usefixtures("megatron")
def test_shards_of_a_group_and_offsets_in_front() -> None:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    assert made(False, group).sharded_state_dict("m.", OFFSETS) == {
        "m.linear_fc1.weight": (0, OFFSETS, group),
        "m.linear_fc1.bias": (0, OFFSETS, group),
        "m.linear_fc2.weight": (1, OFFSETS, group),
        "m.linear_fc2.bias": (None, OFFSETS, group),
    }


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("apart", [False, True])
def test_halves_of_a_gated_layer(apart: bool) -> None:
    state = made(True).sharded_state_dict(metadata={"dp_cp_group": DATA, "singleton_local_shards": apart})
    whole: Any = (None, (), None)
    assert state == {
        "linear_fc1.weight": ("halves", apart, *whole),
        "linear_fc1.bias": ("halves", apart, *whole),
        "linear_fc2.weight": whole,
        "linear_fc2.bias": whole,
    }


@pytest.mark.usefixtures("megatron")
def test_layers_of_others_give_their_own_state() -> None:
    class Other(nn.Linear):
        def __init__(self, into: int, out: int, **settings: Any) -> None:
            super().__init__(into, out)

        def sharded_state_dict(self, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
            return {f"{prefix}own": (offsets, metadata["any"])}

    state = made(True, parts=MLPSubmodules(Other, Other)).sharded_state_dict("m.", metadata={"any": 1})
    assert state == {"m.linear_fc1.own": ((), 1), "m.linear_fc2.own": ((), 1)}


@pytest.mark.usefixtures("megatron")
def test_other_metadata_asks_for_tensors() -> None:
    mlp = made(False)
    state = mlp.sharded_state_dict(metadata={"any": 1})
    assert all(torch.equal(state[name], parameter) for name, parameter in mlp.named_parameters())


@pytest.mark.parametrize("asked", [{"sharded_offsets": OFFSETS}, {"metadata": {"dp_cp_group": DATA}}])
def test_without_megatron(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    for part in (made(True), made(True).linear_fc1):
        with pytest.raises(NotImplementedError, match=r"megatron\.core cannot be imported; install megatron-core"):
            part.sharded_state_dict(**asked)
