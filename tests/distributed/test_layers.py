"""Sharded convolutions, batch norms and embeddings, and tensors sharded anew, on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.test_errors import refused
from tests.recipes.helpers import scripted
from tests.zoo import batch, build


class Convolved(nn.Module):
    """Convolution, batch norm, ReLU, convolution: a residual block's inside."""

    def __init__(self, dims: int, groups: int = 1, hidden: int = 8) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first, self.norm = conv(4, hidden, 3, padding=1), norm(hidden)
        self.middle = conv(hidden, hidden, 3, padding=1, groups=groups) if groups > 1 else nn.Identity()
        self.second = conv(hidden, 4, 1)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4, …] → the same."""
        result: Tensor = self.second(self.middle(self.norm(self.first(x)).relu()))
        return result


def shard_channels(sch: Any) -> None:
    """Column-parallel, channels of one's own, row-parallel."""
    channels = ("first", "norm", "middle") if sch.module.middle._parameters else ("first", "norm")
    for name in channels:
        sch[name].shard("weight", axis=0)
        sch[name].shard("bias", axis=0)
    for name in ("running_mean", "running_var"):
        sch["norm"].shard(name, axis=0)
    sch["first"].sync("bwd_post", "all_reduce")
    sch["second"].shard("weight", axis=1)
    sch["second"].sync("fwd_post", "all_reduce")


def observed(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients, and running statistics afterwards, whole."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = block(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    seen = {"output": y.detach(), "input": x.grad} | {name: p.grad for name, p in block.named_parameters()}
    seen |= dict(block.named_buffers())
    return {name: full_tensor(tensor) for name, tensor in seen.items() if tensor is not None}


def same(block: nn.Module, twin: nn.Module, shape: tuple[int, ...]) -> None:
    for training in (True, False, True):  # the statistics that training leaves are what evaluation uses
        for rows in (2, 3):
            x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))
            ours, theirs = observed(block.train(training), x), observed(twin.train(training), x)
            assert ours.keys() == theirs.keys()
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def convolutions(mesh: Any) -> None:
    """Of one, two and three dimensions, in groups and not, of channels that do not divide evenly."""
    for dims, groups, hidden in ((1, 1, 8), (2, 1, 8), (3, 1, 8), (2, 4, 8), (1, 8, 8), (2, 1, 5)):
        torch.manual_seed(dims)
        block, twin = Convolved(dims, groups, hidden), Convolved(dims, groups, hidden)
        twin.load_state_dict(block.state_dict())
        shape = (4, *(6, 5, 3)[:dims])
        sch = schedule.create_schedule(block, batch=torch.randn(2, *shape), mesh=mesh)
        shard_channels(sch)
        assert isinstance(block.first.weight, DTensor) and isinstance(block.norm.running_var, DTensor)
        assert block.norm.num_features == block.first.out_channels == block.second.in_channels < hidden
        same(block, twin, shape)
        with CommDebugMode() as seen:
            block.eval()(torch.randn(2, *shape))
        assert seen.get_total_counts() == 1
        wanted = twin.state_dict()
        assert all(torch.equal(full_tensor(t), wanted[n]) for n, t in block.state_dict().items() if "running" not in n)
        while sch.history:
            sch.undo()
        assert not any(isinstance(tensor, DTensor) for tensor in (*block.parameters(), *block.buffers()))
        same(block, twin, shape)


def embeddings(mesh: Any) -> None:
    """By columns, gathered; by rows, of which the last rank has fewer, with a padding index on either rank."""
    ids = torch.tensor([[0, 3, 6, 8], [7, 8, 1, 0]])
    for axis, op, padding in (
        (1, "all_gather", 8),
        (0, "all_reduce", 1),
        (0, "all_reduce", 8),
        (0, "all_reduce", None),
    ):
        block, twin = nn.Embedding(9, 6, padding), nn.Embedding(9, 6, padding)
        twin.load_state_dict(block.state_dict())
        sch = schedule.create_schedule(block, batch=ids, mesh=mesh)
        sch.shard("weight", axis=axis)
        sch.sync("fwd_post", op)
        assert (block.num_embeddings, block.embedding_dim) == (9, 3 if axis else 6)
        ours, theirs = block(ids), twin(ids)
        assert torch.equal(ours, theirs)
        weight = torch.linspace(-1, 1, ours.numel()).view_as(ours)
        for y in (ours, theirs):
            (y * weight).sum().backward()
        assert torch.equal(full_tensor(block.weight.grad), twin.weight.grad)
        if padding is not None:
            assert not twin.weight.grad[padding].any()
        sch.undo()
        sch.undo()
        assert block.embedding_dim == 6 and torch.equal(block.weight, twin.weight)


