"""Slapo's tests of shards and collectives, which it starts with ``torchrun``, on two gloo processes.

(``test_annotate.py``, ``test_consolidation.py``, ``test_reshard.py``, ``test_shard.py``, ``test_shard_sync_op.py``.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fused
import schedule
from schedule.distributed import (
    copy_to_tensor_parallel,
    full_tensor,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)
from tests.distributed import launch
from tests.distributed.blocks import Mlp, observed, shard_mlp
from tests.distributed.test_layers import Convolved, shard_channels
from tests.distributed.test_layers import observed as observed_convolved

pytestmark = pytest.mark.slow

Shard = Callable[[Any], None]


class Two(nn.Module):
    """Two layers, and perhaps a function at the end."""

    def __init__(self, first: nn.Module, second: nn.Module, last: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = first, second, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fc2(self.fc1(x)))


def linears(width: int = 8) -> nn.Module:
    return Two(nn.Linear(width, 12), nn.Linear(12, width))


def scheduled(block: nn.Module, mesh: Any, shard: Shard, x: Any) -> tuple[Any, nn.Module]:
    twin = copy.deepcopy(block)
    sch = schedule.create_schedule(block, x, mesh=mesh)
    shard(sch)
    return sch, twin


X = torch.linspace(-2, 2, 2 * 4 * 8).view(2, 4, 8)
OUTPUT, GRADIENTS = "output", "gradients"


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    """Compare the outputs alone, or all that there is besides."""
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if (name == OUTPUT) == (what == OUTPUT):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def alike(make: Callable[[], nn.Module], shard: Shard, what: str, mesh: Any) -> None:
    """A sharded block and its whole twin."""
    sch, twin = scheduled(make(), mesh, shard, X)
    agree(observed(sch.module, X), observed(twin, X), what)


# -- parameters --------------------------------------------------------------------------------------------------


def know_their_whole_shapes(mesh: Any) -> None:
    sch, twin = scheduled(linears(), mesh, shard_mlp, X)
    for name, parameter in schedule.build(sch).named_parameters():
        assert parameter.shape == twin.get_parameter(name).shape


def take_no_memory(mesh: Any) -> None:
    with torch.device("meta"):
        sch, _ = scheduled(linears(), mesh, shard_mlp, X)
    assert all(parameter.is_meta for parameter in sch.module.parameters())


def keep_values(shard: Shard, mesh: Any) -> None:
    sch, twin = scheduled(linears(), mesh, shard, X)
    for name, parameter in schedule.build(sch).named_parameters():
        assert torch.equal(full_tensor(parameter), twin.get_parameter(name))


def zeroed(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def are_filled(shard: Shard, mesh: Any) -> None:
    with torch.device("meta"):
        sch, _ = scheduled(linears(), mesh, shard, X)
    for parameter in schedule.build(sch, init_weights=zeroed).parameters():
        assert not parameter.is_meta and not full_tensor(parameter).any()


def whole(sch: Any) -> None:
    """No shards: data parallelism."""


class Tied(nn.Module):
    """An embedding, and two layers that read its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 10)
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.first.weight = self.second.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(self.wte(ids)) + self.second(self.wte(ids))


def stay_tied(mesh: Any) -> None:
    """One shard does for all of them: each is sharded where one is."""
    with torch.device("meta"):
        model = Tied()
    sch = schedule.create_schedule(model, mesh=mesh)
    sch["wte"].shard("weight", axis=0)
    assert model.wte.weight is model.first.weight is model.second.weight
    assert model.first.out_features == 5


PARAMETERS = {
    "know their whole shapes": know_their_whole_shapes,
    "on the meta device take no memory": take_no_memory,
    "keep their values, whole": partial(keep_values, whole),
    "keep their values, sharded": partial(keep_values, shard_mlp),
    "are filled by a function, whole": partial(are_filled, whole),
    "are filled by a function, sharded": partial(are_filled, shard_mlp),
    "stay tied": stay_tied,
}


@pytest.mark.parametrize("what", PARAMETERS)
def test_parameters(what: str) -> None:
    launch.passes(PARAMETERS[what])


# -- results and gradients of sharded layers ---------------------------------------------------------------------


