"""Unification from one anchor: pattern nodes are bound to graph nodes along data edges, with backtracking."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Literal

from torch import fx

from schedule.patterns.compiling import Pattern
from schedule.patterns.constants import (
    congruent,
    describe,
    reads_dtype,
    same_constant,
    same_dims,
    same_kind_matters,
    same_swapped_dims,
)
from schedule.patterns.normalized_nodes import NormalGraph, OpNode, is_constant, operands
from schedule.patterns.pattern_nodes import CallNode, ChoiceNode, InputNode, ScalarNode
from schedule.patterns.plans import Failure, Option, Pair, Plan, Point, nested_pairs, other_kind, outwards

BUDGET = 20_000
"""Maximum number of comparisons for one anchor; beyond it the search stops and reports a near miss."""

SHARED = 16
"""Number of users beyond which a value, such as a mask, is assumed to be shared by many layers."""

PATTERN_ONLY = frozenset(("input", "scalar", "choice"))


class Unifier:
    """State of a search: bindings and their trail, the memo of feasible pairs, and the deepest failures.

    Attributes:
        binding: pattern node → graph node or constant.
        used: graph operation → the pattern operation it is bound to; one-to-one except for size reads.
        picks: choice → alternative taken.
        visited: the number of comparisons of a pattern operation with a graph node.
        failures: anchor → the deepest point it reached.
    """

    def __init__(self, normal: NormalGraph, pattern: Pattern) -> None:
        self.normal, self.pattern = normal, pattern
        self.binding: dict[OpNode, Any] = {}
        self.used: dict[OpNode, OpNode] = {}
        self.picks: dict[ChoiceNode, int] = {}
        self.visited = 0
        self.failures: dict[OpNode, Failure] = {}
        self._trail: list[tuple[dict[Any, Any], Any]] = []
        self._memo: dict[tuple[OpNode, OpNode], bool] = {}
        self._metadata: dict[OpNode, bool] = {}
        self._anchor: OpNode
        self._plans: dict[OpNode, Plan] = {
            n: Plan.of(n) for n in pattern.users if not isinstance(n, (InputNode, ScalarNode, ChoiceNode, CallNode))
        }

    def candidates(self, node: Any) -> list[OpNode] | None:
        """Return the graph nodes a pattern node may bind by its operation, or None if they are not restricted."""
        if isinstance(node, ChoiceNode):
            found: dict[OpNode, None] = {}
            for alternative in node.args["alternatives"]:
                some = self.candidates(alternative)
                if some is None:
                    return None
                found.update(dict.fromkeys(some))
            return sorted(found, key=lambda n: n.index)
        if isinstance(node, CallNode):
            return [n for n in self.normal.calls if self._is_call(node, n)]
        if not isinstance(node, OpNode) or isinstance(node, (InputNode, ScalarNode)):
            return None
        return self.normal.by_op.get(node.op, [])

    def is_metadata(self, value: OpNode) -> bool:
        """Check whether a graph node only reads sizes or computes with numbers, with a cache."""
        known = self._metadata.get(value)
        if known is None:
            known = self._metadata[value] = value.is_metadata
        return known

    # the search

    def solutions(self, anchor: OpNode, candidate: OpNode) -> Iterator[None]:
        """Yield once for each complete binding of ``anchor`` to ``candidate``, available in ``binding``."""
        self._undo(0)
        self._anchor = candidate
        limit = self.visited + BUDGET
        points = [Point(0, iter((Option(((anchor, candidate),)),)), [])]
        while points:
            point = points[-1]
            self._undo(point.mark)
            option = next(point.options, None)
            if option is None:
                points.pop()
                continue
            if self.visited > limit:
                self.record(candidate, lambda: f"an answer in {BUDGET} steps", lambda: "too many ways to match")
                return
            following = self._settle(option, list(point.waiting))
            if following is True:
                yield None
            elif following is not None:
                points.append(following)

    def _settle(self, option: Option, waiting: list[Pair]) -> Point | Literal[True] | None:
        """Take ``option`` and every step without a choice after it.

        Returns:
            None if a step fails, True if the binding is complete, else the next choice point.
        """
        agenda = list(option.pairs)
        if option.pick is not None:
            self._set(self.picks, *option.pick)
        while True:
            while agenda:
                pattern_value, value = agenda.pop()
                if not self._match(pattern_value, value, agenda, waiting):
                    return None
            if waiting:
                options = self._narrow(waiting)
                if len(options) > 1:
                    return Point(len(self._trail), iter(options), waiting)
                agenda.extend(options[0].pairs)
                if options[0].pick is not None:
                    self._set(self.picks, *options[0].pick)
                continue
            binding = self.binding
            unbound = [node for node in self.pattern.required if node not in binding]
            if not unbound:
                return True
            return Point(len(self._trail), self._upward(unbound), waiting)

    def _narrow(self, waiting: list[Pair]) -> list[Option]:
        """Remove a postponed choice with one option left, or else the last one, and return its options."""
        options: list[Option] = []
        for i in range(len(waiting) - 1, -1, -1):
            options = self._options(*waiting[i])
            if len(options) == 1:
                del waiting[i]
                return options
        options = self._options(*waiting.pop())
        return options

    def _options(self, node: OpNode, value: Any) -> list[Option]:
        """Return the options allowed by structure and bindings.

        If there are none, return the most similar one, so that its failure is recorded.
        """
        if isinstance(node, ChoiceNode):
            ways = [Option(((a, value),), (node, i)) for i, a in enumerate(node.args["alternatives"])]
        else:
            a, b = list(node.args.values())[:2]
            c, d = list(value.args.values())[:2]
            ways = [Option(((b, d), (a, c))), Option(((b, c), (a, d)))]
            if c is d or a is b:
                del ways[1]
        fitting = [way for way in ways if all(self._fits(p, v) for p, v in way.pairs)]
        return fitting or [max(ways, key=self._similarity)]

    def _similarity(self, way: Option) -> int:
        return sum(
            isinstance(p, OpNode) and isinstance(v, OpNode) and p.op == v.op and p.op != "choice" for p, v in way.pairs
        )

    def _fits(self, node: Any, value: Any) -> bool:
        if isinstance(node, OpNode) and node in self.binding:
            return congruent(self.binding[node], value)
        return self._feasible(node, value)

    # one pair

    def _match(self, node: Any, value: Any, agenda: list[Pair], waiting: list[Pair]) -> bool:
        if not isinstance(node, OpNode):
            return self._match_plain(node, value, agenda, waiting)
        bound = self.binding.get(node, self)
        if bound is not self:
            if congruent(bound, value):
                return True
            return self._fail(value, lambda: f"{describe(node)} to be {describe(bound)} again", value)
        if node.op not in PATTERN_ONLY:
            if type(value) is OpNode or not reads_dtype(node, value):
                return self._match_operation(node, value, agenda, waiting)
        elif isinstance(node, ChoiceNode):
            waiting.append((node, value))
        elif isinstance(node, (InputNode, ScalarNode)):
            reason = node.accepts(value)
            if reason:
                return self._fail(value, lambda: f"{reason} for {describe(node)}", value)
        self._set(self.binding, node, value)
        return True

    def _match_operation(self, node: OpNode, value: Any, agenda: list[Pair], waiting: list[Pair]) -> bool:
        self.visited += 1
        problem = self._mismatch(node, value)
        if problem:
            return self._fail(value, lambda: describe(node), value)
        if value in self.used and not self.is_metadata(value):
            return self._fail(value, lambda: f"{describe(node)} apart from {value.name}", value)
        binding, used, trail = self.binding, self.used, self._trail
        binding[node] = value
        trail.append((binding, node))
        if value not in used:
            used[value] = node
            trail.append((used, value))
        if isinstance(node, CallNode):
            given = self._call_arguments(value)
            return node.any_arguments or self._match_plain(tuple(node.args.values()), given, agenda, waiting)
        plan = self._plans[node]
        if plan.commutes:
            waiting.append((node, value))
        args = value.args
        for name, expected in plan.operands:
            agenda.append((expected, args[name]))
        if not plan.nested:
            return True
        return all(self._match_plain(expected, args[name], agenda, waiting) for name, expected in plan.nested)

    def _match_plain(self, expected: Any, value: Any, agenda: list[Pair], waiting: list[Pair]) -> bool:
        """Match a constant, or a nesting containing pattern nodes."""
        if is_constant(expected):
            return same_constant(expected, value) or self._fail(value, lambda: describe(expected), value)
        pairs = nested_pairs(expected, value)
        if pairs is None:
            return self._fail(value, lambda: describe(expected), value)
        agenda.extend(reversed(pairs))
        return True

    def _mismatch(self, node: OpNode, value: Any) -> bool:
        """Check whether operation or configuration differ, ignoring operands."""
        if not isinstance(value, OpNode):
            return True
        if isinstance(node, CallNode):
            return not self._is_call(node, value) or (
                not node.any_arguments and len(node.args) != len(self._call_arguments(value))
            )
        plan = self._plans[node]
        args = value.args
        if node.op != value.op or plan.names != args.keys():
            return True
        if node.definition is None and node.target is not value.target and node.target != value.target:
            return True
        for name, expected in plan.constants:
            found = args[name]
            if not same_constant(expected, found) or same_kind_matters(expected, found, value):
                return True
        for name, expected in plan.dims:
            if not same_dims(expected, args[name], value):
                return True
        if plan.swaps and not same_swapped_dims(node, value):
            return True
        return plan.commutes and (not value.commutes or other_kind(node, value))

    def _is_call(self, node: CallNode, value: OpNode) -> bool:
        call = value.fx
        return (
            call is not None
            and call.op == "call_module"
            and self.normal.of.get(call) is value
            and node.accepts(str(call.target), value.module)
        )

    def _call_arguments(self, value: OpNode) -> tuple[Any, ...]:
        call, of = value.fx, self.normal.of
        given = () if call is None else (*call.args, *call.kwargs.values())
        return tuple(of[a] if isinstance(a, fx.Node) else a for a in given)

    def _feasible(self, node: Any, value: Any) -> bool:
        """Check whether structure and configuration fit all the way down, ignoring bindings, with a cache."""
        if not isinstance(node, OpNode):
            if is_constant(node):
                return same_constant(node, value)
            pairs = nested_pairs(node, value)
            return pairs is not None and all(self._feasible(p, v) for p, v in pairs)
        if isinstance(node, (InputNode, ScalarNode)):
            return not node.accepts(value)
        if not isinstance(value, OpNode):
            if isinstance(node, ChoiceNode):
                return any(self._feasible(a, value) for a in node.args["alternatives"])
            return reads_dtype(node, value)
        known = self._memo.get((node, value))
        if known is None:
            known = self._memo[node, value] = self._feasible_below(node, value)
        return known

    def _feasible_below(self, node: OpNode, value: OpNode) -> bool:
        if isinstance(node, ChoiceNode):
            return any(self._feasible(a, value) for a in node.args["alternatives"])
        self.visited += 1
        if self._mismatch(node, value):
            return False
        if isinstance(node, CallNode):
            return True
        expected, found = list(node.args.values()), list(value.args.values())
        if node.commutes:
            (a, b), (c, d) = expected[:2], found[:2]
            straight = self._feasible(a, c) and self._feasible(b, d)
            if not straight and not (self._feasible(a, d) and self._feasible(b, c)):
                return False
            expected, found = expected[2:], found[2:]
        return all(self._feasible(p, v) for p, v in zip(expected, found, strict=True) if not is_constant(p))

    # the search upward

    def _upward(self, unbound: list[OpNode]) -> Iterator[Option]:
        """Yield the options for the first reachable unbound node, among the users of bound values."""
        costs: dict[OpNode, int | None] = {}  # the binding is the same whenever an option is taken
        for node in unbound:
            if self._cost(node, costs) is None:
                continue
            tried = False
            for value in self._ways(node, costs):
                tried = True
                yield Option(((node, value),))
            if not tried:
                self._no_user(node)
            return

    def _no_user(self, node: OpNode) -> None:
        """Record a failure: no user of the bound values matches ``node``."""
        bound = [self.binding.get(operand) for operand in operands(tuple(node.args.values()))]
        below = next((value for value in reversed(bound) if isinstance(value, OpNode)), self._anchor)
        users = self.normal.users_of(below)
        self.record(
            below,
            lambda: f"{describe(node)} to use it",
            lambda: ", ".join(describe(user) for user in users[:3]) or "no user",
        )

    def _cost(self, node: Any, known: dict[OpNode, int | None]) -> int | None:
        """Estimate the number of values from :meth:`_ways`, or return None if nothing bound lies below.

        Args:
            node: a pattern node or a constant.
            known: a cache of costs under the current binding.
        """
        if not isinstance(node, OpNode):
            return None
        if node in self.binding:
            bound = self.binding[node]
            return len(self.normal.users_of(bound)) if isinstance(bound, OpNode) else None
        if isinstance(node, (InputNode, ScalarNode)):
            return None
        if node not in known:
            costs = [self._cost(o, known) for o in operands(tuple(node.args.values()))]
            known[node] = min((c + 1 for c in costs if c is not None), default=None)
        return known[node]

    def _ways(self, node: Any, costs: dict[OpNode, int | None]) -> Iterator[OpNode]:
        """Yield the graph nodes that ``node`` may bind, found upward from bound values."""
        if node in self.binding:
            yield self.binding[node]
        elif isinstance(node, ChoiceNode):
            for alternative in node.args["alternatives"]:
                if self._cost(alternative, costs) is not None:
                    yield from self._ways(alternative, costs)
        else:
            below = operands(tuple(node.args.values()))
            reachable = [(cost, o) for o in below if (cost := self._cost(o, costs)) is not None]
            for value in self._ways(min(reachable, key=itemgetter(0))[1], costs):
                for user in self._nearest_users(value):
                    if self._is_call(node, user) if isinstance(node, CallNode) else user.op == node.op:
                        yield user

    def _nearest_users(self, value: OpNode) -> Iterator[OpNode]:
        """Return the users of ``value`` in graph order or, if there are many, nearest to the anchor first."""
        users = self.normal.users_of(value)
        if len(users) <= SHARED:
            return iter(users)
        return outwards(users, bisect_left(users, self._anchor.index, key=lambda u: u.index))

    # bookkeeping

    def _set(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        if key not in table:
            table[key] = value
            self._trail.append((table, key))

    def _undo(self, mark: int) -> None:
        trail = self._trail
        while len(trail) > mark:
            table, key = trail.pop()
            del table[key]

    def _fail(self, at: Any, expected: Callable[[], str], found: Any) -> bool:
        node = at if isinstance(at, OpNode) else next(reversed(self.used), self._anchor)
        self.record(node, expected, lambda: describe(found))
        return False

    def record(self, node: OpNode, expected: Callable[[], str], found: Callable[[], str]) -> None:
        """Record a failure at ``node`` if it is deeper than the previous one of this anchor."""
        depth = len(self.used)
        best = self.failures.get(self._anchor)
        if best is None or depth > best.matched:
            self.failures[self._anchor] = Failure(depth, node, expected, found)
