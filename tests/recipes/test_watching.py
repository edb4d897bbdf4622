"""The fixture that takes every schedule's recipe around fails where one is wrong, and says at which step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import Recipe, Schedule
from schedule.runtime.scheduled import state_of
from tests.recipes.watching import Watched, watched
from tests.small import bias_gelu, ids, small

pytestmark = pytest.mark.unreplayable("what is wrong here is wrong on purpose")


@pytest.fixture
def made(recipes_round_trip: None) -> Iterator[tuple[Watched, Schedule]]:
    with watched(copies=True) as schedules:
        sch = schedule.create_schedule(small(), ids())
        sch["blocks.0"].checkpoint()
        mlps = sch["blocks.*.mlp"]
        mlps.fuse(mlps.find(bias_gelu, expect=2))
        yield schedules[0], sch


def test_a_right_recipe_passes(made: tuple[Watched, Schedule]) -> None:
    each, sch = made
    sch["blocks.1"].annotate("norm.weight", "decay", 0.0)
    sch.undo().undo().redo()
    each.check(replays=True)
    assert [len(recipe.steps) for recipe in each.recipes] == [4, 3] and not each.refused


@pytest.mark.parametrize("wrong", ["to_json", "to_python"])
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda steps: steps[:-1], 3),
        (lambda steps: steps[1:2] + steps[:1] + steps[2:], 1),
        (lambda steps: (dataclasses.replace(steps[0], at=("blocks.1",)), *steps[1:]), 1),
        (lambda steps: (dataclasses.replace(steps[0], arguments=(("every", 2),)), *steps[1:]), 1),
        (lambda steps: (steps[0], dataclasses.replace(steps[1], counts=2), steps[2]), 2),
        (lambda steps: (*steps, steps[0]), 4),
    ],
    ids=["shorter", "another order", "another place", "another argument", "another count", "longer"],
)
def test_a_text_that_says_something_else_does_not(
    made: tuple[Watched, Schedule], wrong: str, change: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Recipe, wrong)
    monkeypatch.setattr(Recipe, wrong, lambda recipe: right(dataclasses.replace(recipe, steps=change(recipe.steps))))
    with pytest.raises(AssertionError, match=rf"step {number}\b|after step {number - 1} of|more than the 3 steps"):
        made[0].check(replays=False)


def test_a_replay_that_does_something_else_does_not(made: tuple[Watched, Schedule]) -> None:
    each, _ = made
    assert isinstance(each.before, nn.Module)
    schedule.create_schedule(each.before, ids())["blocks.0"].checkpoint()  # the copy is no longer as the model was
    with pytest.raises(schedule.RecipeError, match="checkpointed already"):
        each.check(replays=True)


def test_other_graphs_do_not(made: tuple[Watched, Schedule]) -> None:
    each, sch = made
    state = state_of(sch["blocks.1.mlp"].module)
    assert state is not None
    state.specializations = state.specializations[:1]
    with pytest.raises(AssertionError, match=r"the graphs of blocks\.1\.mlp differ after the replay:\n(?s:.*)\+"):
        each.check(replays=True)


@pytest.mark.parametrize("hooked", ["forward", "backward"])
def test_other_results_do_not(made: tuple[Watched, Schedule], hooked: str) -> None:
    each, sch = made
    if hooked == "forward":
        sch.module.register_forward_hook(lambda module, args, output: output * 2)
    else:
        sch.module.embed.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(AssertionError, match=f"{'output 0' if hooked == 'forward' else 'gradient of embed'}"):
        each.check(replays=True)


def test_what_training_changed_is_handed_over(made: tuple[Watched, Schedule]) -> None:
    each, sch = made
    with torch.no_grad():
        for parameter in sch.module.parameters():
            parameter.add_(0.1)
    each.check(replays=True)


@pytest.mark.unwritable("a lambda, and a module with weights")
def test_what_cannot_be_written_is_noticed(made: tuple[Watched, Schedule]) -> None:
    each, sch = made
    sch["blocks.0.attn.q"].replace(nn.Linear(16, 16))
    sch.undo()
    each.check(replays=True)
    assert len(each.refused) == 1 and "parameters" in each.refused[0]
