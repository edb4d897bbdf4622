"""Conversion of a recipe to a Python module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schedule.primitives.registry import registered
from schedule.recipes.recipe_values import source
from schedule.recipes.steps import Call, Find, Step
from schedule.util.globs import is_glob


def script(architecture: str, steps: Sequence[Step], made_with: Mapping[str, str]) -> str:
    """Return the source of a Python module with a function ``apply(sch)`` for the steps of a recipe.

    Args:
        architecture: of the recipe, like the other arguments.
    """
    modules: set[str] = {_module_of(step) for step in steps if isinstance(step, Call)}
    lines = [line for step in steps for line in _lines(step, modules)] or ["pass"]
    made = ", ".join(f"{name} {version}" for name, version in made_with.items())
    title = f"A schedule for {architecture or 'any model'}" + (f", recorded with {made}" if made else "")
    imports = sorted({"schedule", *modules} - {""})
    return "\n".join(
        [
            f'"""{_plain(title)}."""',
            "",
            *(f"import {module}" for module in imports),
            "",
            "",
            "def apply(sch: schedule.Schedule) -> None:",
            '    """Do what was recorded to the model of ``sch``."""',
            *(f"    {line}" for line in lines),
            "",
        ]
    )


def _plain(text: str) -> str:
    """Remove quotes, backslashes and unprintable characters, for use in a docstring."""
    return "".join(char for char in text if char.isprintable() and char not in '"\\')


def _module_of(step: Call) -> str:
    """Return the module to import for a user's primitive, or "" for others."""
    module = getattr(registered().get(step.primitive), "__module__", None) or ""
    return "" if module.startswith("schedule.") or module == "__main__" else module


def _lines(step: Step, modules: set[str]) -> list[str]:
    if isinstance(step, Find):
        node = _node(step.at)
        pattern = source(step.pattern, modules)
        return [f"{step.name} = {node}.find({pattern}, expect={_expected(step, node)})"]
    if isinstance(step, Call):
        given = [f"{name}={source(value, modules)}" for name, value in step.arguments]
        if step.primitive == "optimize":
            return [f"schedule.optimize({', '.join([_node(step.at), *given])})"]
        return [f"{_node(step.at)}.{step.primitive}({', '.join(given)})"]
    return ["sch.undo()"] * step.times


def _expected(step: Find, node: str) -> str:
    if isinstance(step.counts, tuple):
        return str(sum(step.counts))
    if not is_glob(step.at[0]):
        return str(step.counts * len(step.at))
    return f"len({node})" if step.counts == 1 else f"{step.counts} * len({node})"


def _node(at: Sequence[str]) -> str:
    if len(at) > 1:
        return f"schedule.Group([{', '.join(_node([path]) for path in at)}], {', '.join(at)!r})"
    return f"sch[{at[0]!r}]" if at[0] else "sch"
