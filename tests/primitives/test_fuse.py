"""``fuse``: the rule's op, inductor, or one call; in training and eval; parameters stay."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from fused.backends import availability
from schedule import Schedule, scalar
from schedule.primitives.callees import CompiledRegion, Region
from tests import zoo
from tests.small import bias_gelu, ids, small


@pytest.fixture
def sch() -> Schedule:
    return schedule.create_schedule(small(), batch=ids())


def targets(node: Schedule) -> list[object]:
    return [n.target for n in node.graph.nodes if n.op.startswith("call_")]


def softmax_dropout(scores: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.softmax(scores, dim=-1), p=scalar("p"), training=scalar("training"))


def test_a_rule_gives_its_fused_op(sch: Schedule) -> None:
    mlps = sch["blocks.*.mlp"]
    keys = list(sch.module.state_dict())
    weights = [id(p) for p in sch.module.parameters()]
    mlps.fuse(mlps.find(bias_gelu, expect=2))
    assert [getattr(t, "__name__", t) for t in targets(mlps[0])] == ["linear", "bias_activation", "fc10"]
    assert all(site.training in (True, False) for site in mlps[0].specializations)
    assert list(sch.module.state_dict()) == keys and [id(p) for p in sch.module.parameters()] == weights
    assert type(sch.module.blocks[0].mlp).__name__ == "Mlp"
    assert schedule.verify(sch, ids(), steps=2)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,), weight, bias)


def test_a_fusion_has_the_name_that_it_is_given(sch: Schedule) -> None:
    mlps = sch["blocks.*.mlp"]
    found = mlps.find(bias_gelu, expect=2)
    mlps.fuse(found, name="FusedGelu")
    for mlp in mlps:
        assert [[n.name for n in made.graph.nodes][-3] for made in mlp.specializations] == ["FusedGelu"] * 2
    step = sch.history[-1]
    assert step.replaced == (*found[0].nodes, *found[1].nodes) and "name='FusedGelu'" in step.description
    assert sch.undo() is sch and sch.history == ()

    for index in range(2):
        block = sch[f"blocks.{index}"]
        block.fuse(block.find(norm, expect=1), compiler=None, name="FusedLN")
    (node,) = [n for n in sch["blocks.1"].graph.nodes if n.name == "FusedLN"]
    assert isinstance(node.target, Region) and node.target.__name__ == "FusedLN"
    assert schedule.verify(sch, ids(), steps=1)


def test_a_name_that_is_taken_gets_a_number(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    attn.fuse(attn.find("linear_bias"), name="query")
    assert [n.name for n in attn.graph.nodes if n.name.startswith("query")][:3] == ["query", "query_1", "query_2"]
    with pytest.raises(schedule.NotApplicable, match=r"'not a name' cannot name"):
        sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find(bias_gelu), name="not a name")


@pytest.mark.unwritable("what is looked for is defined inside the test")
@pytest.mark.parametrize("compiler", ["inductor", None])
def test_without_a_rule(sch: Schedule, compiler: str | None) -> None:
    attn = sch["blocks.0.attn"]

    def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return F.softmax(torch.matmul(query, key.transpose(-1, -2)) * 0.25, dim=-1)

    attn.fuse(attn.find(scores, expect=1), compiler=compiler)  # type: ignore[arg-type]
    (region,) = [t for t in targets(attn) if isinstance(t, Region)]
    assert isinstance(region, CompiledRegion) == (compiler == "inductor")
    assert region.__name__ == "scores"
    assert schedule.verify(sch, ids(), steps=1, create_graph=compiler != "inductor")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(sch.module)))
    assert torch.allclose(twin.eval()(**ids()), sch.module.eval()(**ids()), atol=1e-6)


@pytest.mark.unwritable("a lambda is looked for")
def test_auto_compiles_what_no_rule_has(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    attn.fuse(attn.find(lambda q, k: torch.matmul(q, k.transpose(-1, -2)) * 0.25, expect=1))
    assert any(isinstance(t, CompiledRegion) for t in targets(attn))


def test_inductor_draws_the_same_dropout(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    attn.fuse(attn.find(softmax_dropout, expect=1), compiler="inductor")
    assert schedule.verify(sch, ids(), steps=2)


@pytest.mark.unwritable("a lambda is looked for")
def test_no_compiler_is_a_warning(sch: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "why_unavailable", lambda backend, device: "no C++ compiler")
    availability.forget()
    attn = sch["blocks.0.attn"]
    expected = sch.module.eval()(**ids())
    attn.fuse(attn.find(lambda q, k: torch.matmul(q, k.transpose(-1, -2)) * 0.25))
    with pytest.warns(RuntimeWarning, match="runs uncompiled: no C"):
        got = sch.module(**ids())
    assert torch.equal(got, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch.module(**ids())


@pytest.mark.unwritable("a lambda is looked for")
def test_the_users_own_error_comes_through_a_region() -> None:
    batch = {**ids(), "mask": torch.zeros(5, 5)}
    sch = schedule.create_schedule(small(), batch=batch)
    attn = sch["blocks.0.attn"]
    attn.fuse(attn.find(lambda s, m: s * 0.25 + m, expect=1), compiler="inductor")
    with pytest.raises(RuntimeError, match="size"):
        sch.module(ids()["ids"], torch.zeros(7, 7))
    assert sch.module(**batch).shape == (2, 5, 32)


def test_only_what_is_matched_is_opened(sch: Schedule) -> None:
    attn = sch["blocks.0.attn"]
    attn.fuse(attn.find(softmax_dropout, expect=1), compiler=None)
    assert [set(s.inlined) for s in attn.specializations] == [{"dropout"}, {"dropout"}]
    assert {"q", "k", "v", "out"} <= {t for t in targets(attn) if isinstance(t, str)}


def test_switching_between_train_and_eval() -> None:
    model, twin = zoo.build("gpt2"), zoo.build("gpt2")
    sch = schedule.create_schedule(model, batch=zoo.batch("gpt2"))
    for path in ("transformer.h.*.mlp", "transformer.h.*.attn"):
        found = [(sch[path], sch[path].find(rule)) for rule in schedule.list_rules()]
        for group, matches in found:
            if matches:
                group.fuse(matches)
                break
    batch = zoo.batch("gpt2", 3, 9)
    for training in (True, False, True):
        for m in (model, twin):
            m.train(training)
        torch.manual_seed(3)
        ours = model(**batch).loss
        torch.manual_seed(3)
        theirs = twin(**batch).loss
        assert torch.allclose(ours, theirs, atol=1e-6), training


@pytest.mark.unwritable("a lambda is looked for")
def test_several_matches_feeding_each_other() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(x * 2.0)
            return x

    sch = schedule.create_schedule(Chain(), batch=torch.randn(2, 3))
    matches = sch.find(lambda x: torch.tanh(x * 2.0), expect=3)
    sch.fuse([matches[1]], compiler=None)
    sch.fuse([matches[2], matches[0]], compiler=None)  # found before: their input is another node now
    assert len([t for t in targets(sch) if isinstance(t, Region)]) == 3
    assert schedule.verify(sch, torch.randn(2, 3), steps=1)
    for _ in range(2):
        sch.undo()
    sch.fuse(matches, compiler=None)
    assert len(targets(sch)) == 3 and schedule.verify(sch, torch.randn(2, 3), steps=1)


@pytest.mark.unwritable("what is looked for is defined inside the test")
def test_a_region_of_several_outputs() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)
            return (y + 1.0) / (y * 3.0)

    def both(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y + 1.0, y * 3.0

    sch = schedule.create_schedule(Two(), batch=torch.randn(2, 3))
    sch.fuse(sch.find(both, expect=1), compiler=None)
    assert schedule.verify(sch, torch.randn(2, 3), steps=1)


def test_refusals(sch: Schedule) -> None:
    mlp = sch["blocks.0.mlp"]
    with pytest.raises(schedule.NotApplicable, match=r"no compiler 'tvm'"):
        mlp.fuse(mlp.find(bias_gelu), compiler="tvm")  # type: ignore[arg-type]
    with pytest.raises(schedule.NotApplicable, match="no matches were given"):
        mlp.fuse([])
    with pytest.raises(schedule.MatchError, match="is not a match"):
        mlp.fuse(["fc1"])  # type: ignore[list-item]
    (match,) = mlp.find(bias_gelu)
    with pytest.raises(schedule.MatchError, match="share"):
        mlp.fuse([match, match])
    with pytest.raises(schedule.NotApplicable, match=r"holds the call of a module, mlp(?s:.*)decompose"):
        sch["blocks.0"].fuse(sch["blocks.0"].find("mlp"))


def layers(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, v)), w)


def layers_with_biases(
    x: torch.Tensor, v: torch.Tensor, a: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, v, a)), w, b)


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_of_layers_by_number_are_named_in_generated_code(bias: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.GELU(), nn.Linear(4, 4, bias=bias)), torch.randn(2, 4)
    sch = schedule.create_schedule(model, x)
    sch.fuse(sch.find(layers_with_biases if bias else layers, expect=1), compiler=None, name="Layers")
    assert schedule.verify(sch, x, steps=1)
