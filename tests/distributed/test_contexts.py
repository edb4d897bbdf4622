"""Context parallelism: sequences shared by the ranks, attention included, against one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import schedule
from schedule.api.simulate import simulate
from schedule.distributed import full_tensor
from schedule.distributed.communication.groups import Collective
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.tensor_parallel import contexts
from schedule.tuning import Shape
from schedule.tuning.cost_model import context_bytes
from schedule.util.errors import ShardError
from tests.distributed import launch
from tests.distributed.test_models import Counted, counted
from tests.distributed.test_undo import fingerprint, same
from tests.zoo import CACHE

LENGTH = 8


def llama(layers: int = 2, attention: str = "sdpa", **sizes: Any) -> nn.Module:
    """A Llama of four heads and two of keys and values."""
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(**small | {"num_key_value_heads": 2} | sizes, num_hidden_layers=layers, use_cache=False)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


def given(padded: bool = False, seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    """Two rows, one padded on the left and one on the right."""
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def shared(sch: schedule.Schedule, plan: Plan | None = None) -> None:
    """Share the sequence by ``plan``, or by the plan found."""
    sch.apply_plan(plan or sch.shard_plan(context=True))


def by_hand(sch: schedule.Schedule) -> None:
    """What the plan does, by the primitives."""
    layers = sch["model.layers.*"]
    layers.context_parallel()
    layers[0].sync("fwd_pre", "scatter", axis=1)
    layers[-1].sync("fwd_post", "RSR->RRR")


def trained_alike(mesh: Any, share: Callable[[schedule.Schedule], None], padding: Sequence[bool]) -> None:
    """Loss, logits, gradients and the number of collectives of each step, and the parameters' updates after all."""
    model = llama()
    twin, start = copy.deepcopy(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    before = fingerprint(model)
    sch = schedule.create_schedule(model, given(padding[0]), mesh)
    share(sch)
    refused(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, twin)]
    for step, padded in enumerate(padding):
        batch = given(padded, seed=step)
        with Counted() as seen:
            ours = model(**batch)
            ours.loss.backward()
        theirs = twin(**batch)
        theirs.loss.backward()
        # one of keys and values a layer, one after the last and one of the gradient before the first; the parameters
        assert counted(seen) == Counter(all_gather=2 + 2, reduce_scatter=2, all_reduce=2 * 9)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        gradients_alike(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        moved, expected = p.detach() - start[name], q[1].detach() - start[name]
        assert (moved - expected).norm() <= 1e-4 * expected.norm(), name
    undone(sch, start, before)


def gradients_alike(model: nn.Module, twin: nn.Module) -> None:
    """Relative to the largest of all."""
    largest = max(float(p.grad.abs().max()) for p in twin.parameters())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * largest, name


def refused(model: nn.Module) -> None:
    """Other lengths and caches, before any collective."""
    with Counted() as seen:
        with pytest.raises(ShardError, match=r"7 tokens cannot be shared evenly by \d ranks"):
            model(**given(length=7))
        with pytest.raises(ShardError, match=f"^{CACHE} is a DynamicCache"):
            model(**given(), **{CACHE: DynamicCache()}, use_cache=True)
    assert not counted(seen)


def undone(sch: schedule.Schedule, start: dict[str, Tensor], before: dict[str, Any]) -> None:
    """With the parameters from before training, the model is what it was, to the bit."""
    with torch.no_grad():
        for name, p in sch.module.named_parameters():
            p.copy_(start[name])
    while sch.history:
        sch.undo()
    now = fingerprint(sch.module)
    same(now, before | {"random": now["random"]})


def verified(mesh: Any) -> None:
    """Also on other lengths, of which each is a multiple of the ranks."""
    sch = schedule.create_schedule(llama(layers=1), given(padded=True), mesh)
    shared(sch)
    assert schedule.verify(sch, given(padded=True), steps=1, limit=20)


def found_wrong(mesh: Any) -> None:
    """The gradients of one parameter are not summed."""
    sch = schedule.create_schedule(llama(layers=1), given(), mesh)
    plan = sch.shard_plan(context=True)
    plan.groups[0].syncs.pop()
    shared(sch, plan)
    with pytest.raises(schedule.VerificationError, match=r"layers\.0"):
        schedule.verify(sch, given(), steps=1, limit=20)


def optimized(mesh: Any) -> None:
    """Rules and recomputation apply to layers that share sequences."""
    model = llama(layers=1)
    twin, sch = copy.deepcopy(model), schedule.create_schedule(model, given(), mesh)
    shared(sch)
    assert sch["model.layers.0"].optimize(cost_guard=False).applied
    sch["model.layers.0"].checkpoint()
    for one in (model, twin):
        one(**given(padded=True, length=12)).loss.backward()
    gradients_alike(model, twin)


def rows_and_sequences(mesh: Any) -> None:
    """Two by two: FSDP2 shards the parameters over the ranks that have other rows."""
    both, batch = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), given(padded=True)
    rows = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(2)]
    model = llama()
    twin, sch = copy.deepcopy(model), schedule.create_schedule(model, rows[0], both)
    shared(sch)
    for layer in sch["model.layers.*"]:
        fully_shard(layer.module, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    model(**rows[both.get_local_rank("dp")]).loss.backward()
    for row in rows:
        (twin(**row).loss / 2).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            full_tensor(p.grad), q.grad, rtol=1e-3, atol=1e-5, msg=lambda text, at=name: at + text
        )


