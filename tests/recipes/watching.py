"""Every schedule that a test makes is taken through JSON and Python, and replayed where that is asked for."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from schedule import Recipe, RecipeError
from schedule.core.history import History, Step
from schedule.core.node import Tree
from schedule.primitives.registry import registered
from schedule.recipes.building import recipe_of
from schedule.recipes.steps import Call
from tests.recipes.checking import check_replay, check_text

REPLAY = os.environ.get("REPLAY_RECIPES") == "1"
"""Whether replays are asked for, as ``make sweep`` does: each takes as long as making the schedule took."""


@dataclass
class Watched:
    """A schedule.

    Attributes:
        tree: the schedule.
        before: a copy of its model as it was when the schedule was made, or why there is none.
        recipes: its recipe before steps were taken back, and at last.
        refused: why recipes could not be written.
    """

    tree: Tree
    before: nn.Module | str
    recipes: list[Recipe] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Keep the recipe as it is now, or why there is none."""
        try:
            self.recipes.append(recipe_of(self.tree))
        except RecipeError as error:
            self.refused.append(str(error))

    def check(self, replays: bool) -> None:
        """All of its recipes, and the replay of the last; afterwards :attr:`refused` is complete."""
        assert self.tree.history.pending is None, "a primitive is still running"
        if self.tree.history.steps:
            self.write()
        for recipe in self.recipes:
            self.refused += [f"{name} is a primitive while the test runs only" for name in _unknown(recipe)]
            if not _unknown(recipe):
                check_text(recipe)
        if replays and self.tree.history.steps and not self.refused:
            assert isinstance(self.before, nn.Module), f"there is no copy to replay on: {self.before}"
            check_replay(self.tree, self.before, self.recipes[-1])


def _unknown(recipe: Recipe) -> list[str]:
    known = {*registered(), "optimize"}
    return [step.primitive for step in recipe.steps if isinstance(step, Call) and step.primitive not in known]


@contextmanager
def watched(copies: bool) -> Iterator[list[Watched]]:
    """Within, all schedules that are made.

    Args:
        copies: whether to keep copies of their models.
    """
    made: list[Watched] = []
    init, undo = Tree.__init__, History.undo

    def watched_init(tree: Tree, root: nn.Module, *rest: Any) -> None:
        init(tree, root, *rest)
        made.append(Watched(tree, _copied(root) if copies else "none was asked for"))

    def watched_undo(history: History) -> Step:
        if history.steps and not history.undone and history.pending is None:
            for each in made:
                if each.tree.history is history:
                    each.write()
        return undo(history)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tree, "__init__", watched_init)
        patch.setattr(History, "undo", watched_undo)
        yield made


def _copied(root: nn.Module) -> nn.Module | str:
    try:
        return copy.deepcopy(root)
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:  # of FSDP, or of the test's own model
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="session", autouse=True)
def schedules_made() -> Iterator[list[Watched]]:
    """What the running test has made so far, also in fixtures that outlive it."""
    with watched(copies=REPLAY) as made:
        yield made


@pytest.fixture(autouse=True)
def recipes_round_trip(request: pytest.FixtureRequest, schedules_made: list[Watched]) -> Iterator[None]:
    """Afterwards the recipes of all schedules round-trip: a few ms a schedule.

    Each recipe, also as it was before an undo, goes through JSON, and its script is run on stand-ins and does the same
    steps. With ``REPLAY_RECIPES=1`` the last one is replayed on a copy of the model as it was when the schedule was
    made: the same recipe, the same graphs, and the same results to the bit. On the meta device, and for a simulated
    rank, it ends at the graphs. Schedules in the processes that tests of ``tests/distributed`` start are not seen.

    A test whose recipes cannot be written, or not be replayed, says so and why: ``@pytest.mark.unwritable("…")``,
    ``@pytest.mark.unreplayable("…")``.
    """
    yield
    unwritable, unreplayable = (request.node.get_closest_marker(name) for name in ("unwritable", "unreplayable"))
    made = schedules_made.copy()
    try:
        for each in made:
            each.check(replays=REPLAY and not unreplayable)
    finally:
        schedules_made.clear()  # those of the replays too
    refused = [why for each in made for why in each.refused]
    if refused and not unwritable:
        pytest.fail(f"a recipe cannot be written, and the test does not say so by a mark: {refused[0]}")
