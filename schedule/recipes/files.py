"""Recipe files in the folders of saved models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fused.whole_files import write_whole
from schedule.recipes.building import recipe_of
from schedule.recipes.recipe import Recipe
from schedule.util.errors import RecipeError

if TYPE_CHECKING:
    from schedule.core.node import Node

NAME = "schedule_recipe.json"


def save_recipe(sch: Node, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe of ``sch`` to the folder of ``model.save_pretrained`` and return the file's path.

    The file is written atomically.

    Raises:
        RecipeError: an argument has no recipe value; or the folder cannot be written to.
    """
    text, path = recipe_of(sch.tree).to_json(), Path(folder) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}", fix="give a folder to write to") from error
    return path


def read_recipe(folder: str | os.PathLike[str]) -> Recipe:
    """Read a recipe written by :func:`save_recipe`, for :func:`schedule.load_recipe`.

    Raises:
        RecipeError: there is no such file, or it is not a recipe.
    """
    path = Path(folder)
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", fix=f"give a folder with {NAME}") from error
    return Recipe.from_json(text.decode(errors="replace"))
