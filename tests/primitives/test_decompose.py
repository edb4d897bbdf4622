"""``decompose``: a Linear or Conv1D as product and addition, in the graph above."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Schedule
from tests import zoo
from tests.fingerprint import fingerprint
from tests.small import bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


def test_the_graph_above_holds_product_and_addition(sch: Schedule) -> None:
    before = fingerprint(sch)
    assert sch["blocks.0.mlp.fc1"].decompose() is sch["blocks.0.mlp.fc1"]
    nodes = {n.name: n for n in sch["blocks.0.mlp"].graph.nodes}
    assert nodes["fc1__product"].target is F.linear and nodes["fc1__add"].target is operator.add
    assert nodes["fc1__weight"].target == "fc1.weight" and nodes["fc1__bias"].target == "fc1.bias"
    assert nodes["fc10"].op == "call_module"
    assert schedule.verify(sch, ids(), steps=2)
    sch.undo()
    assert fingerprint(sch) == before


def test_conv1d() -> None:
    batch = zoo.batch("gpt2")
    sch = schedule.create_schedule(zoo.build("gpt2"), batch=batch)
    sch["transformer.h.*.mlp.c_fc"].decompose()
    mlp = sch["transformer.h.0.mlp"]
    assert [n.target for n in mlp.graph.nodes if n.name == "c_fc__product"] == [torch.matmul]
    assert schedule.verify(sch, batch, steps=1)


def test_a_group_in_one_graph(sch: Schedule) -> None:
    sch["blocks.0.attn.[qkv]"].decompose()
    calls = [n.target for n in sch["blocks.0.attn"].graph.nodes if n.op == "call_module"]
    assert calls == ["dropout", "out"] and len(sch.history) == 1
    assert schedule.verify(sch, ids(), steps=1)


def test_what_was_decomposed_can_be_found_and_fused(sch: Schedule) -> None:
    sch["blocks.0.mlp.fc1"].decompose()
    mlp = sch["blocks.0.mlp"]
    mlp.fuse(mlp.find(bias_gelu, expect=1))
    assert schedule.verify(sch, ids(), steps=1)
    sch.undo()
    sch.undo()
    assert not sch.history


def test_a_matched_site_survives_decompose(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu, expect=1)
    sch["blocks.0.mlp.fc1"].decompose()
    mlp.fuse(matches)
    assert schedule.verify(sch, ids(), steps=1)


def test_wrapping_it_afterwards_still_counts(sch: Schedule) -> None:
    sch["blocks.0.mlp.fc1"].decompose()
    seen = []
    sch.module.blocks[0].mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(schedule.FallbackWarning, match=r"blocks\.\*\.mlp"):
        sch.module(**ids())
    assert seen


def test_refusals(sch: Schedule) -> None:
    sch.module.blocks[1].mlp.fc1.register_forward_hook(lambda *_: None)
    before = fingerprint(sch)
    for path, message in [
        ("blocks.0.mlp.act", "a GELU is neither a Linear nor a Conv1D"),
        ("head", "has no bias"),
        ("unused", "no graph calls unused"),
        ("blocks.1.mlp.fc1", "has a hook, which would be swallowed"),
    ]:
        with pytest.raises(schedule.NotApplicable, match=message):
            sch[path].decompose()
    assert fingerprint(sch) == before
    sch["blocks.0.mlp.fc1"].decompose()
    with pytest.raises(schedule.NotApplicable, match=r"blocks.0.mlp.fc1 is in the middle of the graph of blocks.0.mlp"):
        sch["blocks.0.mlp.fc1"].decompose()
    with pytest.raises(schedule.NotApplicable, match="cannot decompose"):
        schedule.create_schedule(nn.Linear(2, 2), batch=torch.ones(1, 2)).decompose()
