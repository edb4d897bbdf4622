"""Recipes beside models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from schedule.errors import RecipeError
from schedule.recipes.building import recipe_of
from schedule.recipes.recipe import Recipe
from schedule.recipes.replaying import replay

if TYPE_CHECKING:
    from schedule.node import Node
    from schedule.tree import Schedule

NAME = "schedule_recipe.json"


def save_recipe(sch: Node, folder: str | os.PathLike[str]) -> Path:
    """Write the recipe of ``sch`` into the folder that ``model.save_pretrained`` wrote; returns the file's path.

    The file is there as a whole or not at all.

    Raises:
        RecipeError: something in it cannot be written down; or the folder cannot be written to.
    """
    text, path = recipe_of(sch.tree).to_json(), Path(folder) / NAME
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}", fix="give a folder to write to") from error
    return path


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
    path = Path(folder)
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", fix=f"give a folder with {NAME}") from error
    recipe = Recipe.from_json(text.decode(errors="replace"))
    if model is not None:
        replay(model, recipe)
    return recipe
