"""Rewrites as data, repeatable on further graphs of the same module."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from schedule.capture.recording.recording import Recording
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.expansion import expand
from schedule.capture.tracing.specialization import Specialization
from schedule.core.adapting import Rewrite, Rewritten, Unrepeatable
from schedule.core.matching import Match, Search, Site, Wanted, parallel, sites_in
from schedule.patterns import GraphMatch
from schedule.patterns.rewriting import Build
from schedule.primitives.splicing import rewritten
from schedule.rules import Rule
from schedule.rules.applying import find_all
from schedule.rules.registry import RULES
from schedule.rules.rule import spec_of

Item = tuple[Any, Sequence[Site]]
Prepare = Callable[[Any, GraphMatch], tuple[GraphMatch, Build]]


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

        def prepare(rule: Rule, graph_match: GraphMatch) -> tuple[GraphMatch, Build]:
            return graph_match, rule.build if made.autocast is None else as_wide(graph_match, rule.build)

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


class ByPattern:
    """Rewrite of all matches of a pattern.

    Deep copies are the same object, pickles contain the pattern as given to ``find``.
    """

    def __init__(self, wanted: Wanted, sizes: Collection[int] = (1,)) -> None:
        self.wanted, self.sizes = wanted, frozenset(sizes)

    @property
    def name(self) -> str:
        """The pattern's name."""
        return self.wanted.name

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Find the pattern in this graph and rewrite its matches."""
        sites, _ = sites_in(made, module, recording, self.wanted)
        places = [[site] for site in sites] if self.sizes == {1} else parallel(sites)
        items, prepare = self.planned([place for place in places if len(place) in self.sizes], module)
        if not items:
            return made, {}
        return rewritten(made, module, recording, items, prepare, self.name), {self.name: len(items)}

    def planned(self, places: Sequence[Sequence[Site]], module: nn.Module) -> tuple[list[Item], Prepare]:
        """Return the items to rewrite, and a function to prepare each."""
        raise NotImplementedError

    def settings(self) -> tuple[Any, ...]:
        """Return the constructor arguments after the pattern."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByPattern) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        settings = (each if isinstance(each, (str, frozenset)) else id(each) for each in self.settings())
        return (type(self), id(self.wanted), self.sizes, *settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> ByPattern:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        rule = self.wanted.rule
        given = rule.name if rule is not None and RULES.get(rule.name) is rule else self.wanted.given
        if _portable((given, self.settings())):
            return _by_given_pattern, (type(self), given, self.settings())
        return Unrepeatable, (f"the pattern {self.name} cannot be pickled, and the model was since",)


def _by_given_pattern(kind: Callable[..., Rewrite], given: Any, settings: tuple[Any, ...]) -> Rewrite:
    return kind(Wanted.of(given), *settings)


def _portable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def of_searches(places: Sequence[Sequence[Match]], make: Callable[[Wanted, frozenset[int]], Rewrite]) -> list[Rewrite]:
    """Return rewrites to repeat a primitive applied to all matches of a search.

    Matches picked by hand, from no search or not all of a search, give :class:`Unrepeatable`.
    """
    by_search: dict[Search | None, list[Sequence[Match]]] = {}
    for place in places:
        by_search.setdefault(place[0].search, []).append(place)
    rewrites: list[Rewrite] = []
    for search, own in by_search.items():
        name = own[0][0].name
        if search is None:
            rewrites.append(Unrepeatable(f"nobody knows how the matches of {name} were found"))
            continue
        sizes = frozenset(map(len, own))
        all_found = [[match] for match in search.matches] if sizes == {1} else parallel(search.matches)
        if set(map(frozenset, own)) == set(map(frozenset, all_found)):
            rewrites.append(make(search.wanted, sizes))
        else:
            picked = f"{len(own)} of the {len(all_found)} matches of {name} were picked by hand"
            rewrites.append(Unrepeatable(f"{picked}, and nobody knows which they are in another graph"))
    return rewrites
