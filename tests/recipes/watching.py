"""Every schedule that a test makes is taken through JSON, Python and a replay, as far as its recipe can be written.

A conftest that imports ``recipes_round_trip`` has it for the tests beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import schedule
from schedule import Recipe, RecipeError
from schedule.primitives.registry import registered
from schedule.recipes.recipe import Call
from schedule.tree import Tree
from tests.recipes.helpers import scripted


class Watched(pytest.MonkeyPatch):
    """Keeps each tree with a copy of its model as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tree, nn.Module | None]] = []
        original = Tree.__init__

        def init(tree: Tree, root: nn.Module, example_inputs: Any, mesh: Any = None) -> None:
            original(tree, root, example_inputs, mesh)
            self.made.append((tree, _copied(root)))

        self.setattr(Tree, "__init__", init)


def _copied(root: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(root)
    except (TypeError, RuntimeError, AttributeError):  # the test's model is not to be copied
        return None


@pytest.fixture(autouse=True)
def recipes_round_trip() -> Iterator[None]:
    """Afterwards the recipes of all schedules round-trip."""
    watched = Watched()
    yield
    watched.undo()
    for tree, before in watched.made:
        if tree.history.steps and tree.history.pending is None:
            _round_trip(tree, before)


@pytest.fixture(autouse=True)
def recipes_as_text() -> Iterator[None]:
    """Afterwards the recipes of all schedules go through JSON and Python, without a replay: a few ms a schedule."""
    made: list[Tree] = []
    original = Tree.__init__

    def init(tree: Tree, *args: Any, **kwargs: Any) -> None:
        original(tree, *args, **kwargs)
        made.append(tree)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "__init__", init)
        yield
    for tree in made:
        if tree.history.steps and tree.history.pending is None:
            _as_text(tree)


def _as_text(tree: Tree) -> Recipe | None:
    """The recipe as it is read again; None if it cannot be written, or is of a primitive that is gone again."""
    try:
        recipe = tree.node(tree.root).recipe()
    except RecipeError as error:
        assert error.why and error.where and error.fix
        return None
    if any(isinstance(step, Call) and step.primitive not in registered() for step in recipe.steps):
        return None
    read = Recipe.from_json(recipe.to_json())
    assert read == recipe, recipe.diff(read)
    compile(recipe.to_python(), "recipe.py", "exec")
    return read


def _round_trip(tree: Tree, before: nn.Module | None) -> None:
    read = _as_text(tree)
    if read is None or before is None:
        return
    recipe, inputs = tree.node(tree.root).recipe(), tree.graphs.example_inputs
    twin = schedule.create_schedule(copy.deepcopy(before), inputs, tree.mesh)
    assert not recipe.diff(schedule.replay(twin, read).recipe())
    assert not recipe.diff(scripted(read, schedule.create_schedule(before, inputs, tree.mesh)).recipe())
