"""What a recipe that was read may name, unless its reader trusts more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from schedule.recipes.recipe import Recipe
from schedule.recipes.recipe_values import Reference
from schedule.util.errors import RecipeError

_FUNCTIONS = ("fused", "torch.nn", "torch.nn.functional")
"""Modules whose public functions compute with tensors, and do nothing else."""
_CLASSES = ("schedule.", "fused.", "torch.nn.")
"""Packages whose modules (``nn.Module``) may be made."""

Trust = bool | str | Sequence[str]
"""Packages, modules or names (``"package.module:name"``) that a recipe may refer to; True for all."""


def refuse_untrusted(recipe: Recipe, trust: Trust) -> None:
    """Raise RecipeError if ``recipe`` was read and names what is neither known nor trusted, before importing it."""
    names = untrusted(recipe, trust) if recipe.was_read else []
    if names:
        raise RecipeError(
            f"it comes from a file or text, and would import and call {', '.join(names)}",
            asked="replay the recipe",
            fix=f"trust={tuple(names)}, once you have read that code",
        )


def untrusted(recipe: Recipe, trust: Trust = ()) -> list[str]:
    """Return the references of ``recipe`` that are neither known nor trusted."""
    if trust is True:
        return []
    trusted = () if trust is False else (trust,) if isinstance(trust, str) else tuple(trust)
    return [name for name in recipe.references if not _is_trusted(name, trusted) and not _is_known(name)]


def _is_trusted(name: str, trusted: Sequence[str]) -> bool:
    module = name.partition(":")[0]
    return any(name == each or f"{module}.".startswith(f"{each}.") for each in trusted)


def _is_known(name: str) -> bool:
    """Check whether a reference is to a public function that computes, or to a class of modules, of known packages."""
    module, _, qualname = name.partition(":")
    if not f"{module}.".startswith(_CLASSES):
        return False
    try:
        found = Reference(name).live({})
    except RecipeError:
        return False
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    return module in _FUNCTIONS and not any(part.startswith("_") for part in qualname.split("."))
