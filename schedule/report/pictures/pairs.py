"""Graphs of a module before and after its rewrites, with the changes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from schedule.capture import Recording, Specialization, expand
from schedule.core.graphs import Specializations
from schedule.patterns.graph_copies import Erased, erased
from schedule.report.tree_text import short
from schedule.util.errors import TraceError

if TYPE_CHECKING:
    from schedule.core.node import Node


@dataclass
class Pair:
    """A module's graph, and the graph before its rewrites.

    Attributes:
        after: the graph as it runs.
        before: with the same modules inlined; None if nothing was rewritten, or if it is not available any more.
        rules: the rule or primitive of each change, such as ``bias_gelu_tanh`` or ``fuse(mine)``.
        old: name of a removed node → number of the change that removed it.
        new: name of an added node → number of its change.
        caption: caption of the graph if there is only one.
    """

    after: fx.Graph
    before: fx.Graph | None = None
    rules: list[str] = field(default_factory=list)
    old: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    caption: str = "graph"


def pair_of(node: Node, recording: Recording | None) -> Pair | None:
    """Return the graphs of a module, or None if it was neither rewritten nor traced.

    Args:
        node: the module.
        recording: the run of its model; None if there is none.
    """
    graphs = node.tree.graphs
    now = graphs.current(node.module) or graphs.original(node.module)
    if not now:
        return None
    made = max(now, key=lambda each: each.training)
    if recording is None or not erased(made.graph):
        return Pair(made.graph)
    was = _like(made, _originals(node))
    return Pair(made.graph) if was is None else _compared(was, made, node, recording)


def _originals(node: Node) -> Specializations:
    graphs = node.tree.graphs
    found = graphs.original(node.module)
    if found is not None:
        return found
    try:
        return graphs.trace(node.module)
    except TraceError:  # it was scheduled elsewhere, for a call not made in this run
        return ()


def _like(made: Specialization, originals: Iterable[Specialization]) -> Specialization | None:
    key = (made.training, made.call.key())
    return next((each for each in originals if (each.training, each.call.key()) == key), None)


def _compared(was: Specialization, made: Specialization, node: Node, recording: Recording) -> Pair:
    gone, here = erased(made.graph), {each.name: each for each in made.graph.nodes}
    calls = [each.name for each in was.graph.nodes if each.op == "call_module"]
    inlined = [name for name in calls if name not in here and name not in gone]
    before = expand(was, node.module, recording, inlined).graph
    parts = list(_parts(before, gone))
    order = {each.name: number for number, each in enumerate(before.nodes)}
    parts.sort(key=lambda names: min(order.get(name, len(order)) for name in names))
    pair = Pair(made.graph, before)
    for number, names in enumerate(parts):
        ends = [end for name in names if (end := gone[name]).successor is not None and end.successor.name in here]
        pair.rules.append(_rule((ends or [_last(name, gone) for name in names])[0].by))
        pair.old |= {name: number for name in names if name in order}
        pair.new |= {end.successor.name: number for end in ends if end.successor is not None}
    _spread(pair, known=set(order))
    return pair


def _parts(before: fx.Graph, gone: dict[str, Erased]) -> Iterator[list[str]]:
    """Yield the names of erased nodes, grouped by change.

    A change consists of connected nodes erased by the same rewrite, and of erased nodes they replaced or were
    replaced by.
    """
    parent = {name: name for name in gone}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for name, was in gone.items():
        if was.successor is not None and was.successor.name in gone:
            parent[root(name)] = root(was.successor.name)
    for node in before.nodes:
        for source in node.all_input_nodes:
            both = node.name in gone and source.name in gone and source.op != "get_attr"
            if both and _last(node.name, gone).by == _last(source.name, gone).by:
                parent[root(node.name)] = root(source.name)
    found: dict[str, list[str]] = {}
    for name in gone:
        found.setdefault(root(name), []).append(name)
    yield from found.values()


def _last(name: str, gone: dict[str, Erased]) -> Erased:
    """Return the last erasure in the chain of a node's erased replacements."""
    was = gone[name]
    while was.successor is not None and was.successor.name in gone:
        was = gone[was.successor.name]
    return was


def _rule(by: str) -> str:
    """Return a rewrite's description for a legend: the rule applied by ``optimize``, else the primitive."""
    text = short(by) or "rewritten"
    return text.removeprefix("optimize(").removesuffix(")") if text.startswith("optimize(") else text


def _spread(pair: Pair, known: set[str]) -> None:
    """Assign the remaining added nodes to the change of an added user, or else of an added input."""
    fresh = [node for node in pair.after.nodes if node.name not in known and node.op not in ("get_attr", "output")]
    names = {node.name for node in fresh}

    def spread(node: fx.Node, beside: Iterable[fx.Node]) -> None:
        near = [pair.new[other.name] for other in beside if other.name in names and other.name in pair.new]
        if near:
            pair.new.setdefault(node.name, near[0])

    for node in reversed(fresh):
        spread(node, node.users)
    for node in fresh:
        spread(node, node.all_input_nodes)
