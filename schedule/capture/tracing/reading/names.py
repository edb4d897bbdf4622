"""Names in code: those it looks up or stores globally, and those it binds."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Collection


def loaded_globally(code: types.CodeType) -> set[str]:
    """Return the names looked up in globals by ``code`` or by code defined in it."""
    return _names_of(code, ("LOAD_GLOBAL", "LOAD_NAME"))


def stored_globally(code: types.CodeType) -> set[str]:
    """Return the names stored or deleted in globals by ``code`` or by code defined in it."""
    return _names_of(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


def _names_of(code: types.CodeType, instructions: Collection[str]) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names.union(*(_names_of(each, instructions) for each in inner))


def bound_names(tree: ast.AST) -> set[str]:
    """Return the names bound anywhere in ``tree``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not tree:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def assigns_names_only(target: ast.AST) -> bool:
    """Check whether ``target`` assigns to names alone, not to attributes or items."""
    return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(target))


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Check whether a handler of a ``try`` statement raises an exception in the end."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and not any(isinstance(each, ast.Return) for each in ast.walk(handler))