def half_of_a_norm(mesh: Any) -> None:
    """A batch norm's parameters and statistics go together; a group stays on one rank."""
    block = Convolved(2, groups=4)
    sch = schedule.create_schedule(block, batch=torch.randn(2, 4, 6, 5), mesh=mesh)
    sch["norm"].shard("weight", axis=0)
    with pytest.raises(schedule.ShardError, match="bias, running_mean, running_var whole"):
        block.norm(torch.randn(2, 4, 6, 5))
    refused(sch, "channels of its own", lambda s: s["norm"].sync("fwd_post", "all_reduce"))
    refused(sch, "no sharded forward along axis 1", lambda s: s["middle"].shard("weight", axis=1))
    three = schedule.create_schedule(nn.Conv1d(6, 6, 1, groups=3), batch=torch.randn(2, 6, 4), mesh=mesh)
    refused(three, "3 groups cannot be shared evenly by 2 ranks", lambda s: s.shard("weight", axis=0))


class Middle(nn.Module):
    """Something between two others, to share out what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(x * 1.0)
        return result


def part(whole: Tensor, letters: str, rank: int) -> Tensor:
    """What a rank has of ``whole``."""
    return whole if "S" not in letters else whole.chunk(2, letters.index("S"))[rank]


def reshardings(mesh: Any) -> None:
    """All pairs of one and no shared dimension, of two and three; and their gradients, which go the way back."""
    rank = mesh.get_local_rank()
    for dims, shape in ((2, (4, 6)), (3, (4, 6, 2))):
        kinds = ["R" * dims, *("R" * i + "S" + "R" * (dims - i - 1) for i in range(dims))]
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        for before in kinds:
            for after in kinds:
                sch = schedule.create_schedule(Middle(), batch=whole, mesh=mesh)
                sch["inside"].sync("fwd_post", f"{before}->{after}")
                x = part(whole, before, rank).clone().requires_grad_()
                with CommDebugMode() as seen:
                    y = sch.module(x)
                assert seen.get_total_counts() == ("S" in before and before != after), (before, after)
                assert torch.equal(y, part(whole, after, rank)), (before, after)
                (y * part(weight, after, rank)).sum().backward()
                assert x.grad is not None and torch.equal(x.grad, part(weight, before, rank)), (before, after)


def wrong_reshardings(mesh: Any) -> None:
    sch = schedule.create_schedule(Middle(), batch=torch.randn(4, 6), mesh=mesh)
    for notation, why in (
        ("RS->", "not a resharding"),
        ("RX->RR", "not a resharding"),
        ("SS->RR", "two dimensions over one"),
        ("RRS->RSR", "about 3 dimensions"),
    ):
        refused(sch, why, lambda s, n=notation: s["inside"].sync("fwd_post", n))
    sch = schedule.create_schedule(Middle(), mesh=mesh)  # no run is recorded
    sch["inside"].sync("fwd_post", "RRS->RSR")
    with pytest.raises(schedule.ShardError, match="about 3 dimensions"):
        sch.module(torch.randn(4, 6))
    with pytest.raises(schedule.ShardError, match="size 5 of axis 1 cannot be shared evenly"):
        sch.module(torch.randn(4, 5, 6))


def rebuilt(mesh: Any) -> None:
    """A recipe of shards and syncs does the same on another model: through JSON, on real ranks."""
    block = Convolved(2)
    example = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))
    sch = schedule.create_schedule(block, batch=example, mesh=mesh)
    twin = Convolved(2)
    twin.load_state_dict(block.state_dict())
    shard_channels(sch)
    recipe = schedule.Recipe.from_json(sch.recipe().to_json())
    assert recipe == sch.recipe()
    again = schedule.replay(schedule.create_schedule(twin, example, mesh), recipe)
    assert again.recipe() == recipe and [s.description for s in again.history] == [s.description for s in sch.history]
    ours, theirs = observed(block, example), observed(twin, example)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert scripted(recipe, schedule.create_schedule(Convolved(2), example, mesh)).recipe() == recipe


def planned_again(mesh: Any) -> None:
    """A plan is part of the recipe of the schedule that it was applied to."""
    first, second, given = build("llama").eval(), build("llama").eval(), batch("llama")
    sch = schedule.create_schedule(first, given, mesh)
    sch.apply_plan(sch.shard_plan())
    recipe = schedule.Recipe.from_json(sch.recipe().to_json())
    schedule.replay(schedule.create_schedule(second, given, mesh), recipe)
    assert torch.equal(first(**given).logits, second(**given).logits)
    shards = list(zip(_shards(first), _shards(second), strict=True))
    assert len(shards) > 10 and all(torch.equal(one, other) for one, other in shards)


def _shards(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]


CASES = (convolutions, embeddings, half_of_a_norm, reshardings, wrong_reshardings, rebuilt, planned_again)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: launch.Case) -> None:
    launch.passes(case)
