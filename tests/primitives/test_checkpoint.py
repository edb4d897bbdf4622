"""``checkpoint``: the same numbers to the bit, fewer bytes kept."""

from __future__ import annotations

import copy
import pickle
import random
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

import schedule
from schedule import Schedule, scalar
from schedule.core.wrapping import wrappers_of
from schedule.primitives.activations import measure_saved
from schedule.primitives.activations.budget import choose
from schedule.report.costs import measure
from schedule.runtime.scheduled import state_of
from tests import zoo
from tests.small import bias_gelu, ids, small

LAYERS = {
    "gpt2": "transformer.h.*",
    "llama": "model.layers.*",
    "bert": "bert.encoder.layer.*",
    "t5": "*coder.block.*",
}


def trained(model: nn.Module, batch: dict[str, torch.Tensor], run: Any = None) -> dict[str, torch.Tensor]:
    """Logits, gradients, and the next random number after a step in training."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    output = (model if run is None else run)(**batch)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    loss = getattr(output, "loss", None)
    (logits.square().mean() if loss is None else loss).backward()
    seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "next": torch.rand(3), **seen}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal to the bit."""
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


def scheduled(name: str) -> tuple[Schedule, nn.Module, dict[str, torch.Tensor]]:
    model, batch = zoo.build(name), zoo.batch(name)
    return schedule.create_schedule(model, batch=batch), copy.deepcopy(model), batch


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_the_same_to_the_bit(name: str) -> None:
    sch, twin, batch = scheduled(name)
    sch[LAYERS[name]].checkpoint()
    assert not same(trained(sch.module, batch), trained(twin, batch))
    assert measure(sch.module, batch).saved_bytes < 0.75 * measure(twin, batch).saved_bytes
    sch.module.eval()
    twin.eval()
    with torch.no_grad():
        assert torch.equal(sch.module(**batch).logits, twin(**batch).logits)
    sch.undo()
    assert all(state_of(module) is None for module in sch.module.modules())
    assert not same(trained(sch.module, batch), trained(twin, batch))


def test_it_is_differentiated_several_times() -> None:
    sch, twin, batch = scheduled("gpt2")
    sch["transformer.h.*"].checkpoint()

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss, parameters = model(**batch).loss, list(model.parameters())
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(grad.pow(2).sum() for grad in first).backward()
        return [parameter.grad for parameter in parameters]

    for ours, theirs in zip(gradients(sch.module), gradients(twin), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_recomputation_without_the_random_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sch, twin, batch = scheduled("gpt2")
    sch["transformer.h.*"].checkpoint()
    forgetful = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "schedule.primitives.activations.recomputing.checkpoint",
        lambda *args, **kwargs: forgetful(*args, **kwargs, preserve_rng_state=False),
    )
    assert same(trained(sch.module, batch), trained(twin, batch))


@pytest.mark.parametrize("first", [True, False])
def test_with_fused_graphs_inside(first: bool) -> None:
    sch, twin, batch = scheduled("gpt2")
    other = schedule.create_schedule(twin, batch=batch)

    def fuse(one: Schedule) -> None:
        mlps = one["transformer.h.*.mlp"]
        mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))

    if first:
        fuse(sch)
    sch["transformer.h.*"].checkpoint()
    sch["transformer.h.*.mlp"].checkpoint()
    if not first:
        fuse(sch)
    fuse(other)
    assert not same(trained(sch.module, batch), trained(twin, batch))
    assert measure(sch.module, batch).saved_bytes < 0.3 * measure(twin, batch).saved_bytes
    assert sch["transformer.h.0.mlp"].module._schedule_state.fallbacks == 0  # type: ignore[union-attr]
    with torch.no_grad():
        assert schedule.verify(sch, batch, steps=1)


