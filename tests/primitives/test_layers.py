"""Plain layers in a match: their calls become operations on their parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.patterns import call_module


class Model(nn.Module):
    """An embedding, a projection without a bias, a convolution, and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(7, 6, padding_idx=1), nn.Linear(6, 6, bias=False)
        self.conv, self.norm = nn.Conv1d(6, 4, 3, padding=1, groups=2), nn.BatchNorm1d(4)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids)) + torch.sin(self.fc(torch.ones(6)))
        return F.relu(self.norm(F.silu(self.conv(x.transpose(1, 2)))))


def embedded(ids: Any, weight: Any) -> Any:
    return torch.tanh(F.embedding(ids, weight, 1))


def projected(x: Any, weight: Any) -> Any:
    return torch.sin(F.linear(x, weight))


def convolved(x: Any, weight: Any, bias: Any) -> Any:
    return F.silu(F.conv1d(x, weight, bias, padding=1, groups=2))


def convolved_by_type(x: Any) -> Any:
    return F.silu(call_module(nn.Conv1d)(x))


@pytest.mark.parametrize("pattern", [embedded, projected, convolved, convolved_by_type])
@pytest.mark.parametrize("primitive", ["fuse", "checkpoint"])
def test_a_match_with_a_layer(pattern: Any, primitive: str) -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(7, (2, 5))
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, ids)
    matches = sch.find(pattern, expect=1)
    sch.fuse(matches, compiler=None) if primitive == "fuse" else sch.checkpoint(matches)
    assert list(model.state_dict()) == list(twin.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for training in (True, False, True):
        model.train(training), twin.train(training)
        given = torch.randint(7, (3, 4))
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(given).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    sch.undo()
    assert type(model) is Model


@pytest.mark.parametrize("primitive", ["fuse", "checkpoint"])
def test_a_layer_that_does_more_than_its_operation(primitive: str) -> None:
    def normed(x: Any) -> Any:
        return F.relu(call_module("norm")(x))

    sch = schedule.create_schedule(Model(), torch.randint(7, (2, 5)))
    with pytest.raises(schedule.NotApplicable, match="holds the call of a module, norm"):
        getattr(sch, primitive)(sch.find(normed, expect=1))
    assert type(sch.module) is Model


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_a_layer_that_changes_afterwards() -> None:
    model, ids = Model().eval(), torch.randint(7, (2, 5))
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, ids)
    sch.fuse(sch.find(convolved, expect=1), compiler=None)
    for change in (
        lambda m: nn.init.ones_(m.conv.weight),
        lambda m: setattr(m.conv, "bias", None),
        lambda m: setattr(m.conv, "padding", (0,)),
        lambda m: setattr(m, "conv", nn.Conv1d(6, 4, 1).requires_grad_(False)),
    ):
        torch.manual_seed(1)
        change(model)
        torch.manual_seed(1)
        change(twin)
        torch.testing.assert_close(model(ids), twin(ids))
