"""Names in code: those it looks up or stores globally, and those it binds."""

from __future__ import annotations

import ast
import dis
import types


def loaded_globally(code: types.CodeType) -> set[str]:
    """Return the names looked up in globals by ``code`` or by code defined in it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= loaded_globally(constant)
    return names


def stored_globally(code: types.CodeType) -> set[str]:
    """Return the names stored or deleted in globals by ``code`` or by code defined in it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= stored_globally(constant)
    return names


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


def assigned_names(target: ast.AST) -> set[str]:
    """Return the names assigned by an assignment to ``target``."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def assigns_names_only(target: ast.AST) -> bool:
    """Check whether ``target`` assigns to names alone, not to attributes or items."""
    return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(target))