class Odd(nn.Module):
    """Keyword arguments, other generators, an argument that it changes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * scale * random.random()
        return self.linear(y) * random.random()


def test_keyword_arguments_and_pythons_random_numbers() -> None:
    def run(model: nn.Module) -> tuple[torch.Tensor, ...]:
        random.seed(7)
        x, scale = torch.ones(2, 8, requires_grad=True), torch.full((2, 1), 2.0, requires_grad=True)
        y = model[0](x, scale=scale)
        drawn = random.random()
        random.seed(8)  # between forward and backward
        y.sum().backward()
        return y.detach(), x.grad, scale.grad, model[0].linear.weight.grad, torch.tensor([drawn, random.random()])

    torch.manual_seed(0)
    model = nn.Sequential(Odd())
    twin = copy.deepcopy(model)
    x = torch.ones(2, 8)
    sch = schedule.create_schedule(model, batch=x)
    sch["0"].checkpoint()
    assert all(torch.equal(a, b) for a, b in zip(run(model), run(twin), strict=True))


def test_a_cache_is_seen_as_it_was() -> None:
    sch, twin, batch = scheduled("llama")
    sch["model.layers.*"].checkpoint()
    seen = []
    for model in (sch.module, twin):
        model.train()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(batch["input_ids"], past_key_values=cache)
        model(batch["input_ids"], labels=batch["labels"], past_key_values=cache).loss.backward()
        seen.append(
            {"length": torch.tensor(cache.get_seq_length()), **{n: p.grad for n, p in model.named_parameters()}}
        )
    assert not same(*seen)


def test_hooks_run_once_and_move_with_a_replacement() -> None:
    sch = schedule.create_schedule(small(), batch=ids())
    calls: list[str] = []
    sch.module.blocks[0].register_forward_hook(lambda *_: calls.append("block"))
    sch["blocks.0"].checkpoint()
    sch.module(**ids()).sum().backward()
    assert calls == ["block"]


def test_copies_pickles_and_torch_compile() -> None:
    sch, twin, batch = scheduled("llama")
    sch["model.layers.*"].checkpoint()
    expected = trained(twin, batch)
    for model in (copy.deepcopy(sch.module), pickle.loads(pickle.dumps(sch.module))):
        assert not same(trained(model, batch), expected)
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    compiled = torch.compile(sch.module, backend=keep, fullgraph=True)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    ours, theirs = trained(sch.module, inputs, compiled), trained(twin, inputs)
    assert "tag_activation_checkpoint" in "".join(graphs)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name])


# -- parts of graphs ------------------------------------------------------------------------------------------


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    weights = F.softmax(query @ key.transpose(-1, -2) * 0.25, dim=-1)
    return F.dropout(weights, p=scalar("p"), training=scalar("training")) @ value


def test_matches_are_computed_again() -> None:
    model = small()
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, batch=ids())
    attns = sch["blocks.*.attn"]
    attns.checkpoint(attns.find(attention, expect=2))
    assert [n.name for n in attns[0].graph.nodes if "recomputed" in str(n.target)]
    assert not same(trained(model, ids(8, 30)), trained(twin, ids(8, 30)))
    assert not same(trained(copy.deepcopy(model), ids()), trained(twin, ids()))
    assert measure(model, ids(8, 30)).saved_bytes < 0.9 * measure(twin, ids(8, 30)).saved_bytes
    assert schedule.verify(sch, ids(), steps=1)
    sch.undo()
    assert measure(model, ids()).saved_bytes == measure(twin, ids()).saved_bytes


def test_every_other_match() -> None:
    sch = schedule.create_schedule(nn.Sequential(*small(3).blocks), batch=torch.randn(2, 3, 16))
    sch.trace(flatten=True)
    sch.checkpoint(sch.find(bias_gelu, expect=3), every=2)
    assert len([n for n in sch.graph.nodes if "recomputed" in str(n.target)]) == 2


# -- which ones -----------------------------------------------------------------------------------------------


def checkpointed(sch: Schedule) -> list[str]:
    return [path for path, node in sch.named_schedules() if wrappers_of(node.module)]


def test_every_other_layer_of_a_group() -> None:
    sch = schedule.create_schedule(small(5), batch=ids())
    sch["blocks.*"][1:].checkpoint(every=2)
    assert checkpointed(sch) == ["blocks.1", "blocks.3"]
    assert len(sch.history) == 1
    sch.undo()
    assert checkpointed(sch) == []


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
def test_a_budget_is_kept_with_the_least_work(share: float) -> None:
    model, batch = small(4), ids(4, 40)
    whole = measure_saved(model, batch).saved()
    sch = schedule.create_schedule(model, batch=batch)
    sch.checkpoint(budget=int(share * whole))
    assert 0 < measure_saved(model, batch).saved() <= share * whole
    assert checkpointed(sch)
    assert not same(trained(model, batch), trained(small(4), batch))


def test_more_memory_never_costs_more_work() -> None:
    model, batch = small(4), ids(4, 40)
    seen = measure_saved(model, batch)
    work = []
    for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        sch = schedule.create_schedule(copy.deepcopy(model), batch=batch)
        sch.checkpoint(budget=int(share * seen.saved()))
        work.append(sum(seen.modules[path].work for path in checkpointed(sch)))
    assert (
        work[0] == 0
        and work == sorted(work)
        and work[-1] < sum(seen.modules[f"blocks.{layer}"].work for layer in range(4))
    )


def test_a_budget_is_exact_against_trying_all() -> None:
    """Of all sets of modules that fit, none takes less work than the chosen one."""
    seen = measure_saved(small(2), ids(4, 40))
    paths = [f"blocks.{layer}{part}" for layer in range(2) for part in ("", ".attn", ".mlp", ".norm")]
    for share in (0.9, 0.75, 0.6, 0.45):
        budget = int(share * seen.saved())
        fitting = [
            sum(seen.modules[path].work for path in chosen)
            for size in range(1, 5)
            for chosen in combinations(paths, size)
            if not any(a != b and a.startswith(f"{b}.") for a in chosen for b in chosen)
            and seen.saved(frozenset(chosen)) <= budget
        ]
        got = choose(seen, budget, paths)
        assert seen.saved(frozenset(got)) <= budget
        assert sum(seen.modules[path].work for path in got) <= min(fitting) * 1.001


# -- bad input ------------------------------------------------------------------------------------------------


def _inside_another(sch: Schedule) -> None:
    sch["blocks.0"].trace(flatten=True)
    sch["blocks.0"].fuse(sch["blocks.0"].find(bias_gelu, expect=1))
    sch["blocks.0.attn"].checkpoint()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda sch: sch["blocks.*"].checkpoint(every=0), "every is a number from 1"),
        (lambda sch: sch["blocks.0"].checkpoint(every=2), "alone is checkpointed or not"),
        (lambda sch: sch["blocks"].checkpoint(), "never called"),
        (lambda sch: sch.checkpoint(budget=-1), "a number of bytes"),
        (lambda sch: sch.checkpoint(budget=1), "at least [0-9,]+ bytes are saved"),
        (lambda sch: sch["blocks.*"].checkpoint(budget=10**9, every=2), "give the budget alone"),
        (lambda sch: [sch["blocks.0"].checkpoint() for _ in range(2)], "checkpointed already"),
        (lambda sch: sch["blocks.0.attn"].checkpoint([]), "no matches were given"),
        (_inside_another, "middle of the graph of blocks.0"),
    ],
)
def test_what_cannot_be_is_refused(attempt: Any, message: str) -> None:
    sch = schedule.create_schedule(small(), batch=ids())
    with pytest.raises(schedule.ScheduleError, match=message):
        attempt(sch)


def test_what_is_computed_again_updates_no_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
    twin, x = copy.deepcopy(model), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    buffers = list(model.buffers())
    schedule.create_schedule(model, x).checkpoint()
    for one in (model, twin):
        for _ in range(2):
            one(x).square().sum().backward()
    assert not same(dict(model.named_buffers()), dict(twin.named_buffers())) and model[1].num_batches_tracked == 2
    assert all(ours is before for ours, before in zip(model.buffers(), buffers, strict=True))
    gradients = [{name: p.grad for name, p in one.named_parameters() if p.grad is not None} for one in (model, twin)]
    assert not same(*gradients)
