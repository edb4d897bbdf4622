"""``trace`` and ``trace_until``: what is entered, what stays a call, what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import schedule
from schedule import Schedule
from schedule.capture.guards import origin
from schedule.runtime.scheduled import state_of
from tests import zoo
from tests.fingerprint import fingerprint
from tests.small import Attention, Mlp, bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


def calls(node: Schedule) -> list[str]:
    return [str(n.target) for n in node.graph.nodes if n.op == "call_module"]


def test_children_stay_calls(sch: Schedule) -> None:
    assert sch["blocks.0"].trace() is sch["blocks.0"]
    assert calls(sch["blocks.0"]) == ["norm", "attn", "mlp"]
    assert state_of(sch.module.blocks[0]) is None  # nothing is rewritten: it runs its own forward


def test_flatten(sch: Schedule) -> None:
    block = sch["blocks.0"]
    block.trace(flatten=True)
    assert calls(block) == [
        "norm",
        "attn.q",
        "attn.k",
        "attn.v",
        "attn.dropout",
        "attn.out",
        "mlp.fc1",
        "mlp.act",
        "mlp.fc10",
    ]
    assert set(block.specializations[0].inlined) == {"attn", "mlp"}
    sch.undo()
    assert calls(block) == ["norm", "attn", "mlp"]


@pytest.mark.unwritable("some leaves are chosen by a lambda")
@pytest.mark.parametrize("leaves", [(Attention,), ("attn",), ("att*",), (lambda path, module: path == "attn",)])
def test_leaves(sch: Schedule, leaves: tuple[object, ...]) -> None:
    sch["blocks.0"].trace(flatten=True, leaves=leaves)  # type: ignore[arg-type]
    assert calls(sch["blocks.0"]) == ["norm", "attn", "mlp.fc1", "mlp.act", "mlp.fc10"]


def test_not_recursive(sch: Schedule) -> None:
    sch.trace(flatten=True, recursive=False, leaves=("branching",))
    assert calls(sch) == ["embed", "blocks.0", "blocks.1", "branching", "head"]
    assert state_of(sch.module) is None


def test_a_flattened_graph_is_rewritten(sch: Schedule) -> None:
    sch.trace(flatten=True, leaves=("branching",))
    sch.fuse(sch.find(bias_gelu, expect=2))
    assert schedule.verify(sch, ids(), steps=1)
    assert state_of(sch.module) is not None and state_of(sch.module.blocks[0]) is None
    sch.undo()
    assert state_of(sch.module) is None and calls(sch)[:2] == ["embed", "blocks.0.norm"]
    sch.undo()
    assert calls(sch)[:2] == ["embed", "blocks.0"]


def test_trace_until(sch: Schedule) -> None:
    sch.trace_until("blocks.0.mlp")
    assert calls(sch) == ["embed", "blocks.0.norm", "blocks.0.attn", "blocks.0.mlp", "blocks.1", "branching", "head"]
    sch.trace_until("blocks.*.mlp")
    assert [c for c in calls(sch) if "mlp" in c] == ["blocks.0.mlp", "blocks.1.mlp"]
    sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find(bias_gelu, expect=1))
    assert schedule.verify(sch, ids(), steps=1)


def test_trace_until_from_below(sch: Schedule) -> None:
    sch["blocks.0"].trace_until(["mlp.fc1"])
    assert calls(sch["blocks.0"]) == ["norm", "attn", "mlp.fc1", "mlp.act", "mlp.fc10"]


def test_sequential_is_entered() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Mlp(2))
    sch = schedule.create_schedule(model, batch=torch.ones(3, 2))
    sch.trace(flatten=True)
    assert calls(sch) == ["0.0", "0.1", "1.fc1", "1.act", "1.fc10"]


def test_what_was_rewritten_stays_a_call(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    mlp.fuse(mlp.find(bias_gelu))
    sch["blocks.0"].trace(flatten=True)
    assert calls(sch["blocks.0"])[-1] == "mlp"
    with pytest.raises(schedule.NotApplicable, match="was rewritten already"):
        mlp.trace()


def test_whole_models() -> None:
    for name in ("gpt2", "llama"):
        sch = schedule.create_schedule(zoo.build(name), batch=zoo.batch(name))
        sch.trace(flatten=True)
        assert all(
            type(sch.module.get_submodule(c)).__module__.startswith(("torch.nn", "transformers.pytorch"))
            for c in calls(sch)
        )


def test_a_hook_would_be_swallowed(sch: Schedule) -> None:
    sch.module.blocks[0].mlp.register_forward_hook(lambda *_: None)
    before = fingerprint(sch)
    with pytest.raises(schedule.TraceError, match=r"mlp has a hook, which would be swallowed(?s:.*)leaves=\('mlp',\)"):
        sch["blocks.0"].trace(flatten=True)
    with pytest.raises(schedule.TraceError, match=r"blocks.0.mlp has a hook"):
        sch.trace_until("blocks.0.mlp.fc1")
    assert fingerprint(sch) == before
    sch["blocks.1"].trace(flatten=True)
    with pytest.raises(schedule.TraceError, match="mlp has a hook"):
        sch["blocks.0"].trace(flatten=True)  # also where a module like it was traced before
    sch["blocks.0"].trace(flatten=True, leaves=("mlp",))


def test_untraceable(sch: Schedule) -> None:
    before = fingerprint(sch)
    with pytest.raises(schedule.TraceError, match=r"numpy(?s:.*)small.py(?s:.*)leaf"):
        sch.trace(flatten=True)
    assert fingerprint(sch) == before


def test_a_graph_that_bakes_a_size_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PURE", {*origin.PURE, "sys"})  # as if sys gave the same answer at each call

    class Baked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(sys.getallocatedblocks() % 1009 + 1)  # another number at every call

    sch = schedule.create_schedule(Baked(), batch=torch.ones(3, 2))
    before = fingerprint(sch)
    with pytest.raises(schedule.TraceError, match=r"wrong at other shapes: it is off by(?s:.*)\[2, 2\]"):
        sch.trace()
    with pytest.raises(schedule.TraceError, match="wrong at other shapes"):
        sch.find(bias_gelu)
    assert fingerprint(sch) == before


@pytest.mark.unwritable("a module with weights takes another's place")
def test_in_the_middle_of_another_graph(sch: Schedule) -> None:
    sch["blocks.0"].trace(flatten=True)
    (match,) = sch["blocks.1.mlp"].find(bias_gelu)
    before = fingerprint(sch)
    node = sch["blocks.0.mlp"]
    message = r"blocks.0.mlp is in the middle of the graph of blocks.0(?s:.*)leaves=\('mlp',\)"
    for attempt in (
        lambda: node.find(bias_gelu),
        lambda: node.trace(),
        lambda: node.trace_until("fc1"),
        lambda: node.replace(Mlp(16)),
    ):
        with pytest.raises(schedule.NotApplicable, match=message):
            attempt()
    assert fingerprint(sch)["history"] == before["history"]
    sch["blocks.0.mlp.fc1"].replace(nn.Linear(16, 32))  # a call of that graph: fine
    sch.undo()
    sch["blocks.1.mlp"].fuse([match])


def test_bad_leaves(sch: Schedule) -> None:
    with pytest.raises(schedule.PathError, match=r"the leaf 'atn' is not a module of blocks.0"):
        sch["blocks.0"].trace(flatten=True, leaves=("atn",))
    with pytest.raises(schedule.NotApplicable, match="3 is not a leaf"):
        sch["blocks.0"].trace(flatten=True, leaves=(3,))  # type: ignore[arg-type]
    with pytest.raises(schedule.PathError, match=r"blocks.7"):
        sch.trace_until("blocks.7")
