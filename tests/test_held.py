"""What users hold, a node or a match, is followed through what is done to the model; a dead one says since when."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import NotApplicable, call_module
from tests.small import Mlp, bias_gelu, ids, small


def called_gelu(x: torch.Tensor) -> torch.Tensor:
    """A call by type."""
    return call_module(nn.GELU)(x)


def called_fc10(x: torch.Tensor) -> torch.Tensor:
    """A call by path."""
    return call_module("fc10")(x)


@pytest.mark.unwritable("a module with weights takes another's place")
def test_a_node_follows_its_module_and_back() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp, inner, old = sch["blocks.0.mlp"], sch["blocks.0.mlp.fc1"], sch["blocks.0.mlp"].module
    new = Mlp(16)
    mlp.replace(new)
    assert mlp.module is new and mlp.path == "blocks.0.mlp" and sch["blocks.0.mlp"] is mlp
    for use in (lambda: inner.path, lambda: inner.annotate("weight", "x", 1), lambda: inner.replace(nn.Linear(16, 32))):
        with pytest.raises(schedule.PathError, match=r"no longer part (?s:.*)replace\(Mlp\) on blocks.0.mlp took it"):
            use()
    added = sch["blocks.0.mlp.fc1"]
    sch.undo()
    assert mlp.module is old and inner.path == "blocks.0.mlp.fc1"
    with pytest.raises(schedule.PathError, match=r"replace\(Mlp\) on blocks.0.mlp, which put it in, was undone"):
        added.path  # noqa: B018 - the property says it
    sch.redo()
    assert added.path == "blocks.0.mlp.fc1"


def test_a_match_is_followed_through_other_rewrites() -> None:
    """Nodes around it, a wrapper, a decomposed layer; and its own step undone."""
    sch = schedule.create_schedule(small(), ids())
    block, mlp = sch["blocks.0"], sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu, expect=1)
    mlp["fc10"].decompose()
    mlp["fc1"].decompose()
    block.checkpoint()
    block["attn.dropout"].replace(nn.Dropout(0.1))
    mlp.fuse(matches)
    sch.undo()
    mlp.fuse(matches)
    with pytest.raises(schedule.MatchError, match=r"already consumed by fuse\(bias_gelu\) on blocks.0.mlp"):
        mlp.fuse(matches)
    assert schedule.verify(sch, ids(), steps=1)


@pytest.mark.unwritable("a module with weights takes another's place")
@pytest.mark.parametrize(
    ("path", "new", "since"),
    [
        ("act", nn.GELU(), r"act__gelu computes something else(?s:.*)replace\(GELU\) on blocks.0.mlp.act"),
        ("act", nn.ReLU(), r"called as act can no longer be inlined(?s:.*)replace\(ReLU\) on blocks.0.mlp.act"),
        ("", Mlp(16), ""),
        ("", nn.Linear(16, 16), r"called as fc1 can no longer be inlined(?s:.*)replace\(Linear\) on blocks.0.mlp"),
    ],
)
def test_a_match_in_what_was_replaced(path: str, new: nn.Module, since: str) -> None:
    """Never rewritten as what it was: what computes the same is followed, anything else says what took it."""
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu, expect=1)
    (mlp[path] if path else mlp).replace(copy.deepcopy(new))
    expected = copy.deepcopy(sch.module).eval()(**ids())
    if since:
        with pytest.raises(schedule.MatchError, match=since):
            mlp.fuse(matches)
        sch.undo()
        mlp.fuse(matches)
    else:
        mlp.fuse(matches)
        torch.testing.assert_close(sch.module.eval()(**ids()), expected)


def test_a_match_of_a_call_whose_module_was_replaced() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(called_gelu, expect=1)
    mlp["act"].replace(nn.ReLU())
    with pytest.raises(schedule.MatchError, match=r"act, whose call is the match, was replaced(?s:.*)replace\(ReLU"):
        mlp.replace(F.gelu, matches)
    sch.undo()
    with pytest.raises(NotApplicable, match="names no inputs"):
        mlp.replace(F.gelu, mlp.find(nn.GELU, expect=1))
    mlp.replace(F.gelu, matches)


def test_a_match_found_in_what_was_undone() -> None:
    sch = schedule.create_schedule(small(), ids())
    mlp = sch["blocks.0.mlp"]
    mlp.replace(bias_gelu, mlp.find(bias_gelu))
    calls = mlp.find(called_fc10, expect=1)
    sch.undo()
    with pytest.raises(schedule.MatchError, match=r"no longer in the graph(?s:.*)undo of replace\(bias_gelu, "):
        mlp.replace(F.relu, calls)
    sch.redo()
    mlp.replace(F.relu, calls)
