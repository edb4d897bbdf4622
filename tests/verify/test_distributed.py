"""DTensor parameters are gathered before they are compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from schedule.verify import equivalent

from .models import floats


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ColumnParallel(nn.Linear):
    """A Linear whose weight and bias are sharded over the output features, as written by hand."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to_local(), self.bias.to_local()  # type: ignore[operator]
        return nn.functional.linear(x, weight * self.factor, bias)


@pytest.mark.usefixtures("one_process")
def test_a_sharded_twin_equals_the_whole_one() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 6)
    twin = copy.deepcopy(model)
    twin.__class__ = ColumnParallel
    for name, parameter in list(twin.named_parameters()):
        setattr(twin, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    before = twin.weight.to_local().clone()  # type: ignore[operator]
    report = equivalent(model, twin, floats(3, 4))
    assert report, report
    assert {"gradient", "update"} <= {d.kind for d in report.cases[0].deviations}
    assert torch.equal(twin.weight.to_local(), before)  # type: ignore[operator]
    twin.factor = 1.001
    assert not equivalent(model, twin, floats(3, 4))
