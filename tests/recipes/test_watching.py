"""The fixture that takes every schedule's recipe around fails where one is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

import schedule
from schedule import Recipe, Schedule
from tests.recipes.watching import Watched, _round_trip
from tests.small import ids, small


@pytest.fixture
def watched() -> tuple[Watched, Schedule]:
    watched = Watched()
    sch = schedule.create_schedule(small(), ids())
    watched.undo()
    sch["blocks.0"].checkpoint()
    sch["blocks.1"].annotate("norm.weight", "decay", 0.0)
    return watched, sch


def test_a_right_recipe_passes(watched: tuple[Watched, Schedule]) -> None:
    _round_trip(*watched[0].made[0])


@pytest.mark.parametrize("wrong", ["to_json", "to_python"])
def test_a_recipe_that_loses_a_step_does_not(
    watched: tuple[Watched, Schedule], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Recipe, wrong)

    def shorter(recipe: Recipe) -> Any:
        return right(dataclasses.replace(recipe, steps=recipe.steps[:-1]))

    monkeypatch.setattr(Recipe, wrong, shorter)
    with pytest.raises(AssertionError):
        _round_trip(*watched[0].made[0])


def test_a_replay_that_does_something_else_does_not(watched: tuple[Watched, Schedule]) -> None:
    tree, before = watched[0].made[0]
    assert isinstance(before, nn.Module)
    schedule.create_schedule(before, ids())["blocks.0"].checkpoint()  # the copy is no longer as the model was
    with pytest.raises(schedule.RecipeError, match="checkpointed already"):
        _round_trip(tree, before)
