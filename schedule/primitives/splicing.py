"""Replacement of matches in graphs, for ``fuse``, ``replace`` and ``checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx, nn

from schedule.capture import RULE, Inlined, Recording, Specialization, expand, module_state_guards, original_class
from schedule.core import history
from schedule.core.adapting import Adapter
from schedule.core.edits import SetSpecializations
from schedule.core.matching import Match, Site, holds
from schedule.core.rebinding import StaleMatch, blamed, keep_erased, rebound
from schedule.patterns import GraphMatch
from schedule.patterns.rewriting import Build, merge, rewrite_in_place
from schedule.primitives.hooked_calls import HookedCall, hooked_calls, substitute_of
from schedule.util.errors import MatchError, NotApplicable

if TYPE_CHECKING:
    from schedule.core.node import Node

P = TypeVar("P")

MatchGroup = Sequence[Match]
"""Parallel matches to replace by one call; most often a single one."""

Prepare = Callable[[MatchGroup, GraphMatch], tuple[GraphMatch, Build]]
"""Function returning the match to replace, perhaps with other inputs, and the builder of the replacement."""


Repeat = Callable[["Node", Sequence[MatchGroup]], Adapter | None]
"""Function from a module and its match groups to the adapter for further graphs."""


def splice_in(sch: Node, groups: Sequence[MatchGroup], prepare: Prepare, repeat: Repeat) -> None:
    """Replace every match group in all of its graphs and commit, or change nothing on error.

    Raises:
        MatchError: a match is of another model, not under ``sch``, consumed, or unsafe to replace.
        NotApplicable: no matches; or the module is inlined in another module's graph.
    """
    refuse_foreign(sch, groups)
    by_module: dict[Node, list[MatchGroup]] = {}
    for group in groups:
        by_module.setdefault(group[0].schedule, []).append(group)
    planned = []
    for node, own in by_module.items():
        node.refuse_inside_other_graph()
        history.reached(f"planning {node.label}")
        planned.append((node, own, _rewritten(node, own, prepare)))
    for node, own, specializations in planned:
        node.commit([SetSpecializations(node.module, specializations, node.path, repeat(node, own))], len(own))


def refuse_none(matches: Sequence[Any]) -> None:
    """Raise if there are no matches, or a group of them is empty."""
    if not matches or any(isinstance(each, (list, tuple)) and not each for each in matches):
        raise NotApplicable("no matches were given", fix="give what find() returned; find(..., expect=n) makes sure")


def refuse_no_match(value: Any) -> None:
    """Raise if ``value`` is no match."""
    if not isinstance(value, Match):
        raise MatchError(f"{value!r} is not a match", fix="give what find() returned")


def refuse_foreign(sch: Node, groups: Sequence[MatchGroup]) -> None:
    """Raise unless there are match groups, all of this model and under ``sch``."""
    refuse_none(groups)
    for match in (match for group in groups for match in group):
        refuse_no_match(match)
        if match.schedule.tree is not sch.tree:
            root = type(match.schedule.tree.root).__name__
            raise MatchError(
                f"the match of {match.name} in {match.schedule.label} is from another model (a {root})",
                fix="find it in this schedule",
            )
        if not holds(sch, match):
            raise MatchError(
                f"the match of {match.name} is in {match.schedule.label}, not in {sch.label}",
                fix=f"call the primitive on {match.schedule.label}, or on a module above both",
            )


def _rewritten(node: Node, groups: Sequence[MatchGroup], prepare: Prepare) -> list[Specialization]:
    """Return all graphs of one module, those with matches rewritten."""
    current = list(node.specializations)
    pending, recording = node.tree.history.pending, node.tree.graphs.recording
    by = pending.description if pending is not None else ""
    found: dict[int, list[tuple[MatchGroup, list[Site]]]] = {}
    for group in groups:
        for number in range(max(len(match.sites) for match in group)):
            sites = [match.sites[number] for match in group if number < len(match.sites)]
            index = sites[0].in_current(current)
            if index is None or len(sites) < len(group):
                gone = StaleMatch(
                    f"{group[0].name} was found in a graph of {node.label} that is gone", fix="find it again"
                )
                raise blamed(gone, group[0])
            found.setdefault(index, []).append((group, sites))
    try:
        return [
            rewritten(made, node.module, recording, found[index], prepare, by) if index in found else made
            for index, made in enumerate(current)
        ]
    except StaleMatch as error:
        raise blamed(error, groups[0][0]) from None


def rewritten(
    made: Specialization,
    module: nn.Module,
    recording: Recording,
    items: Sequence[tuple[P, Sequence[Site]]],
    prepare: Callable[[P, GraphMatch], tuple[GraphMatch, Build]],
    by: str,
) -> Specialization:
    """Return one graph of ``module`` with all items rewritten.

    Args:
        items: (key passed to ``prepare``, its one or several parallel sites in the graph).
        prepare: returns the match to replace and the builder of its replacement.
        by: name of this rewrite in later errors.

    Raises:
        MatchError: a site is consumed, or unsafe to replace.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    inlined = {name for _, sites in items for site in sites for name in site.inlined}
    expansion = expand(made, module, recording, inlined)
    keep_erased(made.graph, expansion.graph)
    graph_matches: list[GraphMatch] = []
    builds: list[Build] = []
    hooked: list[list[HookedCall]] = []
    for group, sites in items:
        found = _merged([rebound(site, expansion, modules) for site in sites])
        hooked.append(hooked_calls(found, modules))
        graph_match, build = prepare(group, found)
        graph_matches.append(graph_match)
        builds.append(build)
    order = iter(builds)

    def build_next(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return next(order)(graph, inputs, scalars)

    replaced = rewrite_in_place(expansion.graph, graph_matches, build_next, modules, by=by)
    hooks_in: dict[str, str] = {}
    for (key, _), nodes, calls in zip(items, replaced, hooked, strict=True):
        hooks_in |= {call.path: substitute_of(call, nodes, modules) for call in calls}
        for node in nodes:
            node.meta[RULE] = _name(key) or by
    return made.with_graph(expansion.graph, {**expansion.inlined, **_called(graph_matches, modules, hooks_in)})


def _name(key: Any) -> str:
    """Return the name of a rule, or of the rule or pattern of the first match in a group."""
    return str(getattr(key[0] if isinstance(key, (list, tuple)) else key, "name", ""))


def _called(
    graph_matches: Sequence[GraphMatch], modules: Mapping[str, nn.Module], hooks_in: Mapping[str, str]
) -> dict[str, Inlined]:
    """Return the modules with consumed calls, such as a Linear without a bias, as inlined ones to guard.

    So are those of other calls that a replacement relies on.
    """
    nodes = (node for each in graph_matches for node in (*each.nodes, *each.calls))
    paths = [str(node.target) for node in nodes if node.op == "call_module"]
    return {
        path: Inlined(
            original_class(modules[path]), module_state_guards(modules[path]), hooks_in=hooks_in.get(path, "")
        )
        for path in paths
    }


def _merged(graph_matches: list[GraphMatch]) -> GraphMatch:
    """Merge parallel matches into one."""
    if len(graph_matches) == 1:
        return graph_matches[0]
    return merge([replace(o, pattern=graph_matches[0].pattern) for o in graph_matches])
