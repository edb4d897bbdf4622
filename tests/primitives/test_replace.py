"""``replace``: whole modules, chains, parallel chains; ``replace_all``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import Schedule, scalar
from schedule.runtime.scheduled import state_of
from tests import zoo
from tests.fingerprint import fingerprint
from tests.small import Mlp, bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


class Doubled(nn.Module):
    """Same interface as an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * self.fc1(hidden)


class Gelu(nn.Module):
    """In place of a match."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias, approximate="tanh")


# -- names --------------------------------------------------------------------------------------------------


def test_a_replacement_has_the_name_that_it_is_given(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    found = mlp.find(bias_gelu, expect=1)
    mlp.replace(Gelu(), found, name="fused_gelu")
    assert isinstance(mlp.module.fused_gelu, Gelu)
    assert {n.name: n.target for n in mlp.graph.nodes}["fused_gelu"] == "fused_gelu"
    assert sch.history[-1].replaced == found[0].nodes
    other = sch["blocks.1.mlp"]
    other.replace(Gelu(), other.find(bias_gelu), name="act")  # a child of the MLP
    assert isinstance(other.module.act, nn.GELU) and isinstance(other.module.act_1, Gelu)
    attn = sch["blocks.0.attn"]
    attn.replace(qkv, attn.find_parallel(projection, expect=1), name="packed")
    assert {n.name: n.target for n in attn.graph.nodes}["packed"] is qkv and len(sch.history[-1].replaced) == 6
    assert schedule.verify(sch, ids(), steps=1)


def test_names_that_name_nothing(sch: Schedule) -> None:
    mlp, new = sch["blocks.0.mlp"], Doubled()
    found = mlp.find(bias_gelu)
    before = fingerprint(sch)
    for name in ("a.b", "", 3):
        with pytest.raises(schedule.NotApplicable, match="cannot name a node or a module"):
            mlp.replace(Gelu(), found, name=name)  # type: ignore[arg-type]
    with pytest.raises(schedule.NotApplicable, match="keeps its path"):
        mlp.replace(new, name="doubled")
    assert fingerprint(sch) == before and not sch.history


# -- whole modules ------------------------------------------------------------------------------------------


@pytest.mark.unwritable("a module with weights takes another's place")
def test_a_module_is_swapped_and_undone(sch: Schedule) -> None:
    node, old, new = sch["blocks.0.mlp"], sch.module.blocks[0].mlp, Doubled()
    before = fingerprint(sch)
    inner = sch["blocks.0.mlp.fc10"]
    node.replace(new)
    assert sch.module.blocks[0].mlp is new and node.module is new
    assert sch["blocks.0.mlp"] is node and sch["blocks.0.mlp.fc1"].module is new.fc1
    with pytest.raises(schedule.PathError, match=r"no longer part of the model: replace\(Doubled\) on blocks.0.mlp"):
        inner.path  # noqa: B018
    sch.undo()
    assert fingerprint(sch) == before
    assert node.module is old and inner.path == "blocks.0.mlp.fc10"
    sch.redo()
    assert node.module is new


@pytest.mark.unwritable("a module with weights takes another's place")
def test_hooks_move_and_are_not_shared(sch: Schedule) -> None:
    old, new, calls = sch.module.blocks[0].mlp, Doubled(), []
    handle = old.register_forward_hook(lambda *_: calls.append("forward"))
    old.register_forward_pre_hook(lambda *_, **__: calls.append("pre"), with_kwargs=True)
    before = fingerprint(sch)
    sch["blocks.0.mlp"].replace(new)
    assert not old._forward_hooks and not old._forward_pre_hooks
    assert new._forward_hooks is not old._forward_hooks
    calls.clear()
    sch.module(**ids())
    assert calls == ["pre", "forward"]
    handle.remove()  # the user's handle still works
    sch.module(**ids())
    assert calls == ["pre", "forward", "pre"]
    sch.undo()
    assert list(fingerprint(sch)) == list(before)
    assert not new._forward_pre_hooks and len(old._forward_pre_hooks) == 1


@pytest.mark.unwritable("a module with weights takes another's place")
def test_the_replacements_own_hooks_stay(sch: Schedule) -> None:
    new, calls = Doubled(), []
    sch.module.blocks[0].mlp.register_forward_hook(lambda *_: calls.append("old"))
    new.register_forward_hook(lambda *_: calls.append("new"))
    sch["blocks.0.mlp"].replace(new)
    calls.clear()
    sch.module(**ids())
    assert calls == ["old", "new"]
    sch.undo()
    assert len(new._forward_hooks) == 1 and len(sch.module.blocks[0].mlp._forward_hooks) == 1


@pytest.mark.unwritable("a module with weights takes another's place")
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_backward_hook"])
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_backward_hooks_move(sch: Schedule, register: str) -> None:
    """Torch has two kinds of them, and runs those of the kind that the module says it has."""
    old, new, calls = sch.module.blocks[0].mlp, Doubled(), []
    getattr(old, register)(lambda module, *_: calls.append(type(module)))
    sch["blocks.0.mlp"].replace(new)
    calls.clear()
    sch.module(**ids()).sum().backward()
    sch.undo()
    sch.module(**ids()).sum().backward()
    assert calls == [Doubled, type(old)] and new._is_full_backward_hook is None


@pytest.mark.unwritable("a module with weights takes another's place")
def test_backward_hooks_of_two_kinds_do_not_mix(sch: Schedule) -> None:
    new = Doubled()
    sch.module.blocks[0].mlp.register_full_backward_hook(lambda *_: None)
    new.register_backward_hook(lambda *_: None)
    before = fingerprint(sch)
    with pytest.raises(schedule.NotApplicable, match=r"full backward hooks(?s:.*)on both"):
        sch["blocks.0.mlp"].replace(new)
    assert fingerprint(sch) == before


@pytest.mark.unwritable("a module with weights takes another's place")
def test_training_flag_follows(sch: Schedule) -> None:
    sch.module.eval()
    new = Doubled()
    sch["blocks.0.mlp"].replace(new)
    assert not new.training and not new.fc1.training
    sch.undo()
    assert new.training


@pytest.mark.unwritable("a module with weights takes another's place")
def test_tied_weights_stay_tied(sch: Schedule) -> None:
    new = nn.Linear(16, 32, bias=False)
    own = new.weight
    sch["head"].replace(new)
    assert sch.module.head.weight is sch.module.embed.weight
    sch.undo()
    assert new.weight is own and sch.module.head.weight is sch.module.embed.weight
    with pytest.raises(schedule.NotApplicable, match=r"weight is tied(?s:.*)\[32, 16\](?s:.*)\[64, 16\]"):
        sch["head"].replace(nn.Linear(16, 64, bias=False))


def test_shared_modules_are_replaced_everywhere() -> None:
    shared = nn.Linear(4, 4)
    sch = schedule.create_schedule(nn.Sequential(shared, nn.ReLU(), shared))
    sch["0"].replace(nn.Identity())
    assert sch.module[0] is sch.module[2] and isinstance(sch.module[2], nn.Identity)


@pytest.mark.unwritable("a lambda is looked for")
def test_the_parents_graph_calls_the_new_module(sch: Schedule) -> None:
    block = sch["blocks.0"]
    block.fuse(block.find(lambda x, y: x + y, expect=2)[:1], compiler=None)
    assert state_of(block.module) is not None
    new = Doubled()
    sch["blocks.0.mlp"].replace(new)
    new.fc1.register_forward_hook(lambda *_: seen.append(1))
    seen: list[int] = []
    sch.module(**ids())
    assert seen and state_of(block.module).fallbacks == 0  # type: ignore[union-attr]


@pytest.mark.unwritable("a module with weights takes another's place")
def test_a_new_module_can_be_scheduled(sch: Schedule) -> None:
    class Fresh(Mlp):
        pass

    sch["blocks.0.mlp"].find(bias_gelu)
    sch["blocks.0.mlp"].replace(Fresh(16))
    node = sch["blocks.0.mlp"]
    node.fuse(node.find(bias_gelu, expect=1))
    assert schedule.verify(schedule.create_schedule(sch.module, ids()), ids(), steps=1)


@pytest.mark.unwritable("what is put in is defined inside the test")
def test_other_signatures_are_refused(sch: Schedule) -> None:
    class Two(nn.Module):
        def forward(self, hidden: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
            return hidden + extra

    class NoMask(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    before = fingerprint(sch)
    with pytest.raises(schedule.NotApplicable, match=r"another signature(?s:.*)'extra'(?s:.*)Two.forward\(hidden"):
        sch["blocks.0.mlp"].replace(Two())
    with pytest.raises(schedule.NotApplicable, match=r"another signature(?s:.*)'mask'"):
        sch["blocks.0.attn"].replace(NoMask())  # it is called with mask=
    assert fingerprint(sch) == before
    blind = schedule.create_schedule(small())
    with pytest.raises(schedule.NotApplicable, match="another signature"):
        blind["blocks.0.mlp"].replace(Two())
    blind["blocks.0.attn"].replace(NoMask())  # nobody said that mask is used


def test_whole_module_refusals(sch: Schedule) -> None:
    with pytest.raises(schedule.NotApplicable, match=r"the root cannot be replaced(?s:.*)create_schedule"):
        sch.replace(nn.Identity())
    with pytest.raises(schedule.NotApplicable, match="not by function"):
        sch["head"].replace(bias_gelu)
    with pytest.raises(schedule.NotApplicable, match="part of the model already"):
        sch["blocks.0.mlp"].replace(sch.module.blocks[1].mlp)


# -- chains -------------------------------------------------------------------------------------------------


def test_a_chain_becomes_one_call(sch: Schedule) -> None:
    mlps = sch["blocks.*.mlp"]
    mlps.replace(bias_gelu, mlps.find(bias_gelu))
    node = next(n for n in mlps[0].graph.nodes if n.target is bias_gelu)
    assert [str(v) for v in node.kwargs.values()] == ["fc1__product", "fc1__bias"]
    assert node.meta["spec"].shape == (2, 5, 32) and node.meta["source"]
    assert schedule.verify(sch, ids(), steps=2)
    sch.undo()
    assert state_of(sch.module.blocks[0].mlp) is None


def scaled(s: torch.Tensor, *, scale: float, other: int = 3) -> torch.Tensor:
    return F.softmax(s * scale, dim=-1) * (other / 3)


@pytest.mark.unwritable("a lambda is looked for")
def test_constants_go_by_keyword_where_taken(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    matches = attn.find(lambda s: F.softmax(s * scalar("scale"), dim=-1), expect=1)
    attn.replace(scaled, matches)
    assert next(n for n in attn.graph.nodes if n.target is scaled).kwargs["scale"] == 0.25
    sch.undo()
    attn.replace(lambda scores: F.softmax(scores * 0.25, dim=-1), matches)  # by place, and without the constant
    assert schedule.verify(sch, ids(), steps=1)


@pytest.mark.unwritable("what is put in is defined inside the test")
def test_by_name_or_by_place(sch: Schedule) -> None:
    def swapped(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 1.0 + bias, approximate="tanh")

    def renamed(a: torch.Tensor, b: torch.Tensor, c: float = 1.0) -> torch.Tensor:
        return F.gelu(a * c + b, approximate="tanh")

    mlp = sch["blocks.0.mlp"]
    for function in (swapped, renamed):
        mlp.replace(function, mlp.find(bias_gelu))
        assert schedule.verify(sch, ids(), steps=1)
        sch.undo()


@pytest.mark.parametrize("function", [lambda x: x, lambda x, bias, more: x, lambda *, k: k, lambda x, bias, *, k: x])
def test_a_function_of_another_signature_is_refused(sch: Schedule, function: Any) -> None:
    mlp = sch["blocks.0.mlp"]
    matches = mlp.find(bias_gelu)
    before = fingerprint(sch)
    with pytest.raises(schedule.NotApplicable, match=r"another signature than the pattern(?s:.*)\(x, bias\)"):
        mlp.replace(function, matches)
    assert fingerprint(sch) == before


class Act(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.scale * F.gelu(x + bias, approximate="tanh")


@pytest.mark.unwritable("a module with weights takes another's place")
def test_a_module_in_place_of_a_chain(sch: Schedule) -> None:
    mlp, new = sch["blocks.0.mlp"], Act()
    before = fingerprint(sch, new)
    mlp.replace(new, mlp.find(bias_gelu))
    assert sch.module.blocks[0].mlp.scheduled_act is new
    assert "blocks.0.mlp.scheduled_act.scale" in sch.module.state_dict()
    assert mlp["scheduled_act"].path == "blocks.0.mlp.scheduled_act"
    with torch.random.fork_rng():
        sch.module(**ids()).sum().backward()
    assert new.scale.grad is not None
    sch.module.zero_grad(set_to_none=True)
    sch.undo()
    assert fingerprint(sch, new) == before
    mlps = sch["blocks.*.mlp"]
    with pytest.raises(schedule.NotApplicable, match="replace one match at a time"):
        sch.replace(new, mlps.find(bias_gelu))
    assert fingerprint(sch, new) == before


def qkv(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights, biases = tensors[:3], tensors[3:]
    return F.linear(x, torch.cat(weights), torch.cat(biases)).chunk(3, dim=-1)


def projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


class Pooled(nn.Module):
    """A pool and a view by numbers and by a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(x), 2, padding=(1, 0)).view(x.size(0), -1).tanh()


