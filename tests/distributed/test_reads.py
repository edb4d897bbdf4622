"""Parameters of submodules that are not called because the code around them reads the weights, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.api.simulate import simulate
from schedule.util.errors import ShardError
from tests.distributed.constructs import Wrapper, X, planned, sharded


class Scan(nn.Module):
    """A convolution with a kernel of its own, and steps from the weight of a projection, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48, bias=False)
        self.conv = nn.Conv1d(24, 24, 3, groups=24, padding=2)
        self.selected, self.step, self.outer = nn.Linear(24, 4), nn.Linear(4, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.inner(x).transpose(1, 2).chunk(2, dim=1)
        y = F.conv1d(y, self.conv.weight, self.conv.bias, padding=2, groups=y.shape[1])[..., : x.shape[1]]
        step = self.step.weight @ self.selected(y.transpose(1, 2)).transpose(1, 2)
        y = y * F.softplus(step + self.step.bias[:, None]) * F.silu(gate)
        result: Tensor = self.outer(y.transpose(1, 2))
        return result


class Called(Scan):
    """The projection is called as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.outer(self.step(x[..., :4]))


class Elsewhere(nn.Module):
    """Another module reads a weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scan, self.down = Scan(), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        result: Tensor = self.scan(x) + self.down(F.linear(x[..., :4], self.scan.step.weight))
        return result


def test_weights_that_the_code_around_them_reads() -> None:
    plan, seen = planned(Wrapper(Scan()))
    read = [step.name for step in plan.shards if step.path == "inner"]
    assert sorted(read) == ["conv.bias", "conv.weight", "step.bias", "step.weight"] and not plan.whole
    assert sharded(plan).items() >= {"inner.inner": 0, "inner.selected": 1, "inner.outer": 1}.items()
    assert [one.op for one in seen.forward] == ["all_reduce"] * 3, "of selected, outer and down"


@pytest.mark.parametrize("make", [Called, Elsewhere])
def test_weights_that_stay_whole(make: type[nn.Module]) -> None:
    plan, _ = planned(make())
    assert not plan.groups and any("read by the code of another module" in why for why in plan.whole.values())


def test_undo_of_what_is_read() -> None:
    model = Scan()
    before = copied(model)

    def shard(sch: Any) -> None:
        sch.apply_plan(plan)
        with pytest.raises(ShardError, match="sharded already"):
            sch.shard("conv.weight", axis=0)
        assert sch.module.conv.weight.shape[0] == 12 and sch.module.conv.groups == 12
        while sch.history:
            sch.undo()
        assert copied(sch.module).keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in copied(sch.module).items())
        assert sch.module.conv.groups == 24

    plan = schedule.create_schedule(model, X).shard_plan(2)
    seen = simulate(model, X, shard, 2)
    assert not seen.forward and seen.equal(0.0)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(x, self.table.weight, groups=x.shape[1])
        self.table.weight = nn.Parameter(self.table.weight * 2)
        return y


def test_a_weight_of_a_submodule_that_is_assigned() -> None:
    def shard(sch: Any) -> None:
        sch.shard("table.weight", axis=0)
        sch.shard("table.bias", axis=0)
        sch.sync("fwd_pre", "scatter", axis=1)

    with pytest.raises(ShardError, match=r"assigns table\.weight, which is sharded"):
        simulate(Assigns(), (torch.randn(2, 4, 3),), shard, 2)
