"""Nodes of a syntax tree that call an evaluator's methods."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from typing import Any

HERE = "__here__"


class NoSource(Exception):
    """Error for a function without readable source, or with syntax not supported by the instrumentation."""


def _line(node: Any) -> int:
    """Return the line number of a frame while it computes ``node``: for ``x.view(…)``, the line of ``view``."""
    named = node.func if isinstance(node, ast.Call) else node
    line: int = (named.end_lineno if isinstance(named, ast.Attribute) else None) or node.lineno
    return line


class NodeMaker(ast.NodeTransformer):
    """Part of the instrumentation that makes nodes.

    Args:
        written: names of outside variables that the code may bind.
    """

    def __init__(self, written: Collection[str]) -> None:
        self._written = written
        self._count = 0

    def _here(self, method: str, at: Any, *arguments: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
        def located(node: Any) -> Any:
            return ast.copy_location(node, at)

        function = located(ast.Attribute(located(ast.Name(HERE, ast.Load())), method, ast.Load()))
        function.lineno = function.end_lineno = _line(at)
        function.end_col_offset = function.col_offset
        filled = [located(each) if isinstance(each, ast.Constant) else each for each in arguments]
        return located(ast.Call(function, filled, list(keywords)))

    def _statement(self, method: str, at: Any, *arguments: ast.expr) -> ast.stmt:
        return ast.copy_location(ast.Expr(self._here(method, at, *arguments)), at)

    @staticmethod
    def _constant(value: Any) -> ast.expr:
        return ast.Constant(value)

    @staticmethod
    def _loaded(name: str, at: Any) -> ast.expr:
        return ast.copy_location(ast.Name(name, ast.Load()), at)

    @staticmethod
    def _stored(name: str, value: ast.expr, at: Any) -> ast.stmt:
        """Return ``name = value``, for a local."""
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), at)

    def _local(self) -> str:
        self._count += 1
        return f"__here_{self._count}__"

    def _truth(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, ast.Constant) else self._here("truth", node, node)

    def _hashed(self, node: ast.expr) -> ast.expr:
        return node if isinstance(node, (ast.Constant, ast.Starred)) else self._here("key", node, node)

    def _written_to(self, name: str, value: ast.expr, at: Any) -> ast.expr:
        """Return ``value`` to be bound to ``name``, refused at run time for an outside variable."""
        return self._here("write_name", at, ast.Constant(name), value) if name in self._written else value

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            made = self.visit(statement)
            yield from made if isinstance(made, list) else [made]

    def _refuse(self, node: Any) -> Any:
        raise NoSource(f"line {node.lineno} holds a {type(node).__name__}")


def at_attribute(attribute: ast.Attribute, node: ast.expr | None = None) -> ast.expr:
    """Return a node at Python's location of an attribute read or call: the line of its name."""
    whole = node or attribute
    if attribute.lineno == attribute.end_lineno:
        return whole
    at = ast.Constant(None)
    ast.copy_location(at, whole)
    at.lineno, at.col_offset = attribute.end_lineno or attribute.lineno, attribute.end_col_offset or 0
    at.end_lineno = max(at.lineno, whole.end_lineno or at.lineno)
    at.end_col_offset = whole.end_col_offset
    if at.end_lineno == at.lineno:
        at.end_col_offset = max(whole.end_col_offset or 0, at.col_offset)
    return at
