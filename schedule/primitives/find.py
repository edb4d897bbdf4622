"""``find`` and ``find_parallel``: the matches of a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedule.core.matching import Match, find_in, find_parallel_in
from schedule.primitives.registry import query

if TYPE_CHECKING:
    from schedule.core.node import Node


@query
def find(sch: Node, pattern: Any, expect: int | None = None, closed: bool = True) -> list[Match]:
    """Return all matches of ``pattern`` in this module's graph, the larger of overlapping ones.

    Changes nothing.

    The module is traced if necessary. Small leaf modules are matched by the operations they compute, so the pattern ::

        def bias_gelu(x, bias):
            return F.gelu(x + bias, approximate="tanh")

    is found in ``y = self.act(self.c_fc(x))`` too. Other submodules have separate graphs: use a glob to search
    many.

    Args:
        pattern: a function, a module, a module type, a regular expression for the path of a called module, a
            compiled pattern, or the name of a registered rule.
        expect: required number of matches.
        closed: leave out matches whose inner values are used outside, or whose inputs depend on their outputs. No
            primitive replaces these; False finds them too, to look at.

    Raises:
        TraceError: the module cannot be traced.
        MatchError: not as many as expected; gives the best near miss: the node, and what was expected and found.
        NotApplicable: the module is inlined in another module's graph.
    """
    return find_in([sch], pattern, expect, closed)


@query
def find_parallel(sch: Node, pattern: Any, expect: int | None = None) -> list[list[Match]]:
    """Return groups of matches with a shared input, such as the Q, K and V projections of an attention.

    ::

        q = F.linear(x, self.q.weight)
        k = F.linear(x, self.k.weight)     →  [[match of q, match of k, match of v]]
        v = F.linear(x, self.v.weight)

    Args:
        pattern: as for :meth:`find`.
        expect: required number of groups.

    Raises:
        MatchError: not as many groups as expected.
    """
    return find_parallel_in([sch], pattern, expect)
