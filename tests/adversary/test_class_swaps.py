"""Swaps of a scheduled module's class by others, and several schedules of one model: undone in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import schedule
from schedule.runtime.scheduled import state_of
from tests.adversary.fused_models import fused, is_clean, mlp_of
from tests.distributed.launch import passes
from tests.small import Mlp, ids, small

pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN = torch.linspace(-1, 1, 160).reshape(2, 5, 16)


class Counts:
    """What a user mixes into the class of a module."""

    def calls(self) -> int:
        return 7


def _mixed(module: nn.Module) -> None:
    module.__class__ = type(f"Counting{type(module).__name__}", (Counts, type(module)), {})


def _parametrized(module: nn.Module) -> None:
    module.register_parameter("extra", nn.Parameter(torch.ones(2)))
    parametrize.register_parametrization(module, "extra", nn.Identity())


@pytest.mark.parametrize("order", ["before", "after"])
def test_undo_leaves_the_users_mixin(order: str) -> None:
    model = small().eval()
    if order == "before":
        _mixed(mlp_of(model))
    expected = model(**ids())
    sch = schedule.create_schedule(model, ids())
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
    if order == "after":
        _mixed(mlp_of(model))
    for _ in range(2):
        assert mlp_of(model).calls() == 7 and state_of(mlp_of(model)) is not None
        torch.testing.assert_close(model(**ids()), expected)
        sch.undo()
        assert mlp_of(model).calls() == 7 and is_clean(model) and isinstance(mlp_of(model), Mlp)
        assert type(mlp_of(model)).__name__ == "CountingMlp"
        torch.testing.assert_close(model(**ids()), expected)
        sch.redo()


def test_another_step_leaves_the_users_mixin() -> None:
    model, sch = fused()
    _mixed(mlp_of(model))
    sch["blocks.0.mlp"].checkpoint()
    assert mlp_of(model).calls() == 7
    sch.undo()
    assert mlp_of(model).calls() == 7
    sch.undo()
    assert mlp_of(model).calls() == 7 and is_clean(model)


def test_a_swap_that_is_taken_away_first() -> None:
    model, sch = fused()
    mlp = mlp_of(model)
    _parametrized(mlp)
    assert parametrize.is_parametrized(mlp)
    parametrize.remove_parametrizations(mlp, "extra")
    assert state_of(mlp) is not None
    sch.undo()
    assert type(mlp) is Mlp


@pytest.mark.parametrize("order", ["before", "after"])
def test_undo_leaves_parametrizations(order: str) -> None:
    model = small().eval()
    mlp = mlp_of(model)
    if order == "before":
        _parametrized(mlp)
    sch = schedule.create_schedule(model, ids())
    sch["blocks.0.mlp"].fuse(sch["blocks.0.mlp"].find("bias_gelu_tanh", expect=1))
    if order == "after":
        _parametrized(mlp)
    assert torch.equal(mlp.extra, torch.ones(2))
    sch.undo()
    assert is_clean(model) and parametrize.is_parametrized(mlp) and torch.equal(mlp.extra, torch.ones(2))
    parametrize.remove_parametrizations(mlp, "extra")
    assert type(mlp) is Mlp


def test_a_class_of_the_users_that_has_a_name_stays() -> None:
    """It is derived from the generated class, which behaves as the original from then on."""
    model, sch = fused()
    mlp = mlp_of(model)
    expected = mlp(HIDDEN)

    class Negated(type(mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return -super().forward(hidden)

    mlp.__class__ = Negated
    torch.testing.assert_close(mlp(HIDDEN), -expected)
    sch.undo()
    assert type(mlp) is Negated and state_of(mlp) is None
    torch.testing.assert_close(mlp(HIDDEN), -expected)


def _fsdp(mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for order in ("before", "after"):
        torch.manual_seed(0)
        model = small().eval()
        expected = model(**ids())
        if order == "before":
            fully_shard(mlp_of(model), mesh=mesh)
        sch = schedule.create_schedule(model, ids())
        mlps = sch["blocks.*"] if order == "before" else sch["blocks.*.mlp"]
        if order == "before":
            mlps.checkpoint()
            sch["blocks.0.mlp"].checkpoint()
        else:
            mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
            fully_shard(mlp_of(model), mesh=mesh)
        assert isinstance(mlp_of(model), FSDPModule) and state_of(mlp_of(model)) is not None
        torch.testing.assert_close(model(**ids()), expected)
        if order == "before":
            sch.undo()
        sch.undo()
        assert is_clean(model) and isinstance(mlp_of(model), FSDPModule) and isinstance(mlp_of(model), Mlp)
        mlp_of(model).reshard()
        torch.testing.assert_close(model(**ids()), expected)
        sch.redo()
        assert isinstance(mlp_of(model), FSDPModule) and not is_clean(model)
        torch.testing.assert_close(model(**ids()), expected)
        sch.undo()
        assert is_clean(model) and isinstance(mlp_of(model), FSDPModule)


def test_undo_leaves_fully_sharded_modules() -> None:
    passes(_fsdp)


# -- several schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["as made", "reversed"])
@pytest.mark.parametrize("same", [True, False])
def test_schedules_of_one_model_are_undone_in_any_order(order: str, same: bool) -> None:
    model = small().eval()
    expected = model(**ids())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    first, second = (schedule.create_schedule(model, ids()) for _ in range(2))
    mlp = first["blocks.0.mlp"]
    mlp.fuse(mlp.find("bias_gelu_tanh", expect=1))
    second["blocks.0.mlp" if same else "blocks.1.mlp"].checkpoint()
    last = second if order == "as made" else first
    for sch in (first, second) if order == "as made" else (second, first):
        sch.undo()
        torch.testing.assert_close(model(**ids()), expected)
        if sch is not last:
            path = "blocks.1.mlp" if last is second and not same else "blocks.0.mlp"
            assert state_of(model.get_submodule(path)) is not None, "only the schedule's own steps are reverted"
    assert is_clean(model) and [(type(module), set(vars(module))) for module in model.modules()] == before


def test_what_lies_under_another_schedule_is_not_redone() -> None:
    model = small().eval()
    first, second = (schedule.create_schedule(model, ids()) for _ in range(2))
    mlp = first["blocks.0.mlp"]
    mlp.fuse(mlp.find("bias_gelu_tanh", expect=1))
    second["blocks.0.mlp"].checkpoint()
    first.undo()
    with pytest.raises(schedule.ScheduleError, match="another schedule changed what the Mlp runs"):
        first.redo()
    second.undo()
    first.redo()
    first.undo()
    assert is_clean(model)


def test_a_replacement_under_another_one_is_refused_and_nothing_changes() -> None:
    model = small().eval()
    original = mlp_of(model).act
    first = schedule.create_schedule(model, ids())
    first["blocks.0.mlp.act"].replace(nn.GELU(approximate="tanh"))
    second = schedule.create_schedule(model, ids())
    second["blocks.0.mlp.act"].replace(nn.ReLU())
    with pytest.raises(schedule.ScheduleError, match="replaced the GELU 'act' by a ReLU"):
        first.undo()
    assert len(first.history) == 1
    second.undo()
    first.undo()
    assert mlp_of(model).act is original


# -- memory --------------------------------------------------------------------------------------------------
