"""Parameters of merged projections: whatever saves, moves, shards or replaces them finds them as in the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

import schedule
from schedule.rules.merged_linear import merged_linear
from tests.distributed.launch import passes
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
RULES = ("qkv_merge", "all")


class Attention(nn.Module):
    """Queries, keys and values of two heads; keys without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 8, bias=False)
        self.o_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:-1], 2, 4).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = torch.tanh(q @ k.transpose(-1, -2)) @ v  # a softmax would hide the bias of the keys
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))


X = torch.linspace(-1, 1, 80).view(2, 5, 8)


def attention(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return Attention()


def merged() -> tuple[Attention, Attention, schedule.Schedule]:
    """A scheduled attention that has trained a step, its untouched twin that has too, and the schedule."""
    model, twin = attention(), attention()
    sch = schedule.create_schedule(model, X)
    assert sch.optimize(rules="qkv_merge", cost_guard=False).applied == {"qkv_merge": 1}
    assert_alike(model, twin)
    return model, twin, sch


def assert_alike(model: nn.Module, twin: nn.Module, x: Tensor = X) -> None:
    """Outputs and gradients are the same."""
    for each in (model, twin):
        each.zero_grad()
        each(x).square().sum().backward()
    torch.testing.assert_close(model(x), twin(x))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def storages(model: nn.Module) -> dict[str, int]:
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in model.named_parameters()}


# -- storages and files -----------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_storages_are_those_of_the_original(name: str, rules: str) -> None:
    model, inputs = build(name), batch(name)
    before = storages(model)
    assert len(set(before.values())) == len(before)
    sch = schedule.create_schedule(model, inputs)
    assert sch.optimize(rules=rules, cost_guard=False).applied
    assert storages(model) == before
    model(**inputs).loss.backward()
    assert storages(model) == before
    gradients = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    assert len({each.data_ptr() for each in gradients}) == len(gradients)
    with torch.no_grad():
        model.eval()(**inputs)
    schedule.verify(sch, inputs, steps=1)
    assert storages(model) == before
    while sch.history:
        sch.undo()
    assert storages(model) == before


@pytest.mark.parametrize("rules", RULES)
def test_files_hold_every_tensor_and_load_back(rules: str, tmp_path: Path) -> None:
    original, inputs = build("llama"), batch("llama")
    names = set(original.state_dict())
    model = build("llama")
    schedule.optimize(model, inputs, rules=rules, cost_guard=False)
    model(**inputs).loss.backward()

    save_model(model, str(tmp_path / "one.safetensors"))
    assert set(load_file(tmp_path / "one.safetensors")) == names
    other = build("llama", seed=1)
    load_model(other, str(tmp_path / "one.safetensors"))
    assert_equal(other, original)

    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, str(tmp_path / "saved"))
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == names

    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    assert set(load_file(tmp_path / "state" / "model.safetensors")) == names
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert_equal(model, original)
    torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits)


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- parameters that change -------------------------------------------------------------------------------------


def _swapped(module: Attention) -> None:
    torch.utils.swap_tensors(module.k_proj.weight, nn.Parameter(module.k_proj.weight.detach() * 2))


def _data_set(module: Attention) -> None:
    module.k_proj.weight.data = module.k_proj.weight.data * 2


def _written_through_data(module: Attention) -> None:
    module.k_proj.weight.data.copy_(module.q_proj.weight)


def _assigned(module: Attention) -> None:
    module.load_state_dict(attention(seed=1).state_dict(), assign=True)


def _copied_into(module: Attention) -> None:
    module.load_state_dict(attention(seed=1).state_dict())


def _changed_in_place(module: Attention) -> None:
    with torch.no_grad():
        module.q_proj.weight.mul_(-0.5)
        module.v_proj.bias.add_(0.5)


def _new_parameter(module: Attention) -> None:
    module.q_proj.weight = nn.Parameter(module.q_proj.weight.detach() * 2)


def _bias_set(module: Attention) -> None:
    module.k_proj.bias = nn.Parameter(torch.linspace(0, 1, 8))


def _bias_removed(module: Attention) -> None:
    module.q_proj.bias = None


def _replaced(module: Attention) -> None:
    module.q_proj = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    module.q_proj[0].load_state_dict(attention(seed=2).q_proj.state_dict())


def _replaced_by_its_like(module: Attention) -> None:
    module.q_proj = attention(seed=2).q_proj


def _tied(module: Attention) -> None:
    module.k_proj.weight = module.q_proj.weight


def _tied_in_memory(module: Attention) -> None:
    module.k_proj.weight = nn.Parameter(module.q_proj.weight.data)


def _offloaded_and_back(module: Attention) -> None:
    kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module.to("meta")
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        parameter.data.copy_(kept[name])


def _frozen(module: Attention) -> None:
    module.q_proj.requires_grad_(False)
    module.v_proj.weight.requires_grad_(False)