class Fused(nn.Module):
    """The MLP of ``fused``, with its last bias added."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = fused.MLP(fused.TransformerConfig(8, ffn_hidden_size=12))

    def forward(self, x: Tensor) -> Tensor:
        result, bias = self.mlp(x)
        return result + bias


def fused_mlp(what: str, mesh: Any) -> None:
    torch.manual_seed(0)
    twin = Fused()
    torch.manual_seed(0)
    sharded = Fused()
    sharded.mlp = fused.MLP(fused.TransformerConfig(8, ffn_hidden_size=12), tp_group=mesh.get_group())
    with torch.no_grad():
        for name, axis in (("linear_fc1", 0), ("linear_fc2", 1)):
            ours, theirs = getattr(sharded.mlp, name), getattr(twin.mlp, name)
            ours.weight.copy_(theirs.weight.chunk(2, axis)[mesh.get_local_rank()])
    ours, theirs = observed(sharded, X), observed(twin, X)
    if what == OUTPUT:
        agree({OUTPUT: ours[OUTPUT]}, {OUTPUT: theirs[OUTPUT]}, what)
        return
    for name, axis in (("linear_fc1.weight", 0), ("linear_fc1.bias", 0), ("linear_fc2.weight", 1)):
        own = theirs[f"mlp.{name}"].chunk(2, axis)[mesh.get_local_rank()]
        torch.testing.assert_close(ours[f"mlp.{name}"], own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["mlp.linear_fc2.bias"], theirs["mlp.linear_fc2.bias"])


def sequence_sharded(sch: Any) -> None:
    """Between its layers each rank has its part of the sequence, and whole at both ends."""
    sch.sync("fwd_pre", "RRR->RSR")
    sch["fc1"].shard("weight", axis=0)
    sch["fc1"].shard("bias", axis=0)
    sch["fc1"].sync("fwd_pre", "all_gather", axis=1)
    sch["fc2"].shard("weight", axis=1)
    sch["fc2"].sync("fwd_post", "reduce_scatter", axis=1)
    sch.sync("fwd_post", "RSR->RRR")


def convolved(what: str, mesh: Any) -> None:
    x = torch.linspace(-1, 1, 2 * 4 * 6 * 5).view(2, 4, 6, 5)
    sch, twin = scheduled(Convolved(2), mesh, shard_channels, x)
    agree(observed_convolved(sch.module, x), observed_convolved(twin, x), what)


def looked_up(what: str, mesh: Any) -> None:
    ids = torch.tensor([[1, 3, 6, 8, 9]])
    sch, twin = scheduled(nn.Embedding(10, 6), mesh, lambda sch: sch.shard("weight", axis=0), ids)
    sch.sync("fwd_post", "all_reduce")
    seen = []
    for block in (sch.module, twin):
        result = block(ids)
        result.square().sum().backward()
        seen.append({OUTPUT: result.detach(), "weight": full_tensor(block.weight.grad)})
    agree(*seen, what)


CONV1D = partial(shard_mlp, column=1)
LAYERS: dict[str, Callable[[str, Any], None]] = {
    "fused.MLP": fused_mlp,
    "Linear": partial(alike, linears, shard_mlp),
    "Conv1D": partial(alike, lambda: Two(Conv1D(12, 8), Conv1D(8, 12)), CONV1D),
    "sequence": partial(alike, lambda: Two(nn.Linear(8, 12), nn.Linear(12, 8), F.relu), sequence_sharded),
    "Conv2d": convolved,
    "Embedding": looked_up,
}


def layer(name: str, what: str, mesh: Any) -> None:
    LAYERS[name](what, mesh)


@pytest.mark.parametrize("what", [OUTPUT, GRADIENTS])
@pytest.mark.parametrize("name", LAYERS)
def test_sharded_layers(name: str, what: str) -> None:
    launch.passes(partial(layer, name, what))


# -- reshardings of an MLP ---------------------------------------------------------------------------------------

# Of each layer: whether its weight is sharded on the outputs or inputs, and how its input and output are resharded.
SCHEMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "whole": ((), ()),
    "columns, then rows of the sequence": (("columns", "RRS->RSR"), ("RSR->RRR",)),
    "columns, the sequence, columns": (("columns", "RRS->RSR", "RSR->RRS"), ("rows", "all_reduce")),
    "Megatron's": (("columns",), ("rows", "all_reduce")),
    "columns, gathered, twice": (("columns", "RRS->RRR"), ("columns", "RRS->RRR")),
    "whole, then its columns": (("RRR->RRS",), ("rows", "all_reduce")),
    "whole, then its sequence": (("RRR->RSR",), ("RSR->RRR",)),
    "the sequence from the input on": (("pre RRR->RSR",), ("RSR->RRR",)),
}


def scheme(name: str, mesh: Any) -> None:
    def shard(sch: Any) -> None:
        for layer, steps in zip(("fc1", "fc2"), SCHEMES[name], strict=True):
            for step in steps:
                if step == "columns":
                    sch[layer].shard("weight", axis=0)
                    sch[layer].shard("bias", axis=0)
                elif step == "rows":
                    sch[layer].shard("weight", axis=1)
                else:
                    sch[layer].sync("fwd_pre" if step.startswith("pre") else "fwd_post", step.split()[-1])

    alike(lambda: Mlp(8, 12), shard, OUTPUT, mesh)


@pytest.mark.parametrize("name", SCHEMES)
def test_reshardings(name: str) -> None:
    launch.passes(partial(scheme, name))


# -- collectives in hooks ----------------------------------------------------------------------------------------

# Of each: what a hook does to the output of a layer, what follows, and the factors of the result and the gradient.
COLLECTIVES: dict[str, tuple[Any, Any, int, int]] = {
    "all-gather": (partial(gather_from_tensor_parallel, axis=1), partial(scatter_to_tensor_parallel, axis=1), 1, 1),
    "reduce-scatter": (
        partial(reduce_scatter_to_sequence_parallel, axis=1), partial(gather_from_tensor_parallel, axis=1), 2, 1,
    ),
    "scatter": (partial(scatter_to_tensor_parallel, axis=1), partial(gather_from_tensor_parallel, axis=1), 1, 1),
    "all-reduce": (reduce_from_tensor_parallel, None, 2, 1),
    "all-reduce of the gradient": (copy_to_tensor_parallel, None, 1, 2),
}  # fmt: skip


def collective(name: str, mesh: Any) -> None:
    first, then, of_result, of_gradient = COLLECTIVES[name]
    group = mesh.get_group().group_name
    linear = nn.Linear(6, 6)
    twin = copy.deepcopy(linear)
    if name == "all-reduce of the gradient":
        linear.register_forward_pre_hook(lambda module, inputs: first(inputs[0], group))
    else:
        linear.register_forward_hook(lambda module, inputs, output: first(output, group))
    ours, theirs = (torch.linspace(-1, 1, 24).view(4, 6).requires_grad_() for _ in range(2))
    result = linear(ours) if then is None else then(linear(ours), group)
    expected = twin(theirs)
    torch.testing.assert_close(result, expected * of_result)
    result.mean().backward()
    expected.mean().backward()
    torch.testing.assert_close(ours.grad, theirs.grad * of_gradient)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    launch.passes(partial(collective, name))
