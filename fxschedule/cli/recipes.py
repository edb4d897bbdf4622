"""Recipes on the command line: reading them from a file to use instead of rules, and writing them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fxschedule.cli.output import Code, CommandError
from schedule.api.replay import load_recipe, replay
from schedule.api.schedule import Schedule
from schedule.recipes.recipe import Recipe
from schedule.recipes.trust import untrusted
from schedule.report.comparing import costs_since, ratio_since
from schedule.report.entries import Entry
from schedule.report.report import Report
from schedule.util.errors import RecipeError
from schedule.util.files import write


def read(path: Path, trusted: bool) -> Recipe:
    """Read the recipe in ``path`` without running any of it.

    Raises:
        CommandError: it cannot be read, is not a recipe, or refers to untrusted third-party code.
    """
    try:
        recipe = load_recipe(path)
    except RecipeError as error:
        raise CommandError(error.why, Code.USAGE, fix=error.fix, where=error.where) from error
    foreign = untrusted(recipe, trusted)
    if foreign:
        raise CommandError(
            f"the recipe {path} would import and call {', '.join(foreign)}",
            Code.USAGE,
            fix="--trust-remote-code, once you have read that code",
        )
    return recipe


def replayed(sch: Schedule, recipe: Recipe) -> Report:
    """Replay ``recipe``, and return a report of its steps.

    Raises:
        RecipeError: the recipe does not fit the model.
    """
    before = len(sch.history)
    replay(sch, recipe, trust=True)  # as `read` has checked
    entries = [
        Entry(step.description.partition(" on ")[0], path, "applied", matches)
        for step in sch.history[before:]
        for path, matches in step.touched.items()
    ]
    batch = sch.tree.graphs.batch
    costs, ratio = (partial(since, sch, batch, before) for since in (costs_since, ratio_since))
    return Report(entries, sch.module, costs, ratio, sch)  # type: ignore[arg-type]


def save(sch: Schedule, path: Path) -> None:
    """Write the recipe of ``sch`` to ``path``, as JSON or as a script.

    Raises:
        RecipeError: an argument of a step cannot be serialized.
    """
    recipe = sch.recipe()
    write(path, recipe.to_python() if path.suffix == ".py" else recipe.to_json())
