"""Functions as they are written, lambdas too: what a proof compares."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def listing(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """The lines of ``functions``: what they share once, then each with the constants that it was made with."""
    shared: dict[str, None] = {}
    own = [_written(function, shared) for function in functions]
    return "\n".join([*shared, *own]).splitlines()


def _written(function: Callable[..., Any], shared: dict[str, None]) -> str:
    if isinstance(function, nn.Module):
        return f"nn.{function!r}"
    if isinstance(function, functools.partial):
        given = ", ".join(_written(each, shared) for each in function.args)
        return f"{_written(function.func, shared)}  # of {given}"
    if not hasattr(function, "__code__") or function.__module__.startswith("torch."):
        return function.__name__
    held = ", ".join(_held(function, shared))
    return _source(function.__code__) + (f"  # {held}" if held else "")


def _held(function: Callable[..., Any], shared: dict[str, None]) -> Iterator[str]:
    """``name = value`` for what ``function`` was made with; a function among it goes to ``shared``."""
    for name, value in inspect.getclosurevars(function).nonlocals.items():
        if isinstance(value, tuple) and value and callable(value[0]):
            yield f"{name}[0] = {_written(value[0], shared)}"
        elif isinstance(value, FunctionType) and _is_ours(value):
            shared[_source(value.__code__)] = None
            yield from _held(value, shared)
        elif callable(value) and not isinstance(value, type):
            yield f"{name} = {_written(value, shared)}"
        else:
            yield f"{name} = {value!r}"


def _is_ours(function: FunctionType) -> bool:
    return function.__name__ != "<lambda>" and not function.__module__.startswith("torch.")


def _source(code: CodeType) -> str:
    own = [node for node in _functions(code.co_filename) if _line(node) == code.co_firstlineno]
    fitting = [node for node in own if isinstance(node, ast.FunctionDef) or _same(node, code)]
    if not fitting:
        return code.co_name
    node = fitting[0]
    if isinstance(node, ast.FunctionDef):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        node = ast.FunctionDef(node.name, node.args, body, [], None, lineno=node.lineno)
    return ast.unparse(ast.fix_missing_locations(node))


def _line(node: ast.FunctionDef | ast.Lambda) -> int:
    decorators = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else node.lineno


@functools.cache
def _functions(path: str) -> tuple[ast.FunctionDef | ast.Lambda, ...]:
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)))


def _same(node: ast.Lambda, code: CodeType) -> bool:
    """Whether ``node`` is the lambda of ``code``, of the several on its line: they begin at other columns."""
    columns = {position[2] for position in code.co_positions() if position[0] == node.body.lineno}
    return node.body.col_offset in columns
