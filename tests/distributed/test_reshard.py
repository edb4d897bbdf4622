"""Reshardings beside whole modules: computed, trained, composed, refused and undone on two gloo processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import schedule
from tests.distributed import launch
from tests.distributed.blocks import Gated, compare, observed, shard_gated
from tests.distributed.test_errors import refused
from tests.distributed.test_undo import fingerprint, same

SHAPES = ((2, 6), (3, 4))


class Region(nn.Module):
    """Two projections, and between them what may work on a part of the sequence."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc1, self.act, self.norm = nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden)
        self.mid, self.fc2 = nn.Linear(hidden, hidden), nn.Linear(hidden, width)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] → the same."""
        y: Tensor = self.fc2(self.mid(self.norm(self.act(self.fc1(x)))))
        return x + y


def on_mesh(mesh: Any, block: nn.Module | None = None) -> tuple[Any, nn.Module]:
    """A schedule of a block, and the whole twin."""
    block = Region() if block is None else block
    twin = copy.deepcopy(block)
    return schedule.create_schedule(block, batch=torch.randn(2, 6, 16), mesh=mesh), twin


def region(sch: Any) -> None:
    """The sequence is sharded from fc1 to fc2; what is inside adds up the gradients of its whole parameters."""
    sch["fc1"].sync("fwd_post", "RRR->RSR")
    for name in ("norm", "mid"):
        sch[name].sync("bwd_post", "all_reduce", argument="weight")
        sch[name].sync("bwd_post", "all_reduce", argument="bias")
    sch["fc2"].sync("fwd_pre", "RSR->RRR")


def trained(block: nn.Module) -> dict[str, Tensor]:
    """What three steps of AdamW add to each parameter."""
    start = {name: p.detach().clone() for name, p in block.named_parameters()}
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        observed_loss = block(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        observed_loss.backward()
        optimizer.step()
    return {name: p.detach() - start[name] for name, p in block.named_parameters()}


def same_updates(block: nn.Module, twin: nn.Module) -> None:
    ours, theirs = trained(block), trained(twin)
    for name, update in theirs.items():
        assert (ours[name] - update).norm() <= 1e-3 * update.norm(), name


def sequence_region(mesh: Any) -> None:
    """Outputs, gradients and updates as on one device; the activations inside are half; undo and recipe."""
    sch, twin = on_mesh(mesh)
    before, shapes = fingerprint(sch.module), list[torch.Size]()
    region(sch)
    handle = sch.module.norm.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    compare(sch.module, twin, 16, SHAPES)
    handle.remove()
    assert shapes[0] == (2, 3, 32)
    sch.module.train()
    with CommDebugMode() as seen:
        observed(sch.module, torch.randn(2, 6, 16))
    assert seen.get_total_counts() == 2 + 4  # the sequence gathered, and its gradient; four gradients of parameters
    same_updates(copy.deepcopy(sch.module), copy.deepcopy(twin))
    recipe = schedule.Recipe.from_json(sch.recipe().to_json())
    again, _ = on_mesh(mesh, twin)
    schedule.replay(again, recipe)
    assert again.recipe() == sch.recipe()
    x = torch.randn(2, 6, 16)
    assert all(torch.equal(a, b) for a, b in zip(*(observed(s.module, x).values() for s in (sch, again)), strict=True))
    sch.module.zero_grad()
    while sch.history:
        sch.undo()
    same({**fingerprint(sch.module), "random": 0}, {**before, "random": 0})


def second_on_a_side(mesh: Any) -> None:
    """A second resharding on a side goes on from the first; undoing it leaves the first."""
    sch, twin = on_mesh(mesh)
    module = sch.module
    sch["fc1"].sync("fwd_pre", "RRR->RSR")
    sch["fc1"].sync("fwd_pre", "RSR->SRR")
    for name in ("weight", "bias"):
        sch["fc1"].sync("bwd_post", "all_reduce", argument=name)
    sch["fc1"].sync("fwd_post", "SRR->RSR")
    one = fingerprint(module)
    sch["fc1"].sync("fwd_post", "RSR->RRS")
    assert module.fc1(torch.ones(2, 6, 16)).shape == (2, 6, 16)
    sch.undo()
    same(fingerprint(module), one)
    assert module.fc1(torch.ones(2, 6, 16)).shape == (2, 3, 32)
    sch.redo()
    refused(sch, r"norm starts from RSR, and fc1 before it gives RRS", lambda s: s["norm"].sync("fwd_pre", "RSR->RRR"))
    sch["act"].sync("fwd_post", "RRS->RSR")
    for argument in ("weight", "bias"):
        sch["norm"].sync("bwd_post", "all_reduce", argument=argument)
    sch["norm"].sync("fwd_post", "RSR->RRS")
    sch["mid"].sync("fwd_pre", "RRS->SRR", argument="input")
    sch["mid"].sync("fwd_pre", "SRR->RRR")
    compare(module, twin, 16, ((2, 6),))
    same_updates(module, twin)


def with_shards(mesh: Any) -> None:
    """A column-parallel module of a gathered input, whose gradient is first added up and then sliced."""
    for first in ("reshard", "reduce"):
        sch, twin = on_mesh(mesh)
        sch["fc1"].sync("fwd_post", "RRR->RSR")
        for name in ("weight", "bias"):
            sch["mid"].shard(name, axis=0)
            sch["norm"].sync("bwd_post", "all_reduce", argument=name)
        steps = [("fwd_pre", "RSR->RRR"), ("bwd_post", "all_reduce")]
        for mode, op in steps if first == "reshard" else reversed(steps):
            sch["mid"].sync(mode, op)
        refused(
            sch,
            "RSR->RRS in fwd_pre: a column-parallel Linear takes RRR, not RRS",
            lambda s: s["mid"].sync("fwd_pre", "RRR->RRS"),
        )
        sch["mid"].sync("fwd_post", "RRS->RSR")
        sch["mid"].sync("fwd_post", "RSR->RRS")
        sch["fc2"].shard("weight", axis=1)
        sch["fc2"].sync("fwd_post", "all_reduce")
        compare(sch.module, twin, 16, ((2, 6),))


def around_a_caller(mesh: Any) -> None:
    """The same of a module that adds up the gradient for its column-parallel ones, before it reshards its input."""
    sch, twin = on_mesh(mesh, nn.Sequential(nn.Identity(), Gated()))
    sch["0"].sync("fwd_post", "RRR->RSR")
    shard_gated(sch["1"])
    sch["1"].sync("fwd_pre", "RSR->RRR")
    compare(sch.module, twin, 16, ((2, 6),))


def wrong_layouts(mesh: Any) -> None:
    """Layouts that contradict the shapes, a neighbor or another synchronization, before any collective."""
    sch, _ = on_mesh(mesh)
    with CommDebugMode() as seen:
        refused(
            sch, r"about 2 dimensions, and the tensor \[2, 6, 32\] has 3", lambda s: s["fc1"].sync("fwd_post", "RR->SR")
        )
        refused(sch, "shards two dimensions", lambda s: s["fc1"].sync("fwd_post", "RRR->SSR"))
        refused(sch, "goes the way back by itself", lambda s: s["fc1"].sync("bwd_post", "RRR->RSR"))
        refused(sch, "the weight is whole, so the Linear takes", lambda s: s["fc1"].sync("fwd_pre", "RRR->RRS"))
        refused(sch, "its weight is not sharded", lambda s: s["fc1"].sync("fwd_post", "all_gather"))
        sch["fc1"].sync("fwd_post", "RRR->RSR")
        refused(
            sch,
            "RRS->RRR starts from RRS, and RRR->RSR before it gives RSR",
            lambda s: s["fc1"].sync("fwd_post", "RRS->RRR"),
        )
        refused(sch, "fc2 starts from RRR, and fc1 before it gives RSR", lambda s: s["fc2"].sync("fwd_pre", "RRR->SRR"))
        refused(sch, "fwd_post has RRR->RSR already", lambda s: s["fc1"].sync("fwd_post", "scatter", axis=1))
        refused(sch, "bwd_pre all_reduce mixes them", lambda s: s["fc1"].sync("bwd_pre", "all_reduce"))
        refused(sch, "column-parallel Linear gives RRS, not RRR", lambda s: s["fc1"].shard("weight", axis=0))
        sch.undo()
        sch["fc2"].sync("fwd_pre", "RSR->RRR")
        refused(
            sch, "fc2 starts from RSR, and fc1 before it gives SRR", lambda s: s["fc1"].sync("fwd_post", "RRR->SRR")
        )
    assert seen.get_total_counts() == 0
    odd = schedule.create_schedule(Region(), batch=torch.randn(2, 5, 16), mesh=mesh)
    refused(odd, "size 5 of axis 1 cannot be shared evenly", lambda s: s["fc1"].sync("fwd_post", "RRR->RSR"))
    odd["fc1"].sync("fwd_post", "RRR->SRR")
    with pytest.raises(schedule.ShardError, match="size 3 of axis 0"):
        odd.module.fc1(torch.randn(3, 5, 16))


def sides(mesh: Any) -> None:
    """Several synchronizations on one side or on both, and what is refused."""
    second_on_a_side(mesh)
    with_shards(mesh)
    around_a_caller(mesh)
    wrong_layouts(mesh)


@pytest.mark.parametrize("case", [sequence_region, sides], ids=lambda case: case.__name__)
def test_on_two_processes(case: launch.Case) -> None:
    launch.passes(case)
