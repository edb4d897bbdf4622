"""Records of primitive calls for recipes, made before the call because paths and objects change later."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedule.core.matching import Match
from schedule.primitives.registry import registered
from schedule.recipes.describing import arguments_described
from schedule.util.globs import is_glob, select

if TYPE_CHECKING:
    from schedule.core.node import Tree


@dataclass(eq=False)
class Recorded:
    """Record of one call of a primitive.

    Attributes:
        primitive: its name.
        paths: the modules it was called on.
        at: the same modules in recipe form: one glob, or paths.
        arguments: as recipe values; :class:`~schedule.recipes.describing.Refused` for undescribable ones.
        rules: for ``optimize``, rule → the matches it rewrote, each rule in a separate step.
    """

    primitive: str
    paths: tuple[str, ...]
    at: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]
    rules: dict[str, list[Match]] = field(default_factory=dict)


def recorded(tree: Tree, primitive: str, paths: Sequence[str], glob: str, arguments: Mapping[str, Any]) -> Recorded:
    """Record a call of a primitive."""
    at = placed(tree, paths, glob)
    return Recorded(primitive, tuple(paths), at, arguments_described(_by_keyword(primitive, arguments)))


def _by_keyword(primitive: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    method = registered().get(primitive)
    found = dict(arguments)
    for name, parameter in inspect.signature(method).parameters.items() if method is not None else ():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) and name in found:
            found[name] = _POSITIONAL
    return found


class _Positional:
    """Value for positional-only arguments, undescribable by design."""


_POSITIONAL = _Positional()


def placed(tree: Tree, paths: Sequence[str], glob: str = "") -> tuple[str, ...]:
    """Return modules in recipe form: one glob for exactly these in this order, else their paths.

    Args:
        tree: of the model.
        paths: the modules.
        glob: the glob that selected them, if known. Otherwise, their paths with ``*`` for differing numbers are tried.
    """
    if len(paths) == 1 and not is_glob(glob):
        return tuple(paths)
    for candidate in (glob, common_glob(paths)):
        if is_glob(candidate) and selected(tree, candidate) == list(paths):
            return (candidate,)
    return tuple(paths)


def selected(tree: Tree, glob: str) -> list[str]:
    """Return the paths selected by a glob in a model."""
    return [tree.path_of(module) for module in select(tree.root, glob)]


def common_glob(paths: Sequence[str]) -> str:
    """Return the paths as one glob with ``*`` for differing numbers, or "" if they differ otherwise."""
    together = list(zip(*(path.split(".") for path in paths), strict=False))
    if len({path.count(".") for path in paths}) != 1:
        return ""
    parts = ["*" if len(set(each)) > 1 and all(p.isdigit() for p in each) else each[0] for each in together]
    if any(part != "*" and len(set(each)) > 1 for part, each in zip(parts, together, strict=True)):
        return ""
    return ".".join(parts)
