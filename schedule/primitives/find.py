"""``find``: where a pattern occurs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedule.core.matching import Match, find_in, find_parallel_in
from schedule.primitives.registry import query

if TYPE_CHECKING:
    from schedule.core.node import Node


@query
def find(sch: Node, pattern: Any, expect: int | None = None) -> list[Match]:
    """Every place in this module's graph where ``pattern`` occurs, the larger of overlapping ones.

    Changes nothing.

    The module is traced if need be. Small leaf modules match what they compute, so the pattern ::

        def bias_gelu(x, bias):
            return F.gelu(x + bias, approximate="tanh")

    is found in ``y = self.act(self.c_fc(x))`` too. Submodules have graphs of their own: use a glob to search
    many.

    Args:
        pattern: a function, a module, a module type, a regular expression for the path of a called module, a
            compiled pattern, or the name of a registered rule.
        expect: how many there must be.

    Raises:
        TraceError: the module cannot be traced.
        MatchError: not as many as expected; with the best near miss: which node, what was expected and found.
        NotApplicable: the module's inside is in the middle of another's graph.
    """
    return find_in([sch], pattern, expect)


@query
def find_parallel(sch: Node, pattern: Any, expect: int | None = None) -> list[list[Match]]:
    """Matches of ``pattern`` that read one value, in groups: the Q, K and V projections of an attention.

    ::

        q = F.linear(x, self.q.weight)
        k = F.linear(x, self.k.weight)     →  [[match of q, match of k, match of v]]
        v = F.linear(x, self.v.weight)

    Args:
        pattern: as for :meth:`find`.
        expect: how many groups there must be.

    Raises:
        MatchError: not as many groups as expected.
    """
    return find_parallel_in([sch], pattern, expect)
