"""Plans found in the graph alone, applied on simulated ranks in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import simulate
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import moved
from schedule.util.errors import NotApplicable, ShardError
from tests.distributed.blocks import Gated, Mlp
from tests.distributed.test_experts import experts_alone, routed
from tests.zoo import batch, build

COLLECTIVES = {"gpt2": (4, 4), "bert": (4, 4), "opt": (4, 4), "llama": (4, 4), "gptj": (4, 4), "vit": (4, 4)}
"""Forward and backward of two layers, embeddings and heads left whole: Megatron's minimum is two a layer each way."""


@cache
def plan_of(name: str, ranks: int = 2, vocabulary: bool = True) -> Plan:
    return schedule.create_schedule(build(name), batch(name)).shard_plan(ranks, vocabulary=vocabulary)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt2", "bert", "opt", "llama", "gemma3", "gpt_neox", "t5", "vit", "falcon"])
def test_plans_compute_the_same(name: str) -> None:
    plan = plan_of(name)
    assert simulate(build(name), batch(name), lambda sch: sch.apply_plan(plan), 2).equal(1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fewer_heads_than_ranks(name: str) -> None:
    """Two key-value heads for four ranks: two ranks after one another compute with the same."""
    plan = plan_of(name, 4)
    assert {step.replicas for step in plan.shards if step.path.endswith(("k_proj", "v_proj"))} == {2}
    assert simulate(build(name), batch(name), lambda sch: sch.apply_plan(plan), 4).equal(1e-4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_at_the_minimum(name: str) -> None:
    plan = plan_of(name, vocabulary=False)
    seen = simulate(build(name), batch(name), lambda sch: sch.apply_plan(plan), 2)
    assert seen.equal(1e-4)
    assert (len(seen.forward), len(seen.backward)) == COLLECTIVES[name]
    assert {one.op for one in (*seen.forward, *seen.backward)} == {"all_reduce"}


@pytest.mark.parametrize("missing", ["fwd_post", "bwd_post"])
def test_a_missing_collective_is_seen(missing: str) -> None:
    def apply(sch: Any) -> None:
        plan = plan_of("gpt2")
        for step in plan.shards:
            sch[step.path].shard(step.name, step.axis, step.parts)
        for sync in plan.syncs:
            if sync.mode != missing or not sync.path.startswith("transformer.h.1"):
                sch[sync.path].sync(sync.mode, sync.op, sync.axis, sync.argument)

    assert not simulate(build("gpt2"), batch("gpt2"), apply, 2).equal()


def test_a_plan_is_plain_data() -> None:
    plan = plan_of("gpt2")
    assert Plan.from_json(plan.to_json()) == plan
    assert "c_attn" in str(plan) and "1 all_reduce" in str(plan) and plan.bytes_moved() > 0
    fewer = plan.without("attn")
    assert len(fewer.groups) == len(plan.groups) - 2
    twelve = replace(plan, groups=[replace(plan.groups[0], name=f"h.{layer}.mlp") for layer in range(12)])
    assert [group.name for group in twelve.without("h.1").groups] == [
        f"h.{layer}.mlp" for layer in range(12) if layer != 1
    ]
    assert simulate(build("gpt2"), batch("gpt2"), lambda sch: sch.apply_plan(fewer), 2).equal(1e-4)
    with pytest.raises(ShardError, match="not a plan"):
        Plan.from_json("{}")


def test_layers_that_are_alike_are_one_row_of_the_table() -> None:
    plan = plan_of("gpt2")
    rows = list(plan.table().columns[0].cells)
    assert rows[:2] == ["transformer.h.0–1.mlp", "transformer.h.0–1.attn"] and len(rows) == 5
    assert list(plan.table().columns[2].cells)[:2] == ["c_fc", "c_attn"]
    sent = [int(cell.partition(" × ")[2].replace(",", "")) for cell in list(plan.table().columns[6].cells)[:2]]
    assert (
        2 * sum(sent) + sum(moved(step, 2) for group in plan.groups[4:] for step in group.syncs) == plan.bytes_moved()
    )
    first = plan.groups[0]
    more = [replace(first, name=f"h.{n}", shards=first.shards[:1]) for n in (0, 1, 2, 5, 7, 8)]
    assert list(Plan(2, [*more, replace(more[0], name="h.3", size=8)]).table().columns[0].cells) == [
        "h.0–2, 5, 7–8",
        "h.3",
        "all",
    ]


def test_a_layer_that_was_edited_is_a_row_of_its_own() -> None:
    plan = plan_of("gpt2")
    plan = Plan(plan.ranks, [replace(plan.groups[0], syncs=[]), *plan.groups[1:]])
    assert list(plan.table().columns[0].cells)[:2] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]


def test_nothing_is_changed_by_planning() -> None:
    model = build("gpt2")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    sch = schedule.create_schedule(model, batch("gpt2"))
    sch.shard_plan(2)
    assert not sch.history and {name: id(p) for name, p in model.named_parameters()} == before


def test_what_cannot_be_shared_stays_whole_and_says_why() -> None:
    plan = plan_of("bloom")
    reasons = [why for path, why in plan.whole.items() if "query_key_value" in path]
    assert len(reasons) == 2 and all(reasons)
    three = plan_of("gpt2", 3)
    assert any("cannot be shared evenly by 3 ranks" in why for why in three.whole.values())


class Odd(nn.Module):
    """No architecture that anybody knows: names say nothing, and the layout is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 4
        self.a, self.b = nn.Linear(12, 3 * 24), nn.Linear(24, 12)
        self.c, self.scale = nn.Linear(12, 40), nn.Parameter(torch.rand(40))
        self.d, self.gain = nn.Linear(40, 12), nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, k, q = (t.reshape(*x.shape[:-1], self.n, 6).transpose(-3, -2) for t in self.a(x).chunk(3, -1))
        mixed = ((q * self.gain) @ k.mT).softmax(-1) @ v
        y = x + self.b(mixed.transpose(-3, -2).flatten(-2))
        result: torch.Tensor = y + self.d(self.c(y).relu() * self.scale)
        return result


def test_any_module_of_a_user() -> None:
    """Packed heads, a gain shared by all heads (partial gradient), a scale along the width (sharded)."""
    x = torch.randn(2, 5, 12)
    model = Odd()
    plan = schedule.create_schedule(model, x).shard_plan(2)
    found = {(step.path, step.name): (step.axis, step.parts) for step in plan.shards}
    assert found["a", "weight"] == (0, 3) and found["b", "weight"] == (1, 1) and found["", "scale"] == (0, 1)
    assert any(step.argument == "gain" for step in plan.syncs)
    assert simulate(model, x, lambda sch: sch.apply_plan(plan), 2).equal(1e-4)


@pytest.mark.parametrize("make", [Mlp, Gated])
def test_blocks(make: Any) -> None:
    x = torch.randn(2, 5, 16)
    model = make()
    plan = schedule.create_schedule(model, x).shard_plan(2)
    seen = simulate(model, x, lambda sch: sch.apply_plan(plan), 2)
    assert seen.equal(1e-4) and len(seen.forward) == 1


def test_refusals() -> None:
    sch = schedule.create_schedule(build("gpt2"), batch("gpt2"))
    with pytest.raises(NotApplicable, match="whole model"):
        sch["transformer.h.0"].shard_plan(2)
    with pytest.raises(ShardError, match="no mesh"):
        sch.shard_plan()
    plan = sch.shard_plan(4)
    with pytest.raises(ShardError, match="for 4 ranks and the mesh has 2"):
        simulate(build("gpt2"), batch("gpt2"), lambda one: one.apply_plan(plan), 2)


class TiedExperts(nn.Module):
    """Experts with a weight that has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.other = experts_alone(), nn.Module()
        self.other.register_parameter("weight", self.experts.down_proj)

    def forward(self, *given: Tensor) -> Tensor:
        result: Tensor = self.experts(*given)
        return result


def test_tied_experts_are_not_spread() -> None:
    batch = routed([[0, 1], [2, 3]])
    plan = schedule.create_schedule(TiedExperts(), batch).shard_plan(2, experts=True)
    assert plan.whole["experts of experts"] == "down_proj is tied to another parameter"
    assert simulate(TiedExperts(), batch, lambda sch: sch.apply_plan(plan), 2).equal()
