"""Plans for modules whose code reads the sizes of shards: sharded and equal, or left whole with the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from schedule import create_schedule
from schedule.api.simulate import planned
from schedule.distributed.planning import planner
from schedule.util.errors import ShardError
from tests.distributed import rehearsed

SHARDED = (
    rehearsed.Projections,
    rehearsed.ZerosOfTheSize,
    rehearsed.ViewOfTheSize,
    rehearsed.Heads,
    rehearsed.ReturnedByName,
)
WHOLE = {
    rehearsed.ScaledBySize: "div computes with a size of the shard",
    rehearsed.ScaledByRoot: "div computes with a size of the shard",
    rehearsed.ScaledByNumberOfElements: "div computes with a size of the shard",
    rehearsed.ScaledByLength: "div computes with a size of the shard",
    rehearsed.ScaledByAttribute: "div computes with a size of the shard",
    rehearsed.ScaledByHeads: "div computes with a size of the shard",
    rehearsed.ScaledByText: "mul computes with a size of the shard",
    rehearsed.ScaledByMaximum: "mul computes with a size of the shard",
    rehearsed.ScaledByTensor: "tensor computes with a size of the shard",
    rehearsed.SumOfOnes: "sum of a tensor as large as the shard",
    rehearsed.BranchOnSize: "another way",
    rehearsed.BranchOnAttribute: "another way",
    rehearsed.SizeReturned: "output computes with a size of the shard",
    rehearsed.SizeReturnedByName: "output computes with a size of the shard",
}
OWN_SHARDED = (
    rehearsed.Own,
    rehearsed.OwnHeadsByWidth,
    rehearsed.OwnNormalized,
    rehearsed.OwnGated,
)
OWN_WHOLE = {
    rehearsed.OwnTied: "gate is another name of a sharded parameter",
    rehearsed.OwnBiased: "addmm adds a value to a partial sum on every rank",
    rehearsed.OwnFunctional: "add of a partial sum is not a partial sum",
    rehearsed.OwnPlusNumber: "add of a partial sum is not a partial sum",
    rehearsed.OwnRounded: "div of a partial sum is not a partial sum",
    rehearsed.OwnTwice: "mul of a partial sum is not a partial sum",
    rehearsed.OwnTimesShard: "mul of a partial sum is not a partial sum",
    rehearsed.OwnScaled: "div computes with a size of the shard",
    rehearsed.OwnHeads: "does not keep the shards of its operands apart",
    rehearsed.OwnBranch: "another way",
    rehearsed.OwnSplit: "cannot run on the sizes of one rank",
}


def _batch() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 5, 16),)


@pytest.mark.parametrize("kind", SHARDED)
def test_sizes_that_only_shape_tensors(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plan, seen = planned(kind(), _batch(), vocabulary=False)
    assert {step.path for step in plan.shards} == {"up", "down"}
    assert seen.equal(1e-5), seen.where


@pytest.mark.parametrize(("kind", "why"), WHOLE.items())
def test_sizes_that_are_values(kind: type[nn.Module], why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        plan = create_schedule(kind(), _batch()).shard_plan(2, vocabulary=False)
    assert not plan.shards and why in plan.whole["up.weight"]
    assert not caplog.records  # torch's own log of failing operations


def test_options_by_name() -> None:
    """What an object is given in a dict is compared one by one."""
    torch.manual_seed(0)
    plan, seen = planned(rehearsed.Kept(), (*_batch(), rehearsed.Shelf()), vocabulary=False)
    assert {step.path for step in plan.shards} == {"up", "down"}
    assert seen.equal(1e-5), seen.where
    plan = create_schedule(rehearsed.KeptWithSize(), (*_batch(), rehearsed.Shelf())).shard_plan(2, vocabulary=False)
    assert not plan.shards and "update computes with a size of the shard" in plan.whole["up.weight"]


@pytest.mark.parametrize("kind", OWN_SHARDED)
def test_own_parameters(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plan, seen = planned(rehearsed.Between(kind(), rehearsed.Scale), _batch())
    assert {(step.path, step.name) for step in plan.shards} == {("inner", "up"), ("inner", "down")}
    assert seen.equal(1e-5), seen.where


@pytest.mark.parametrize(("kind", "why"), OWN_WHOLE.items())
def test_own_parameters_that_stay_whole(kind: type[nn.Module], why: str) -> None:
    plan = create_schedule(rehearsed.Between(kind(), rehearsed.Scale), _batch()).shard_plan(2)
    assert not plan.shards and why in plan.whole["inner.down"]


@pytest.mark.parametrize("kind", [*OWN_SHARDED, *OWN_WHOLE, rehearsed.OwnRow])
def test_own_parameters_between_projections(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    _, seen = planned(rehearsed.Between(kind(), nn.Linear), _batch())
    assert seen.equal(1e-5), seen.where


def test_a_sharded_input_of_own_parameters() -> None:
    plan, seen = planned(rehearsed.Between(rehearsed.OwnRow(), nn.Linear), _batch())
    assert {(step.path, step.name) for step in plan.shards} >= {("before", "weight"), ("inner", "weight")}
    assert seen.equal(1e-5), seen.where


def test_a_caller_that_cannot_run_raises_on_every_rank() -> None:
    """The caller alone does not tell whether its arguments are sharded too, so the plan stands."""
    with pytest.raises(ShardError, match="cannot be multiplied"):
        planned(rehearsed.Padded(), _batch(), vocabulary=False)


def test_a_plan_without_the_second_trace_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "rehearse", lambda *args: {})
    torch.manual_seed(0)
    _, seen = planned(rehearsed.ScaledBySize(), _batch(), vocabulary=False)
    assert not seen.equal(1e-2)


LAYERS = {
    rehearsed.Layer: "",
    rehearsed.LayerOfRows: "",
    rehearsed.LayerOverLength: "div computes with a size of the shard",
    rehearsed.LayerOverRoot: "div computes with a size of the shard",
    rehearsed.LayerOverElements: "div computes with a size of the shard",
    rehearsed.LayerOfOnes: "sum of a tensor as large as the shard",
    rehearsed.LayerThatBranches: "another way",
    rehearsed.LayerWithPositions: "positions is read along the sequence",
}


@pytest.mark.parametrize(("layer", "why"), LAYERS.items())
def test_layers_on_a_part_of_the_sequence(layer: type[nn.Module], why: str) -> None:
    torch.manual_seed(0)
    plan, seen = planned(rehearsed.Chain(layer), (torch.randn(2, 8, 8),), sequence=True)
    assert seen.equal(1e-5), seen.where
    told = [reason for path, reason in plan.whole.items() if path.startswith("sequence of layers")]
    assert why in told[0] if why else not told and plan.boundaries
