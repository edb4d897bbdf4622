"""``match`` statements as tests of one ``if`` after another, whose reads are calls of an evaluator's methods.

::

    match m.size:                      __here_1__ = here.attr(m, "size")
        case (2 | 3 as n, *_) if n:    if (__here_2__ := here.sequence_parts(__here_1__, 1, 1)) is not None and …:
            …                              …

A pattern becomes an expression that is true if it matches. Names are bound after the whole pattern has matched, and
before its guard is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from schedule.capture.tracing.reading.nodes import NodeMaker


class MatchPatterns(NodeMaker):
    """Part of the instrumentation for ``match`` statements."""

    def visit_Match(self, node: ast.Match) -> list[ast.stmt]:
        subject = self._local()
        made: list[ast.stmt] = [self._stored(subject, self.visit(node.subject), node)]
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            captures: dict[str, str] = {}
            tests = [self._pattern(case.pattern, self._loaded(subject, case.pattern), captures)]
            if captures:
                tests.append(self._bound(captures, case.pattern))
            if case.guard:
                tests.append(self._truth(self.visit(case.guard)))
            body = list(self._statements(case.body))
            chain = [ast.copy_location(ast.If(_all(tests), body, chain), case.pattern)]
        return [*made, *chain]

    def _bound(self, captures: dict[str, str], at: Any) -> ast.expr:
        """Return an expression that binds names to what a pattern has captured, and is true."""
        values = {name: self._written_to(name, self._loaded(local, at), at) for name, local in captures.items()}
        bound = [ast.NamedExpr(ast.Name(name, ast.Store()), value) for name, value in values.items()]
        return ast.copy_location(ast.Tuple(list(bound), ast.Load()), at)

    def _pattern(self, node: Any, subject: ast.expr, captures: dict[str, str]) -> ast.expr:
        """Return an expression that is true if ``subject``, which has no effects, matches the pattern ``node``."""
        kind = type(node)
        if kind is ast.MatchValue:
            return self._truth(self._here("eq", node, subject, self.visit(node.value)))
        if kind is ast.MatchSingleton:
            return self._here("is_singleton", node, subject, ast.Constant(node.value))
        if kind is ast.MatchOr:
            return ast.copy_location(
                ast.BoolOp(ast.Or(), [self._pattern(each, subject, captures) for each in node.patterns]), node
            )
        if kind is ast.MatchAs or kind is ast.MatchStar:
            inner = getattr(node, "pattern", None)
            tests = [] if inner is None else [self._pattern(inner, subject, captures)]
            return _all([*tests, *self._captured(node.name, subject, captures, node)], node)
        if kind is ast.MatchSequence:
            star = next((i for i, each in enumerate(node.patterns) if isinstance(each, ast.MatchStar)), None)
            sizes = [ast.Constant(len(node.patterns) - (star is not None)), ast.Constant(star)]
            return self._parts("sequence_parts", node, [subject, *sizes], node.patterns, captures)
        if kind is ast.MatchMapping:
            keys = ast.copy_location(ast.Tuple([self._hashed(self.visit(k)) for k in node.keys], ast.Load()), node)
            rest = [ast.copy_location(ast.MatchStar(node.rest), node)] if node.rest else []
            given = [subject, keys, ast.Constant(bool(rest))]
            return self._parts("mapping_parts", node, given, [*node.patterns, *rest], captures)
        if kind is ast.MatchClass:
            given = [subject, self.visit(node.cls), ast.Constant(len(node.patterns))]
            given.append(self._constant(tuple(node.kwd_attrs)))
            return self._parts("class_parts", node, given, [*node.patterns, *node.kwd_patterns], captures)
        refused: ast.expr = self._refuse(node)
        return refused

    def _captured(self, name: str | None, value: ast.expr, captures: dict[str, str], at: Any) -> list[ast.expr]:
        """Return the test, always true, that captures ``value`` in a local; none for a wildcard."""
        if name is None:
            return []
        local = captures[name] if name in captures else captures.setdefault(name, self._local())
        captured = ast.NamedExpr(ast.Name(local, ast.Store()), value)
        return [ast.copy_location(ast.Tuple([captured], ast.Load()), at)]

    def _parts(
        self, method: str, node: Any, given: list[ast.expr], patterns: Sequence[ast.pattern], captures: dict[str, str]
    ) -> ast.expr:
        """Return a test of the parts that ``method`` finds, one for each of ``patterns``, or None."""
        parts = self._local()
        found = ast.NamedExpr(ast.Name(parts, ast.Store()), self._here(method, node, *given))
        tests: list[ast.expr] = [ast.Compare(found, [ast.IsNot()], [ast.Constant(None)])]
        for index, each in enumerate(patterns):
            part = ast.Subscript(self._loaded(parts, each), ast.Constant(index), ast.Load())
            tests.append(self._pattern(each, ast.copy_location(part, each), captures))
        return _all(tests, node)


def _all(tests: list[ast.expr], at: Any = None) -> ast.expr:
    """Return the conjunction of ``tests``, at the location of ``at`` or of the first one."""
    if len(tests) > 1:
        return ast.copy_location(ast.BoolOp(ast.And(), tests), at or tests[0])
    return tests[0] if tests else ast.copy_location(ast.Constant(True), at)