def _in_double_and_back(module: Attention) -> None:
    module.double().float()
    module.q_proj.weight.data.mul_(3)


CHANGES: dict[str, Callable[[Attention], None]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _swapped,
        _data_set,
        _written_through_data,
        _assigned,
        _copied_into,
        _changed_in_place,
        _new_parameter,
        _bias_set,
        _bias_removed,
        _replaced,
        _replaced_by_its_like,
        _tied,
        _tied_in_memory,
        _offloaded_and_back,
        _frozen,
        _in_double_and_back,
    )
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_parameters_counts_from_the_next_call_on(name: str) -> None:
    model, twin, _ = merged()
    plain = model(X)
    for _ in range(2):  # again, since the first call after a change may have prepared something
        for each in (model, twin):
            CHANGES[name](each)
        assert_alike(model, twin)
    if name not in ("frozen", "offloaded_and_back"):
        assert not torch.allclose(model(X), plain)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("trained", [True, False], ids=["x trained", "x fixed"])
def test_a_change_between_forward_and_backward_raises_where_it_does_untouched(name: str, trained: bool) -> None:
    model, twin, _ = merged()
    outcomes = []
    for each in (model, twin):
        each.zero_grad()
        loss = each(X.clone().requires_grad_(trained)).square().sum()
        with torch.no_grad():
            each.get_submodule(name).weight.mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            outcomes.append(None)
        else:
            outcomes.append([p.grad for p in each.parameters()])
    assert (outcomes[0] is None) is trained
    torch.testing.assert_close(*outcomes)


def test_results_that_reach_no_loss_leave_their_parameters_without_gradients() -> None:
    """An optimizer passes over a parameter without a gradient, and not over one whose gradient is zero."""

    class Split(Attention):
        def forward(self, x: Tensor) -> Any:
            return tuple(f(x).view(2, 5, 2, 4).transpose(1, 2) * 1 for f in (self.q_proj, self.k_proj, self.v_proj))

    model, twin = Split(), Split()
    twin.load_state_dict(model.state_dict())
    assert schedule.optimize(model, X, rules="qkv_merge", cost_guard=False).applied
    for each in (model, twin):
        each(X)[1].sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert model.q_proj.weight.grad is None and model.q_proj.bias.grad is None


def test_copies_are_independent() -> None:
    model, twin, _ = merged()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert_alike(model, twin)
    assert not set(storages(model).values()) & set(storages(other).values())


def test_optimizers_step_as_on_the_original() -> None:
    """Fused and foreach steps write to storages; moments belong to parameters."""
    model, twin, _ = merged()
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
        for _ in range(5):
            optimizer.zero_grad()
            each(X).square().sum().backward()
            optimizer.step()
    assert_alike(model, twin)


def test_an_output_head_that_is_replaced_counts() -> None:
    model, twin, inputs = build("llama").eval(), build("llama").eval(), batch("llama")
    schedule.optimize(model, inputs, rules="all", cost_guard=False)
    model(**inputs)
    for each in (model, twin):
        torch.manual_seed(3)
        each.lm_head = nn.Linear(32, 64, bias=False)
    torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits)
    for each in (model, twin):
        each.lm_head.bias = nn.Parameter(torch.linspace(0, 1, 64))
    torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits)


# -- shards -----------------------------------------------------------------------------------------------------


def fully_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trains_as_the_original(mesh: Any, rules: str, shard_first: bool) -> None:
    twin = fully_sharded(build("llama"), mesh)
    model = build("llama")
    inputs = {name: value.clone() for name, value in batch("llama").items()}
    inputs["input_ids"] = (inputs["input_ids"] + 3 * mesh.get_local_rank()) % 64
    inputs["labels"] = inputs["input_ids"]
    if shard_first:
        fully_sharded(model, mesh)
    report = schedule.optimize(model, inputs, rules=rules, cost_guard=False)
    assert report.applied
    if not shard_first:
        fully_sharded(model, mesh)
    losses = []
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = each(**inputs).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0] - 0.1, losses
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shard_first", [True, False], ids=["sharded first", "scheduled first"])
@pytest.mark.parametrize("rules", RULES)
def test_fully_sharded_training_is_that_of_the_original(rules: str, shard_first: bool) -> None:
    passes(partial(trains_as_the_original, rules=rules, shard_first=shard_first), limit=240.0)


def shards_are_multiplied_as_they_are(mesh: Any) -> None:
    """DTensor parameters, which one product of plain memory could not be made of."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    weights = [distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]) for _ in range(3)]
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    for part, weight in zip(merged_linear(x, weights), weights, strict=True):
        torch.testing.assert_close(part.full_tensor(), x.full_tensor() @ weight.full_tensor().t())


def test_sharded_parameters() -> None:
    passes(shards_are_multiplied_as_they_are)