@pytest.mark.slow
def test_rows_and_sequences() -> None:
    launch.passes(rows_and_sequences, ranks=4, limit=300)


def checkpointed_by_transformers(mesh: Any) -> None:
    """The layers recompute their attention over the ranks."""
    for reentrant in (False, True):
        model = llama(layers=1)
        twin = copy.deepcopy(model)
        shared(schedule.create_schedule(model, given(padded=True), mesh))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for one in (model, twin):
            one.train()(**given(padded=True)).loss.backward()
        gradients_alike(model, twin)


@pytest.mark.slow
def test_checkpointed_by_transformers() -> None:
    launch.passes(checkpointed_by_transformers)


def test_trained_as_on_one_device() -> None:
    """Recorded under a mask, and called under masks and without."""
    launch.passes(partial(trained_alike, share=by_hand, padding=(True, False, True, False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
def test_trained_by_a_plan(ranks: int, padded: bool) -> None:
    launch.passes(partial(trained_alike, share=shared, padding=[padded] * 5), ranks=ranks, limit=300)


def test_verify() -> None:
    launch.passes(verified)


@pytest.mark.slow
def test_verify_finds_a_missing_sum() -> None:
    launch.passes(found_wrong)


@pytest.mark.slow
def test_optimized() -> None:
    launch.passes(optimized)


# -- in one process -----------------------------------------------------------------------------------------


def test_positions_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes its queries for the first ones is found; the bytes are as many, and as predicted."""
    model, batch = llama(layers=1), given(padded=True)
    plan = schedule.create_schedule(copy.deepcopy(model), batch).shard_plan(2, context=True)
    monkeypatch.setattr(contexts, "group_rank", lambda group: 0)
    seen = simulate(model, batch, partial(shared, plan=plan), 2)
    assert not seen.equal(1e-2)
    total = sum(map(sent, (*seen.forward, *seen.backward)))
    assert plan.bytes_moved() == total
    shape = replace(Shape.of(model), keys=32)  # under a mask, transformers repeats two heads of keys to four
    assert context_bytes(shape, 2 * LENGTH, 2, number=4) == pytest.approx(total, rel=0.05)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(text in str(plan) for text in ("Context parallel over 2 ranks", "8 positions", "1 reduce_scatter"))


def sent(one: Collective) -> float:
    """The bytes that one of two ranks sends."""
    return {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 1.0}[one.op] * one.nbytes


def test_chosen_where_sequences_are_long() -> None:
    """As many tokens as the layers are wide: heads and features. Sixteen times as many: the sequence."""
    for length, chosen in ((8, False), (512, True)):
        batch = {"input_ids": given(length=length)["input_ids"]}
        plan = schedule.create_schedule(llama(layers=1), batch).shard_plan(2, context=None)
        assert any(group.kind == "positions" for group in plan.groups) == chosen, length


class Mixed(nn.Module):
    """A layer that adds up along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, 16] → the same."""
        return x + self.up(x).cumsum(1)


def test_what_cannot_be_shared() -> None:
    """Before anything changes, with the reason."""
    for make, batch, why in (
        (llama, given(length=7), "7 tokens cannot be shared evenly by 2 ranks"),
        (partial(llama, attention="eager"), given(), "works along it"),
        (lambda: nn.Sequential(Mixed(), Mixed()), torch.randn(2, 4, 16), "cumsum works along it"),
    ):
        with pytest.raises(ShardError, match=why):
            schedule.create_schedule(make(), batch).shard_plan(2, context=True)
    sch = schedule.create_schedule(llama(layers=1), given())
    with pytest.raises(ShardError, match="sequence is for heads and features"):
        sch.shard_plan(2, context=True, sequence=True)
    model = llama(layers=1)
    model.config.use_cache = True
    with pytest.raises(ShardError, match=f"{CACHE} is a DynamicCache"):
        schedule.create_schedule(model, given()).shard_plan(2, context=True)


def meshes(mesh: Any) -> None:
    """Another dimension than "cp" is refused; so are a second time and what was rewritten before."""
    for names, why in ((("dp", "tp"), "dp, tp"), (("cp", "tp"), "cp, tp")):
        sch = schedule.create_schedule(llama(layers=1), given(), init_device_mesh("cpu", (2, 1), mesh_dim_names=names))
        for ask in (lambda sch=sch: sch.shard_plan(context=True), sch["model.layers.0"].context_parallel):
            with pytest.raises(ShardError, match=f'dimensions {why}.*needs "cp"'):
                ask()
        assert not sch.history
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    sch = schedule.create_schedule(llama(layers=1), given(), both)
    layer = sch["model.layers.0"]
    layer.context_parallel()
    with pytest.raises(ShardError, match="already"):
        layer.context_parallel()
    sch.undo()
    layer["mlp"].trace()
    layer["mlp"].optimize()
    with pytest.raises(ShardError, match="rewritten before"):
        layer.context_parallel()


def test_meshes() -> None:
    launch.passes(meshes)
