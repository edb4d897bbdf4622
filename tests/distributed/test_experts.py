"""Experts spread over ranks by all-to-all, on gloo processes, against the single-device run."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import schedule
from schedule import ShardError
from schedule.api.simulate import simulate
from schedule.distributed import clip_grad_norm_, full_tensor, mixed_parameters
from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.communication.groups import SimulatedRanks
from schedule.distributed.communication.mesh import SimulatedMesh
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import EXPERTS as EXPERTS_KIND
from tests.distributed import launch
from tests.distributed.models import digest, initialized
from tests.distributed.test_models import Counted, counted, expected
from tests.needs import IS_OLD

LAYERS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
EXPERTS = "model.layers.*.mlp.experts"


def made(name: str, experts: int = 4, layers: int = LAYERS) -> nn.Module:
    """A model in evaluation mode: no dropout."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    config: PretrainedConfig
    if name == "mixtral":
        config = MixtralConfig(**sizes, intermediate_size=48, num_local_experts=experts)
    else:
        few = {"moe_intermediate_size": 24, "num_experts": experts, "num_experts_per_tok": 3}
        config = Qwen3MoeConfig(**sizes, **few, head_dim=8)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def given(seed: int = 0) -> dict[str, Tensor]:
    """Four rows of seven tokens."""
    ids = torch.randint(0, 64, (4, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def dims(ep: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))


def share(batch: dict[str, Tensor], both: DeviceMesh) -> dict[str, Tensor]:
    """The rows of this rank."""
    return {key: value.chunk(both["ep"].size())[both.get_local_rank("ep")] for key, value in batch.items()}


def averaged(model: nn.Module, both: DeviceMesh) -> None:
    """What data parallelism does with the gradients of all but the experts."""
    for path, parameter in model.named_parameters():
        if ".experts." not in path and parameter.grad is not None:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            torch.distributed.all_reduce(local, torch.distributed.ReduceOp.SUM, both.get_group("ep"))
            local /= both["ep"].size()


def trained(model: nn.Module, both: DeviceMesh | None, steps: int) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """Logits, gradients of the first step (gathered), collectives of that step; then ``steps`` of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logits, gradients, counts = torch.empty(0), dict[str, Tensor](), Counter[str]()
    for step in range(steps):
        optimizer.zero_grad()
        with Counted() as seen:
            output = model(**(given(step) if both is None else share(given(step), both)))
            output.loss.backward()
        if both is not None:
            averaged(model, both)
        if step == 0:
            logits, counts = output.logits.detach(), counted(seen)
            gradients = {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        with mixed_parameters():
            optimizer.step()
    return logits, gradients, counts


def trained_alike(mesh: Any, name: str, ep: int, tp: int, planned: bool, steps: int = 5) -> None:
    """Outputs, gradients, updates and collectives of one model, its experts alone spread, or by a plan."""
    both, model = dims(ep, tp), made(name)
    twin, start = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    sch = schedule.create_schedule(model, given(), both)
    least = Counter(all_to_all_single=LAYERS * (3 + 2), all_gather=LAYERS * (1 + 2) * (tp > 1))
    if planned:
        plan = sch.shard_plan()
        sch.apply_plan(plan)
        assert [step.path for step in plan.shards if step.axis == 0 and "experts" in step.path]
        least += expected(plan, model)
    else:
        sch[EXPERTS].shard_experts()
    assert model.get_submodule("model.layers.1.mlp.experts").down_proj.to_local().shape[0] == 4 // (ep * tp)
    ours, our_gradients, counts = trained(model, both, steps)
    theirs, their_gradients, none = trained(twin, None, steps)
    assert counts == least and not none, (counts, least)
    torch.testing.assert_close(ours, theirs.chunk(ep)[both.get_local_rank("ep")], rtol=1e-4, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(float(one.abs().max()) for one in their_gradients.values())
    for key, gradient in their_gradients.items():
        assert (our_gradients[key] - gradient).abs().max() <= 1e-4 * largest, key
    own = dict(model.named_parameters())
    for key, parameter in twin.named_parameters():
        moved, update = full_tensor(own[key].detach()) - start[key], parameter.detach() - start[key]
        if their_gradients[key].abs().max() > 1e-4 * largest:  # below, AdamW divides rounding by rounding
            assert (moved - update).norm() <= 2e-2 * update.norm(), key


QUICK = [("mixtral", 2, 1, True), ("qwen3_moe", 1, 2, True)]
ALL = [
    (name, ep, tp, planned)
    for name in ("mixtral", "qwen3_moe")
    for ep, tp in ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
    for planned in (False, True)
]
LONG = [case for case in ALL if case not in QUICK]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "ep", "tp", "planned"), QUICK)
def test_models(name: str, ep: int, tp: int, planned: bool) -> None:
    launch.passes(partial(trained_alike, name=name, ep=ep, tp=tp, planned=planned), ep * tp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ep", "tp", "planned"), LONG)
def test_more_models(name: str, ep: int, tp: int, planned: bool) -> None:
    launch.passes(partial(trained_alike, name=name, ep=ep, tp=tp, planned=planned), ep * tp)


# -- routing ------------------------------------------------------------------------------------------------


def experts_alone(experts: int = 4) -> nn.Module:
    """The experts of Mixtral, in the loop over them that skips an index of ``experts``."""
    torch.manual_seed(1)
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=experts)
    config._experts_implementation = "eager"
    module: nn.Module = MixtralExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def routed(index: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, and the weights of these."""
    made = torch.Generator().manual_seed(2)
    rows, k = len(index), len(index[0])
    return (
        torch.randn(rows, 8, generator=made).requires_grad_(),
        torch.tensor(index),
        torch.rand(rows, k, generator=made).requires_grad_(),
    )


ROUTES = {
    "experts and a rank without tokens": [[0, 1], [1, 0], [0, 1], [0, 1]],
    "tokens that go nowhere": [[4, 3], [4, 4], [0, 4], [4, 4]],
    "no tokens at all": [[4, 4], [4, 4]],
    "all to the last expert": [[3, 3], [3, 3]],
    "ranks without a token of their own": [[2, 1]],
}
if IS_OLD:  # the loop of transformers 5.0 refuses the index of no expert
    ROUTES = {name: index for name, index in ROUTES.items() if max(map(max, index)) < 4}


def each_route(mesh: Any) -> None:
    """Outputs and all gradients, with tokens shared by rows and with the same tokens on all ranks."""
    for both in (dims(mesh.size(), 1), dims(1, mesh.size())):
        module, twin = experts_alone(), experts_alone()
        sch = schedule.create_schedule(module, routed([[0, 1], [2, 3]]), both)
        sch.shard_experts()
        ep, here = both["ep"].size(), both.get_local_rank("ep")
        for name, index in ROUTES.items():
            whole = routed(index)
            rows = slice(*chunk_bounds(len(index), ep, here))
            own = [each.detach()[rows].requires_grad_(each.requires_grad) for each in whole]
            module.zero_grad(), twin.zero_grad()
            with Counted() as seen:
                ours = module(*own)
                (ours * torch.arange(8.0)).sum().backward()
            theirs = twin(*whole)
            if theirs.requires_grad:  # the loop over experts has nothing to differentiate without tokens
                (theirs * torch.arange(8.0)).sum().backward()
            assert counted(seen)["all_to_all_single"] == 5, name
            torch.testing.assert_close(ours, theirs[rows], msg=name)
            for one, other in ((own[0], whole[0]), (own[2], whole[2])):
                wanted = torch.zeros_like(other) if other.grad is None else other.grad
                torch.testing.assert_close(one.grad, wanted[rows], msg=name)
            for one, other in zip(module.parameters(), twin.parameters(), strict=True):
                wanted = torch.zeros_like(other) if other.grad is None else other.grad
                torch.testing.assert_close(full_tensor(one.grad) * ep, wanted, msg=name)


def test_routes() -> None:
    launch.passes(each_route)


# -- the model around it ------------------------------------------------------------------------------------


def comes_and_goes(mesh: Any) -> None:
    """Verified; whole state dicts load; undone to the bit."""
    model = made("mixtral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sch = schedule.create_schedule(model, given(), dims(mesh.size(), 1))
    sch[EXPERTS].shard_experts()
    assert schedule.verify(sch, given(), steps=1)
    sharded = model.state_dict()
    assert all(torch.equal(full_tensor(sharded[name]), value) for name, value in before.items())
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    sch.undo()
    assert all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items())
    assert not any(isinstance(value, DTensor) for value in model.parameters())


def test_verify_state_and_undo() -> None:
    launch.passes(comes_and_goes)


def made_without_data(mesh: Any) -> None:
    """Sharded on the meta device, then initialized, each rank its own experts: equal to one device."""

    def empty() -> nn.Module:
        with torch.device("meta"):
            return made("mixtral").bfloat16()  # torch has a grouped product without data in bfloat16 only

    ids, mask = torch.zeros(4, 7, dtype=torch.long, device="meta"), torch.zeros(4, 1, 7, 7, device="meta")
    sch = schedule.create_schedule(empty(), {"input_ids": ids, "attention_mask": mask}, dims(mesh.size(), 1))
    sch[EXPERTS].shard_experts()
    torch.manual_seed(3)
    built = schedule.build(sch)
    assert digest(dict(built.named_parameters())) == digest(dict(initialized(empty(), seed=3).named_parameters()))


def beside_fsdp(mesh: Any) -> None:
    """FSDP2 averages the gradients of all other parameters; gradients of both kinds are clipped together."""
    both, model = dims(mesh.size(), 1), made("qwen3_moe")
    twin = copy.deepcopy(model)
    schedule.create_schedule(model, given(), both)[EXPERTS].shard_experts()
    experts = {each for path, each in model.named_parameters() if ".experts." in path}
    fully_shard(model, mesh=both["ep"], ignored_params=experts)
    model(**share(given(), both)).loss.backward()
    twin(**given()).loss.backward()
    norm, whole = clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.testing.assert_close(norm, whole)
    for (path, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(one.grad), other.grad, rtol=1e-4, atol=1e-6, msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [made_without_data, beside_fsdp], ids=lambda case: case.__name__)
def test_with_others(case: launch.Case) -> None:
    launch.passes(case)


# -- refused ------------------------------------------------------------------------------------------------


def simulated(module: nn.Module, inputs: Any, ranks: int = 2) -> schedule.Schedule:
    return schedule.create_schedule(module, inputs, SimulatedMesh(SimulatedRanks(ranks), 0))


def test_uneven_experts() -> None:
    """Neither three experts on two ranks, nor one expert for several ranks; one expert a rank is fine."""
    for experts, ranks in ((3, 2), (1, 2), (4, 8)):
        sch = simulated(experts_alone(experts), routed([[0], [0]]), ranks)
        with pytest.raises(ShardError, match=f"{experts} experts cannot be shared evenly by {ranks} ranks"):
            sch.shard_experts()
        assert not sch.history
    batch = routed([[0, 1], [3, 2], [1, 1]])
    alike = simulate(experts_alone(), batch, lambda sch: sch.shard_experts(), 4)
    assert alike.equal(1e-5) and [one.op for one in alike.forward] == 3 * ["all_to_all"] + ["all_gather"]


class Coupled(MixtralExperts):
    """What one expert computes depends on the others' tokens."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(0), top_k_index, top_k_weights)


class Counting(nn.Module):
    """Experts of which each learns how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        each = torch.einsum("nkoi,ni->nko", self.weight[index], x)
        return (each * weights[..., None]).sum(1) / self.weight.shape[0]


class Normed(Counting):
    """All experts share a parameter below them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


def coupled() -> nn.Module:
    module = experts_alone()
    module.__class__ = Coupled
    return module


@pytest.mark.parametrize(
    ("make", "inputs", "why"),
    [
        (coupled, routed([[0, 1], [2, 3]]), "weighted sum of what each expert computes alone"),
        (Counting, routed([[0, 1], [2, 3]]), "weighted sum of what each expert computes alone"),
        (Normed, routed([[0, 1], [2, 3]]), "norm.weight is used by the tokens of all experts"),
        (lambda: nn.Linear(8, 8), torch.randn(2, 8), "has no parameters with one leading dimension of experts"),
        (lambda: nn.Conv1d(4, 4, 3, bias=False), torch.randn(2, 4, 9), "no parameters with one leading dimension"),
    ],
    ids=["coupled", "counting", "normed", "linear", "convolution"],
)
def test_what_is_no_module_of_experts(make: Any, inputs: Any, why: str) -> None:
    sch = simulated(make(), inputs)
    with pytest.raises(ShardError, match=why):
        sch.shard_experts()
    assert not sch.history and not any(isinstance(each, DTensor) for each in sch.module.parameters())


def test_twice_and_synchronized() -> None:
    sch = simulated(experts_alone(), routed([[0, 1], [2, 3]]))
    sch.shard_experts()
    with pytest.raises(ShardError, match="sharded or synchronized already"):
        sch.shard_experts()
    with pytest.raises(ShardError, match="its inputs and output are whole"):
        sch.sync("fwd_post", "all_reduce")
    with pytest.raises(ShardError, match="sharded already"):
        sch.shard("gate_up_proj", axis=1, parts=2)


def test_a_plan_for_a_number_of_ranks() -> None:
    """Experts are spread if asked for, with sequence parallelism around them, too."""
    batch = {name: value[:, :6] for name, value in given().items()}
    plan = schedule.create_schedule(made("mixtral", layers=1), batch).shard_plan(2, experts=True, sequence=True)
    assert Plan.from_json(plan.to_json()) == plan and "4 experts" in str(plan).replace("\n", " ")
    assert plan.boundaries and sum(group.kind == EXPERTS_KIND for group in plan.groups) == 1
    assert plan.without("experts").bytes_moved() < plan.bytes_moved()
    assert simulate(made("mixtral", layers=1), batch, lambda sch: sch.apply_plan(plan), 2).equal()


@pytest.mark.slow
def test_a_plan_for_uneven_experts() -> None:
    """They keep the shards of their width."""
    batch = {name: value[:, :6] for name, value in given().items()}
    uneven = schedule.create_schedule(made("mixtral", experts=3, layers=1), batch).shard_plan(2, experts=True)
    assert not any(group.kind == EXPERTS_KIND for group in uneven.groups)
    assert "3 experts cannot be shared evenly by 2 ranks" in uneven.whole["experts of model.layers.0.mlp.experts"]
    assert {step.axis for step in uneven.shards if "experts" in step.path} == {1, 2}


def meshes_without_names(mesh: Any) -> None:
    """Refused before any collective, naming what is needed and what there is."""
    size = mesh.size()
    for shape, names in (((size, 1), ("dp", "tp")), ((size,), ("ep",))):
        other = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = experts_alone()
        sch = schedule.create_schedule(model, routed([[0, 1], [2, 3]]), other)
        for attempt in (sch.shard_experts, partial(sch.shard_plan, experts=True)):
            with Counted() as seen, pytest.raises(ShardError) as error:
                attempt()
            assert '"ep" and "tp"' in str(error.value) and repr(names[0]) in str(error.value)
            assert (
                not counted(seen)
                and not sch.history
                and not any(isinstance(one, DTensor) for one in model.parameters())
            )


def test_meshes_without_names() -> None:
    launch.passes(meshes_without_names)
