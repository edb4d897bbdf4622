"""``replay`` and ``load_recipe``: apply recipes to another model."""

from __future__ import annotations

import os
from typing import Any, overload

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.recipes.recipe import Recipe
from schedule.recipes.recipe_files import read_recipe
from schedule.recipes.replaying import replay_on
from schedule.recipes.trust import Trust, refuse_untrusted
from schedule.util.arguments import keywords_checked
from schedule.util.errors import RecipeError


@keywords_checked(example_inputs="batch")
def replay(
    model: nn.Module | Schedule, recipe: Recipe | str | os.PathLike[str], batch: Any = None, *, trust: Trust = ()
) -> Schedule:
    """Apply the steps of ``recipe`` to another model.

    It may be a new instance, have more layers, or come from another release.

    ::

        recipe = sch.recipe()
        sch = schedule.replay(other, recipe)       # same steps, same history, same results

    Replaying imports and calls what is in ``recipe.references``. A recipe that was read from JSON may name functions of
    ``fused`` and ``torch.nn`` and modules of ``torch.nn``, ``fused`` and ``schedule``, and what you trust.

    Args:
        model: a model, or a schedule of it; a recipe with sharding requires a schedule with a mesh.
        recipe: from :meth:`Schedule.recipe` or :meth:`Recipe.load`; or its file, a folder that has one, or its
            JSON text.
        batch: as for :func:`create_schedule`; ignored if ``model`` is a schedule.
        trust: what else a recipe that was read may name: packages, modules, or names as ``recipe.references`` has them;
            True for everything.

    Raises:
        RecipeError: it names what is not trusted; or the recipe is for another architecture, or a step has a different
            result. The message names the step and the nearest match. The model is left unchanged.
    """
    if isinstance(model, (str, os.PathLike, Recipe)):
        raise RecipeError("the model comes before the recipe", asked="replay", fix="replay(model, recipe)")
    if isinstance(recipe, str) and recipe.lstrip().startswith("{"):
        recipe = Recipe.from_json(recipe)
    elif isinstance(recipe, (str, os.PathLike)):
        recipe = read_recipe(recipe)
    if not isinstance(recipe, Recipe):
        fix = 'replay(model, recipe), or a file: replay(model, "r.json")'
        raise RecipeError(f"a recipe is no {type(recipe).__name__}", asked="replay", fix=fix)
    refuse_untrusted(recipe, trust)
    sch = model.root if isinstance(model, Schedule) else create_schedule(model, batch)
    replay_on(sch, recipe)
    return sch


@overload
def load_recipe(folder: str | os.PathLike[str], model: None = None, *, trust: Trust = ()) -> Recipe: ...
@overload
def load_recipe(folder: str | os.PathLike[str], model: nn.Module | Schedule, *, trust: Trust = ()) -> Schedule: ...


def load_recipe(
    folder: str | os.PathLike[str], model: nn.Module | Schedule | None = None, *, trust: Trust = ()
) -> Recipe | Schedule:
    """Read a recipe saved with :func:`save_recipe`, and replay it on ``model`` if given.

    ::

        model = AutoModelForCausalLM.from_pretrained(folder)
        sch = schedule.load_recipe(folder, model)

    Args:
        folder: the folder with the recipe file, or the file itself.
        model: as for :func:`schedule.replay`.
        trust: as for :func:`schedule.replay`.

    Returns:
        the schedule of ``model``; without a model, the recipe.

    Raises:
        RecipeError: there is no such file, it is not a recipe, or it does not fit the model.
    """
    if isinstance(folder, (nn.Module, Schedule)):
        raise RecipeError("the folder comes before the model", asked="load_recipe", fix="load_recipe(folder, model)")
    recipe = read_recipe(folder)
    return recipe if model is None else replay(model, recipe, trust=trust)