def pooled_view(x: torch.Tensor, size: int, padding: int, shape: tuple[int, ...]) -> torch.Tensor:
    return F.max_pool2d(F.relu(x), size, padding=padding).view(shape)


def pooled_reshape(x: torch.Tensor, size: tuple[int, int], padding: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    assert (size, padding) == ((2, 2), (1, 0))
    return F.relu(F.max_pool2d(x, size, padding=padding)).reshape(shape)


def test_numbers_and_sizes_go_to_the_replacement() -> None:
    sch = schedule.create_schedule(Pooled(), torch.randn(2, 3, 8, 8))
    sch.replace(pooled_reshape, sch.find(pooled_view, expect=1))
    assert schedule.verify(sch, torch.randn(4, 3, 6, 8), steps=0)
    assert state_of(sch.module).fallbacks == 0


def test_parallel_chains_become_one_call(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    attn.replace(qkv, attn.find_parallel(projection, expect=1))
    assert [n.target for n in attn.graph.nodes].count(qkv) == 1
    assert not {"q", "k", "v"} & {n.target for n in attn.graph.nodes if n.op == "call_module"}
    assert schedule.verify(sch, ids(), steps=2)
    sch.undo()
    assert schedule.verify(sch, ids(), steps=1)


def test_parallel_chains_in_a_group(sch: Schedule) -> None:
    attns = sch["blocks.*.attn"]
    attns.replace(qkv, attns.find_parallel(projection, expect=2))
    assert len(sch.history) == 1 and schedule.verify(sch, ids(), steps=1)


def test_parallel_chains_of_bert() -> None:
    batch = zoo.batch("bert")
    sch = schedule.create_schedule(zoo.build("bert"), batch=batch)
    attention = sch["bert.encoder.layer.0.attention.self"]
    attention.replace(qkv, attention.find_parallel(projection, expect=1))
    assert schedule.verify(sch, batch, steps=1)
