"""Schedules of models and example inputs of which one has no values: shapes are enough until values are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule import VerificationError
from schedule.batches import placed
from schedule.distributed.communication.groups import SimulatedRanks
from schedule.distributed.communication.mesh import SimulatedMesh
from tests.distributed.blocks import Mlp, shard_mlp


def made(device: str, make: Callable[[], nn.Module] = Mlp) -> nn.Module:
    with torch.device(device):
        return make()


def batch(device: str) -> torch.Tensor:
    return torch.randn(2, 4, 16).to(device)


SIDES = [("meta", "cpu"), ("meta", "meta"), ("cpu", "meta")]


@pytest.mark.parametrize(("model", "inputs"), SIDES)
def test_shapes_are_enough_to_shard(model: str, inputs: str) -> None:
    sch = schedule.create_schedule(made(model), batch(inputs), mesh=SimulatedMesh(SimulatedRanks(2, limit=60.0), 0))
    shard_mlp(sch)
    assert sch["fc1"].module.out_features == 16


@pytest.mark.parametrize(("model", "inputs"), SIDES)
def test_shapes_are_enough_for_a_plan(model: str, inputs: str) -> None:
    assert len(schedule.create_schedule(made(model), batch(inputs)).shard_plan(2).groups) == 1


class Tokens(nn.Module):
    """Two layers of ids: a wrong id is an error, and the second one is rewritten later."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(7, 16), Mlp(), Mlp()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.table(ids)))


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


@pytest.mark.parametrize(("model", "inputs"), SIDES)
def test_rewrites_of_shapes_alone_hold_for_values(model: str, inputs: str) -> None:
    """Once the model is built; then its graphs are checked by value again."""
    ids = torch.randint(0, 7, (2, 5))
    sch = schedule.create_schedule(made(model, Tokens), ids.to(inputs))
    sch["first"].fuse(sch["first"].find(bias_gelu, expect=1))
    schedule.build(sch)
    sch["second"].fuse(sch["second"].find(bias_gelu, expect=1))
    assert schedule.verify(sch, ids, steps=1)


def test_what_needs_values_says_so_before_any_work() -> None:
    for model, fix in (("meta", r"schedule.build\(sch\)"), ("cpu", "a batch of values")):
        sch = schedule.create_schedule(made(model), batch("meta"))
        sch["fc1"].annotate("weight", "decay", 0.0)
        with pytest.raises(VerificationError, match=fix):
            schedule.verify(sch, batch("meta"))
    reached = []
    with pytest.raises(VerificationError, match="has a tensor"):  # noqa: SIM117
        with schedule.verify(schedule.create_schedule(made("meta")), batch("meta")):
            reached.append(1)
    assert not reached


def test_values_for_shapes_are_ones_and_the_same_normal_numbers() -> None:
    shapes: dict[str, Any] = {"ids": torch.ones(2, 3, dtype=torch.long, device="meta"), "x": batch("meta"), "n": 3}
    first, second = (placed(made("cpu"), shapes) for _ in range(2))
    assert first["ids"].eq(1).all() and first["n"] == 3 and torch.equal(first["x"], second["x"])
    assert 0.5 < first["x"].std() < 2
    real = {"x": batch("cpu")}
    assert placed(made("cpu"), real) is real and placed(made("meta"), shapes) is shapes
    assert placed(made("meta"), real)["x"].is_meta
