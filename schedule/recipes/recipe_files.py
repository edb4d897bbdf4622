"""Recipe files in the folders of saved models."""

from __future__ import annotations

import os
from pathlib import Path

from schedule.core.node import Node
from schedule.recipes.building import recipe_of
from schedule.recipes.recipe import Recipe
from schedule.util.arguments import keywords_checked
from schedule.util.errors import RecipeError

NAME = "schedule_recipe.json"


@keywords_checked()
def save_recipe(sch: Node, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe of ``sch`` to the folder of ``model.save_pretrained`` and return the file's path.

    The file is written atomically.

    Raises:
        RecipeError: an argument has no recipe value; or the folder cannot be written to.
    """
    if not isinstance(sch, Node):
        raise RecipeError(f"a {type(sch).__name__} has no recipe", fix="save_recipe(sch, folder)")
    return recipe_of(sch.tree).save(Path(folder) / NAME)


def read_recipe(folder: str | os.PathLike[str]) -> Recipe:
    """Read a recipe from a file, or from a folder that :func:`save_recipe` wrote to.

    Raises:
        RecipeError: there is no such file, or it is not a recipe.
    """
    path = Path(folder)
    return Recipe.load(path / NAME if path.is_dir() else path)
