"""Wide residual nets on two gloo processes: convolutions with their batch norms sharded, fused and checkpointed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused
import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.residual import Basic, Bottleneck, WideResNet
from tests.distributed.test_errors import refused

BLOCKS = ("layer1.0", "layer1.1", "layer2.0", "layer2.1")


def images(seed: int, rows: int = 3, side: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, side, side, generator=generator, dtype=torch.float64)


def net(block: type[Basic | Bottleneck]) -> WideResNet:
    """A net in double precision, so that only a mistake makes a difference, with norms that are not fresh."""
    torch.manual_seed(1)
    model = WideResNet(block).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in tensors.items()}


class Collectives(TorchDispatchMode):
    """Counts collectives. ``CommDebugMode`` hooks every module, after which none may be changed in place."""

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("_c10d_functional", "c10d") and "wait" not in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def counted(model: nn.Module) -> tuple[int, int]:
    """Collectives of a forward and a backward pass."""
    with Collectives() as seen:
        output = model(images(0))
        forward = len(seen.names)
        output.sum().backward()
    return forward, len(seen.names) - forward


def trained(model: nn.Module) -> list[dict[str, Tensor]]:
    """Output, gradients, parameters and buffers after each of five updates, and the outputs in evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    labels, steps = torch.tensor([1, 7, 4]), []
    for step in range(5):
        optimizer.zero_grad()
        output = model.train()(images(step))
        nn.functional.cross_entropy(output, labels).backward()
        gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        steps.append(whole({"output": output, **gradients, **model.state_dict()}))
    with torch.no_grad():
        steps.append(whole({"evaluation": model.eval()(images(9, rows=1))}))
    return steps


def same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.keys() == other.keys()
        for name in other:
            torch.testing.assert_close(
                one[name], other[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=f"step {step}, {name}": f"{n}: {m}"
            )


def shard_block(sch: Any, first: str, norm: str, second: str) -> None:
    """One all-reduce each way."""
    sch[first].shard("weight", axis=0)
    for name in ("weight", "bias", "running_mean", "running_var"):
        sch[norm].shard(name, axis=0)
    sch[first].sync("bwd_post", "all_reduce")
    sch[second].shard("weight", axis=1)
    sch[second].sync("fwd_post", "all_reduce")


def by_hand(mesh: Any) -> None:
    """Every block sharded; the norms fused with what is behind them, sharded or not; every other block checkpointed."""
    model = net(Basic)
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, batch=images(0), mesh=mesh)
    for path in BLOCKS:
        shard_block(sch[path], "conv1", "bn1", "conv2")
        with pytest.raises(schedule.ShardError, match="is sharded already"):
            sch[path]["conv1"].shard("weight", axis=1)
        found = sch[path].find("batch_norm_relu", expect=2)
        sch[path].fuse(found if path.endswith("1") else found[:1])  # between the sum and its norm is a shortcut
        calls = [node for node in sch[path].graph.nodes if node.target is fused.batch_norm]
        assert [node.kwargs["activation"] for node in calls] == ["relu"] * (2 if path.endswith("1") else 1)
    sch["layer*.0"].checkpoint()
    assert model.layer1[0].bn1.num_features == 8 and isinstance(model.layer1[0].bn1.running_var, DTensor)
    assert counted(model) == (4, 4 + 2), "one each way in a block, and one where it is computed again"
    for one in (model, twin):
        one.load_state_dict(whole(net(Basic).state_dict()))
        one.zero_grad()
    same(trained(model), trained(twin))
    state = whole(model.state_dict())
    while sch.history:
        sch.undo()
    assert not any(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def planned(mesh: Any) -> None:
    """The plan shards every block's wide convolutions and their norms, with the fewest collectives there can be."""
    for block, rows, forward in ((Basic, ("conv2",), 4), (Bottleneck, ("conv2", "conv3"), 4 + 2)):
        model = net(block)
        twin = copy.deepcopy(model)
        sch = schedule.create_schedule(model, batch=images(0), mesh=mesh)
        plan = sch.shard_plan()
        axes = {step.path: step.axis for step in plan.shards if step.name == "weight"}
        assert all(sum(axes.get(f"{path}.{row}") == 1 for row in rows) == 1 for path in BLOCKS)
        assert all(f"{path}.conv2" in axes for path in BLOCKS)
        sch.apply_plan(plan)
        assert counted(model) == (forward, 4), "the stem of the second has two readers, and no input with a gradient"
        for one in (model, twin):
            one.load_state_dict(whole(net(block).state_dict()))
            one.zero_grad()
        same(trained(model), trained(twin))


class Channels(nn.Module):
    """A convolution, a norm, a grouped convolution and one after it."""

    def __init__(self, hidden: int = 6, groups: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, hidden, 1), nn.BatchNorm2d(hidden)
        self.middle, self.last = nn.Conv2d(hidden, hidden, 3, padding=1, groups=groups), nn.Conv2d(hidden, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] → [batch, 4, height, width]."""
        result: Tensor = self.last(self.middle(self.norm(self.first(x)).relu()))
        return result


def bad_inputs(mesh: Any) -> None:
    """What cannot be sharded is refused, and what cannot be computed raises on every rank before any collective."""
    sch = schedule.create_schedule(Channels(), batch=torch.randn(2, 3, 4, 4), mesh=mesh)
    refused(sch, "its 3 groups cannot be shared evenly by 2 ranks", lambda s: s["middle"].shard("weight", axis=0))
    refused(sch, "no sharded forward along axis 1", lambda s: s["middle"].shard("weight", axis=1))
    refused(sch, "no sharded forward along axis 2", lambda s: s["middle"].shard("weight", axis=2))
    assert not any("middle" in step.path for step in sch.shard_plan().shards)
    plan = schedule.create_schedule(Channels(5, 5), torch.randn(2, 3, 4, 4), mesh=mesh).shard_plan()
    assert not plan.shards and plan.whole["first.weight"] == "5 cannot be shared evenly by 2 ranks"
    sch["last"].shard("weight", axis=1)
    refused(sch, "adds its whole bias after the sum", lambda s: s["last"].shard("bias", axis=0))
    sch["first"].shard("bias", axis=0)
    refused(sch, "the bias is sharded", lambda s: s["first"].shard("weight", axis=1))
    with Collectives() as seen, pytest.raises(schedule.ShardError, match="bias is sharded and the weight is whole"):
        sch.module(torch.randn(2, 3, 4, 4))
    assert not seen.names


def one_value(mesh: Any) -> None:
    """A single value for each channel has no variance, in a sharded norm as in a whole one, fused or not."""
    block = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    sch = schedule.create_schedule(block, batch=torch.randn(2, 3, 4, 4), mesh=mesh)
    sch["0"].shard("bias", axis=0)
    shard_block(sch, "0", "1", "3")
    before = whole(dict(block[1].named_buffers()))
    for fuse in (False, True):
        if fuse:
            sch.fuse(sch.find("batch_norm_relu", expect=1))
        with Collectives() as seen, pytest.raises(ValueError, match="more than 1 value per channel"):
            block(torch.randn(1, 3, 1, 1))
        assert not seen.names
    after = whole(dict(block[1].named_buffers()))
    assert all(torch.equal(after[name], before[name]) for name in ("running_mean", "running_var"))


CASES = (by_hand, planned, bad_inputs, one_value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: launch.Case) -> None:
    launch.passes(case)
