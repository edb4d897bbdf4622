"""Context parallelism: sequences shared by the ranks, attention included, against one device."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import schedule
from schedule.api.simulate import simulate
from schedule.distributed.planning.plan import Plan
from schedule.distributed.tensor_parallel import contexts
from schedule.util.errors import ShardError
from tests.distributed import launch
from tests.distributed.test_models import Counted, counted
from tests.distributed.test_undo import fingerprint, same

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


def trained_alike(mesh: Any, padded: bool, steps: int = 5) -> None:
    """Loss, logits, gradients, parameter updates and the number of collectives; then undone to the bit."""
    model = llama()
    twin, batch = copy.deepcopy(model), given(padded)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = fingerprint(model)
    sch = schedule.create_schedule(model, batch, mesh)
    (by_hand if padded else shared)(sch)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (model, twin)]
    for step in range(steps):
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
        largest = max(float(p.grad.abs().max()) for p in twin.parameters())
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-5 * largest, (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        moved, expected = p.detach() - start[name], q.detach() - start[name]
        assert (moved - expected).norm() <= 1e-4 * expected.norm(), name
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    while sch.history:
        sch.undo()
    del before["random"]
    same({key: value for key, value in fingerprint(model).items() if key in before}, before)


def verified(mesh: Any) -> None:
    """Right as it is, padded too; wrong if the gradients of one parameter are not summed."""
    model, batch = llama(layers=1), given(padded=True)
    sch = schedule.create_schedule(model, batch, mesh)
    plan = sch.shard_plan(context=True)
    shared(sch, plan)
    assert schedule.verify(sch, batch, steps=1, limit=20)
    sch.undo()
    plan.groups[0].syncs.pop()
    shared(sch, plan)
    with pytest.raises(schedule.VerificationError, match="layers.0"):
        schedule.verify(sch, batch, steps=1, limit=20)


def refused(mesh: Any) -> None:
    """Other lengths and caches, before any collective; and the trained model still works after them."""
    model = llama(layers=1)
    shared(schedule.create_schedule(model, given(), mesh))
    with Counted() as seen:
        with pytest.raises(ShardError, match=r"7 tokens cannot be shared evenly by 2 ranks"):
            model(**given(length=7))
        with pytest.raises(ShardError, match="past_key_values is a DynamicCache"):
            model(**given(), past_key_values=DynamicCache(), use_cache=True)
    assert not counted(seen)
    model(**given(length=12)).loss.backward()


@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
def test_trained_as_on_one_device(padded: bool) -> None:
    launch.passes(partial(trained_alike, padded=padded))


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
def test_trained_as_on_one_device_by_four(padded: bool) -> None:
    launch.passes(partial(trained_alike, padded=padded), ranks=4, limit=300)


def test_verify() -> None:
    launch.passes(verified)


def test_other_calls_are_refused() -> None:
    launch.passes(refused)


# -- in one process -----------------------------------------------------------------------------------------


def test_four_ranks_and_one_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank attends from its own positions: from the first ones, the results differ."""
    model, batch = llama(layers=1), given(padded=True)
    plan = schedule.create_schedule(copy.deepcopy(model), batch).shard_plan(4, context=True)
    apply = partial(shared, plan=plan)
    seen = simulate(model, batch, apply, 4)
    assert seen.equal(1e-5), seen.where
    sent = sum(one.nbytes for one in seen.backward if one.op == "all_reduce")
    assert sent == sum(4 * p.numel() for p in model.model.layers.parameters())
    monkeypatch.setattr(contexts, "group_rank", lambda group: 0)
    assert not simulate(model, batch, apply, 4).equal(1e-2)


def test_table_and_json() -> None:
    plan = schedule.create_schedule(llama(), given()).shard_plan(2, context=True)
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "Context parallel over 2 ranks" in text and "8 positions" in text and "1 reduce_scatter" in text


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
    model = llama(layers=1)
    model.config.use_cache = True
    with pytest.raises(ShardError, match="past_key_values is a DynamicCache"):
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
