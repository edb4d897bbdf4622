"""Rewrites as data, applied to given matches and to graphs made later."""

from __future__ import annotations

import operator
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from schedule.capture import Recording, Specialization, TensorSpec, expand
from schedule.core.adapting import Adapter, Rewrite, Rewritten, Unrepeatable, adapter_for
from schedule.core.matching import Search, Site, Wanted, parallel, sites_in
from schedule.core.node import Node
from schedule.patterns import GraphMatch
from schedule.patterns.rewriting import Build
from schedule.primitives.splicing import MatchGroup, rewritten, splice_in
from schedule.rules import Rule
from schedule.rules.applying import find_all
from schedule.rules.rule import spec_of
from schedule.rules.rule_registry import RULES
from schedule.util.errors import NotApplicable

Item = tuple[Any, Sequence[Site]]
Replacement = tuple[GraphMatch, Build]
"""The match to replace, perhaps with other inputs, and what inserts the replacement."""


@dataclass(frozen=True)
class ByRules:
    """Rewrite of all matches of some rules.

    Deep copies are the same object, pickles contain the rules' names.

    Attributes:
        rules: in order of preference.
        settled: families applied in the module already, exempt from the cost guard.
        cost_guard: whether matches of other families that are not profitable are left alone.
    """

    rules: tuple[Rule, ...]
    settled: frozenset[str]
    cost_guard: bool

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Rewrite one graph like ``optimize``."""
        expansion = expand(made, module, recording)
        modules = dict(module.named_modules(remove_duplicate=False))
        chosen = find_all(expansion.graph, self.rules, modules, self.cost_guard, self.settled).chosen
        items: list[Item] = [(rule, [Site(made, graph_match, expansion.origin)]) for rule, graph_match in chosen]
        if not items:
            return made, {}

        def prepare(rule: Rule, graph_match: GraphMatch) -> Replacement:
            graph_match, build = rule.prepared(graph_match, module)
            return graph_match, build if made.autocast is None else as_wide(graph_match, build)

        return rewritten(made, module, recording, items, prepare, "optimize"), Counter(rule.name for rule, _ in chosen)

    def __deepcopy__(self, memo: dict[int, Any]) -> ByRules:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        names = tuple(rule.name for rule in self.rules)
        if all(RULES.get(rule.name) is rule for rule in self.rules):
            return _by_registered_rules, (names, self.settled, self.cost_guard)
        return Unrepeatable, ("it was rewritten by a rule that is not registered, and pickled since",)


def _by_registered_rules(names: tuple[str, ...], settled: frozenset[str], cost_guard: bool) -> Rewrite:
    missing = [name for name in names if name not in RULES]
    if missing:
        return Unrepeatable(f"the rule {missing[0]!r} is not registered in this process")
    return ByRules(tuple(RULES[name] for name in names), settled, cost_guard)


def as_wide(graph_match: GraphMatch, build: Build) -> Build:
    """Wrap ``build`` to cast its result to the recorded dtype.

    On CUDA, autocast computes softmax and powers in fp32, so the matched operations may return a wider dtype.
    """
    x, out = spec_of(graph_match.inputs.get("x")), spec_of(graph_match.outputs[0])
    if x is None or out is None or x.dtype == out.dtype or len(graph_match.outputs) > 1:
        return build
    dtype = out.dtype

    def cast(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        made = build(graph, inputs, scalars)
        made.meta["spec"] = TensorSpec(out.shape, dtype, out.device)
        return graph.call_method("to", (made, dtype))

    return cast


# -- patterns ------------------------------------------------------------------------------------------------


class PatternRewrite(ABC):
    """Replacement of the matches of a pattern. Copies as it is, pickles by the argument of ``find``.

    Args:
        wanted: the pattern.
        sizes: how many parallel matches become one call; ``{1}`` where each becomes its own.
        node_name: name of the nodes of the calls; if "", they are named after their functions.
    """

    def __init__(self, wanted: Wanted, sizes: Collection[int] = (1,), node_name: str = "") -> None:
        self.wanted, self.sizes, self.node_name = wanted, frozenset(sizes), node_name

    @property
    def name(self) -> str:
        """Name of the pattern."""
        return self.wanted.name

    @abstractmethod
    def replacement(self, graph_match: GraphMatch, module: nn.Module) -> Replacement:
        """Return the match to replace in a graph of ``module``, and the build function."""

    @abstractmethod
    def settings(self) -> tuple[Any, ...]:
        """Return the arguments of the class besides the pattern."""

    def named_replacement(self, graph_match: GraphMatch, module: nn.Module) -> Replacement:
        """Return the same as ``replacement``, with the name of the node."""
        found, build = self.replacement(graph_match, module)
        return found, _naming(build, self.node_name) if self.node_name else build

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Find the pattern in this graph and replace it."""
        sites, _ = sites_in(made, module, recording, self.wanted)
        groups = [[site] for site in sites] if self.sizes == {1} else parallel(sites)
        items: list[Item] = [(None, group) for group in groups if len(group) in self.sizes]
        if not items:
            return made, {}

        def prepare(_: Any, graph_match: GraphMatch) -> Replacement:
            return self.named_replacement(graph_match, module)

        return rewritten(made, module, recording, items, prepare, self.name), {self.name: len(items)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatternRewrite) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        settings = (each if isinstance(each, (str, frozenset)) else id(each) for each in self.settings())
        return (type(self), id(self.wanted), self.sizes, self.node_name, *settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatternRewrite:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        rule = self.wanted.rule
        given = rule.name if rule is not None and RULES.get(rule.name) is rule else self.wanted.given
        if _portable((given, self.settings())):
            return _by_given_pattern, (type(self), given, self.settings())
        return Unrepeatable, (f"the pattern {self.name} cannot be pickled, and the model was since",)


def _naming(build: Build, name: str) -> Build:
    """Wrap ``build`` to name its call; a name that is taken in the graph gets a number."""

    def build_named(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        returned = build(graph, inputs, scalars)
        first = returned if isinstance(returned, fx.Node) else returned[0]
        call = first.all_input_nodes[0] if first.target is operator.getitem else first
        call._rename(name)
        return returned

    return build_named


def checked_name(name: str | None) -> str:
    """Return the ``name`` given by a user, or "" for None.

    Raises:
        NotApplicable: it cannot be the name of a node or a module.
    """
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise NotApplicable(f"{name!r} cannot name a node or a module", fix='give an identifier, such as "FusedLN"')
    return name or ""


def _by_given_pattern(kind: Callable[..., Rewrite], given: Any, settings: tuple[Any, ...]) -> Rewrite:
    return kind(Wanted.of(given), *settings)


def _portable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


Make = Callable[[Node, Wanted, frozenset[int]], PatternRewrite]
"""Makes the rewrite of a module's matches, given what was searched and how many matches become one call."""


def rewrite_matches(sch: Node, groups: Sequence[MatchGroup], make: Make) -> None:
    """Apply rewrites to the given matches and to graphs made later.

    Raises:
        MatchError: a match is of another model, not under ``sch``, consumed, or unsafe to replace.
        NotApplicable: no matches; or the module is in the middle of another's graph.
    """

    def prepare(group: MatchGroup, graph_match: GraphMatch) -> Replacement:
        match = group[0]
        searched = Wanted(match.name, (match.pattern,), match.rule, match.pattern)
        wanted = searched if match.search is None else match.search.wanted
        rewrite = make(match.schedule, wanted, frozenset({len(group)}))
        return rewrite.named_replacement(graph_match, match.schedule.module)

    def repeat(node: Node, own: Sequence[MatchGroup]) -> Adapter | None:
        return adapter_for(node, _of_searches(node, own, make))

    splice_in(sch, groups, prepare, repeat)


def _of_searches(node: Node, groups: Sequence[MatchGroup], make: Make) -> list[Rewrite]:
    """Return the rewrites of whole searches in a module. Matches picked by hand cannot be repeated."""
    by_search: dict[Search | None, list[MatchGroup]] = {}
    for group in groups:
        by_search.setdefault(group[0].search, []).append(group)
    rewrites: list[Rewrite] = []
    for search, own in by_search.items():
        name = own[0][0].name
        if search is None:
            rewrites.append(Unrepeatable(f"nobody knows how the matches of {name} were found"))
            continue
        sizes = frozenset(map(len, own))
        all_found = [[match] for match in search.matches] if sizes == {1} else parallel(search.matches)
        if set(map(frozenset, own)) == set(map(frozenset, all_found)):
            rewrites.append(make(node, search.wanted, sizes))
        else:
            picked = f"{len(own)} of the {len(all_found)} matches of {name} were picked by hand"
            rewrites.append(Unrepeatable(f"{picked}, and nobody knows which they are in another graph"))
    return rewrites
