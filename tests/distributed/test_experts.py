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
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

import schedule
from schedule.distributed import full_tensor, mixed_parameters
from tests.distributed import launch
from tests.distributed.test_models import Counted, counted

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = "model.layers.*.mlp.experts"


def made(name: str, experts: int = 4) -> nn.Module:
    """A model in evaluation mode: no dropout."""
    torch.manual_seed(0)
    config: PretrainedConfig
    if name == "mixtral":
        config = MixtralConfig(**SIZES, **HEADS, intermediate_size=48, num_local_experts=experts)
    else:
        config = Qwen3MoeConfig(
            **SIZES, **HEADS, head_dim=8, moe_intermediate_size=24, num_experts=experts, num_experts_per_tok=3
        )
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
            for parameters in optimizer.param_groups:
                parameters["foreach"] = False
            optimizer.step()
    return logits, gradients, counts


def trained_alike(mesh: Any, name: str, ep: int, tp: int, steps: int = 5) -> None:
    """Outputs, gradients, updates and collectives of one model, its experts alone spread."""
    both, model = dims(ep, tp), made(name)
    twin, start = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    sch = schedule.create_schedule(model, given(), both)
    sch[EXPERTS].shard_experts()
    local = model.get_submodule("model.layers.0.mlp.experts").gate_up_proj.to_local()
    assert local.shape[0] == 4 // (ep * tp)
    ours, our_gradients, counts = trained(model, both, steps)
    theirs, their_gradients, none = trained(twin, None, steps)
    least = Counter(all_to_all_single=2 * 5, all_gather=2 * 3 * (tp > 1))
    assert counts == +least and not none, counts
    torch.testing.assert_close(ours, theirs.chunk(ep)[both.get_local_rank("ep")], rtol=1e-4, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(float(one.abs().max()) for one in their_gradients.values())
    for key, gradient in their_gradients.items():
        assert (our_gradients[key] - gradient).abs().max() <= 1e-4 * largest, key
    for key, parameter in twin.named_parameters():
        moved, update = full_tensor(dict(model.named_parameters())[key].detach()) - start[key], parameter - start[key]
        if their_gradients[key].abs().max() > 1e-4 * largest:  # below, AdamW divides rounding by rounding
            assert (moved - update).norm() <= 2e-2 * update.norm(), key


QUICK = [("mixtral", 2, 1), ("qwen3_moe", 1, 2), ("mixtral", 2, 2)]
ALL = [(name, ep, tp) for name in ("mixtral", "qwen3_moe") for ep, tp in ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4))]
LONG = [case for case in ALL if case not in QUICK]


@pytest.mark.parametrize(("name", "ep", "tp"), QUICK)
def test_models(name: str, ep: int, tp: int) -> None:
    launch.passes(partial(trained_alike, name=name, ep=ep, tp=tp), ep * tp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ep", "tp"), LONG)
def test_more_models(name: str, ep: int, tp: int) -> None:
    launch.passes(partial(trained_alike, name=name, ep=ep, tp=tp), ep * tp)
