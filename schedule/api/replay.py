"""``replay`` and ``load_recipe``: recipes done again, on another model."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.recipes.files import read_recipe
from schedule.recipes.recipe import Recipe
from schedule.recipes.replaying import replay_on


def replay(model: nn.Module | Schedule, recipe: Recipe, example_inputs: Any = None) -> Schedule:
    """Do what ``recipe`` says to another model: a new instance, one with more layers, one of another release.

    ::

        recipe = sch.recipe()
        sch = schedule.replay(other, recipe)       # same steps, same history, same results

    Calls the functions that the recipe refers to (``recipe.references``): replay what you trust.

    Args:
        model: a model, or a schedule of it, which has a mesh if the recipe shards.
        recipe: from :meth:`Schedule.recipe` or :meth:`Recipe.from_json`.
        example_inputs: of a model, as for :func:`create_schedule`.

    Raises:
        RecipeError: the recipe is for another architecture, or a step does not go as it went: says which, and what
            comes nearest. The model is as it was then.
    """
    sch = model.root if isinstance(model, Schedule) else create_schedule(model, example_inputs)
    replay_on(sch, recipe)
    return sch


def load_recipe(folder: str | os.PathLike[str], model: nn.Module | Schedule | None = None) -> Recipe:
    """Read what :func:`save_recipe` wrote, and replay it on ``model`` if one is given.

    ::

        model = AutoModelForCausalLM.from_pretrained(folder)
        schedule.load_recipe(folder, model)

    Args:
        folder: with the file, or the file itself.
        model: as for :func:`schedule.replay`.

    Raises:
        RecipeError: there is no such file, it is no recipe, or it does not fit the model.
    """
    recipe = read_recipe(folder)
    if model is not None:
        replay(model, recipe)
    return recipe
