"""Replacement of matches in a graph.

:func:`check` rejects matches that cannot be replaced without changing the result; :func:`splice` replaces one
match; :func:`rewrite` replaces many on a copy, so that an error leaves the given graph unchanged.

    def build(graph, inputs, scalars):
        return graph.call_function(fused_bias_gelu, (inputs["x"], inputs["bias"]))

    new_graph, new_nodes = rewrite(graph, search(graph, bias_gelu).graph_matches, build)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from schedule.capture import TensorSpec, updated_state
from schedule.patterns.graph_copies import Erased, Follower, LostNode, copy_graph, erased, split_linear
from schedule.patterns.graph_match import GraphMatch
from schedule.patterns.hazards import Hazards, check_region, plan_hoist
from schedule.patterns.normalized_nodes import Attr
from schedule.patterns.saving import refuse_saving
from schedule.util.errors import MatchError
from schedule.util.nodes import named_input
from schedule.util.wording import counted

__all__ = ["check", "copy_graph", "erased", "merge", "partition", "rewrite", "splice", "split_linear"]

Build = Callable[[fx.Graph, dict[str, Any], dict[str, Any]], Any]
"""``build(graph, inputs, scalars)`` inserts the replacement and returns its output node or nodes."""

Modules = Mapping[str, nn.Module] | None


def check(graph: fx.Graph, graph_matches: Iterable[GraphMatch], modules: Modules = None) -> None:
    """Raise if any of the matches cannot be replaced safely.

    Args:
        graph: the graph they were found in, or a copy of it; it is not changed.
        graph_matches: matches from one search or several.
        modules: path → module of the ``call_module`` nodes; an unknown module may have any effect.

    Raises:
        MatchError: a match is stale, overlaps another, has an interior value used outside, is not
            convex, or a mutation, unknown call or random draw would be reordered.
    """
    _checked(graph, list(graph_matches), Hazards(modules))


def partition(
    graph: fx.Graph, graph_matches: Iterable[GraphMatch], modules: Modules = None
) -> tuple[list[GraphMatch], list[tuple[GraphMatch, MatchError]]]:
    """Partition matches into those allowed by :func:`check` one by one, and the others with their errors."""
    hazards, sound, refused = Hazards(modules), [], []
    for graph_match in graph_matches:
        try:
            _checked(graph, [graph_match], hazards)
        except MatchError as error:
            refused.append((graph_match, error))
        else:
            sound.append(graph_match)
    return sound, refused


def _checked(graph: fx.Graph, graph_matches: list[GraphMatch], hazards: Hazards) -> None:
    for graph_match in _disjoint(graph, graph_matches):
        region = set(graph_match.nodes)
        check_region(region, graph_match.outputs, hazards)
        _plan(region, graph_match.outputs, _nodes(graph_match.inputs, graph_match.scalars), hazards)


def _disjoint(graph: fx.Graph, graph_matches: list[GraphMatch]) -> list[GraphMatch]:
    """Return the matches in ``graph``, or raise if one is stale or two share a node."""
    follower = Follower(graph)
    owner: dict[fx.Node, GraphMatch] = {}
    here = []
    for graph_match in graph_matches:
        try:
            here.append(follower.match(graph_match))
        except LostNode as lost:
            raise _stale(graph_match, lost) from None
        for node in here[-1].nodes:
            if node in owner:
                raise MatchError(
                    f"two matches share {node.name}: {owner[node].pattern.name} and {graph_match.pattern.name}",
                    node=node,
                    fix="give the matches of one search, or pick with schedule.patterns.resolve",
                )
            owner[node] = here[-1]
    return here


def _stale(graph_match: GraphMatch, lost: LostNode) -> MatchError:
    if lost.erased is not None:
        return MatchError(
            f"{lost.node.name} was already consumed by {lost.erased.by or 'another rewrite'}",
            node=lost.node,
            fix="search again after each rewrite",
        )
    return MatchError(
        f"the match of {graph_match.pattern.name} is from another graph: there is no such {lost.node.name} here",
        node=lost.node,
        fix="search this graph and use what that finds",
    )


def rewrite(
    graph: fx.Graph,
    graph_matches: Iterable[GraphMatch],
    build: Build,
    modules: Modules = None,
    *,
    by: str = "",
) -> tuple[fx.Graph, list[list[fx.Node]]]:
    """Return a copy of ``graph`` with every match replaced, and the new nodes of each match.

    Args:
        build: see :data:`Build`.
        by: name of this rewrite in later errors, such as ``"fuse(bias_gelu)"``.

    Raises:
        MatchError: as for :func:`check` and :func:`splice`.
    """
    twin = copy_graph(graph)
    return twin, rewrite_in_place(twin, graph_matches, build, modules, by=by)


def rewrite_in_place(
    graph: fx.Graph, graph_matches: Iterable[GraphMatch], build: Build, modules: Modules = None, *, by: str = ""
) -> list[list[fx.Node]]:
    """Replace every match in ``graph`` itself and return the new nodes of each.

    An error leaves the graph half changed.

    Raises:
        MatchError: as :func:`check` and :func:`splice`.
    """
    here = _disjoint(graph, list(graph_matches))
    made = [_splice(graph, graph_match, build, modules, by) for graph_match in here]
    graph.lint()
    return made


def splice(
    graph: fx.Graph, graph_match: GraphMatch, build: Build, modules: Modules = None, *, by: str = ""
) -> list[fx.Node]:
    """Replace one match in ``graph`` itself and return the new nodes, in order.

    The replacement is inserted where all of the inputs exist and no output has been used yet; pure nodes that
    compute a late input are moved up if necessary. A single node returned for several outputs is taken as a
    tuple of them; unused outputs may be missing. Recorded specs move to the new outputs. The consumed nodes,
    and pure nodes that fed nothing else, are erased.

    Raises:
        MatchError: as for :func:`check`; or the replacement has fewer outputs than are used, or saves a tensor for the
            backward pass that is changed in place later and was not saved before.
    """
    return rewrite_in_place(graph, [graph_match], build, modules, by=by)[0]


def _splice(graph: fx.Graph, graph_match: GraphMatch, build: Any, modules: Modules, by: str) -> list[fx.Node]:
    hazards = Hazards(modules)
    region = set(graph_match.nodes)
    check_region(region, graph_match.outputs, hazards)
    given = {k: _current(graph, v) for k, v in graph_match.inputs.items()}
    scalars = {k: _current(graph, v) for k, v in graph_match.scalars.items()}
    point, late = _plan(region, graph_match.outputs, _nodes(given, scalars), hazards)
    for node in late:
        point.prepend(node)
    made, returned = _build(graph, point, build, given, scalars)
    try:
        _refuse_lost_update(region, made)
        ends = _outputs(graph, point, graph_match, region, returned, made)
        refuse_saving(region, dict(zip(graph_match.outputs, ends, strict=True)), made, hazards)
    except MatchError:
        _discard(graph, made)
        raise
    _label(made, graph_match, ends)
    for old, new in zip(graph_match.outputs, ends, strict=True):
        if new is not None:
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in region)
    _erase(graph, graph_match, ends, hazards, by)
    return made


def _refuse_lost_update(region: Iterable[fx.Node], made: Iterable[fx.Node]) -> None:
    """Raise if a replacement does not update the state that its region does, once."""
    wanted, updated = (
        [str(state.target) for node in nodes for state in updated_state(node)] for nodes in (region, made)
    )
    wrong = (Counter(wanted) - Counter(updated)) | (Counter(updated) - Counter(wanted))
    if wrong:
        raise MatchError(
            f"the match updates {min(wrong)}, and the replacement does not, or not as often",
            fix="replace it by a function that updates it once, such as fused.batch_norm",
        )


def _nodes(*tables: Mapping[str, Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for table in tables:
        fx.node.map_arg(tuple(v for v in table.values() if not isinstance(v, Attr)), found.append)
    return found


def _current(graph: fx.Graph, value: Any) -> Any:
    """Remap a bound value: replace each erased node by its successor."""
    if isinstance(value, tuple):
        return tuple(_current(graph, item) for item in value)
    gone = erased(graph)
    while isinstance(value, fx.Node) and value.name in gone:
        was = gone[value.name]
        if was.successor is None:
            raise MatchError(
                f"the input {value.name} was consumed by {was.by or 'another rewrite'}", fix="search again"
            )
        value = was.successor
    return value


def _plan(
    region: set[fx.Node], outputs: Sequence[fx.Node], inputs: list[fx.Node], hazards: Hazards
) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node to insert before, and the nodes computing late inputs to move there first."""
    after = max(region).next
    users = [user for output in outputs for user in output.users if user not in region]
    first = min(users, default=after)
    if not first < after:
        return after, []
    return first, plan_hoist(inputs, first, hazards)


def _build(
    graph: fx.Graph, point: fx.Node, build: Build, given: dict[str, Any], scalars: dict[str, Any]
) -> tuple[list[fx.Node], Any]:
    """Run ``build`` right before ``point`` and return the new nodes and its result.

    If it raises, the new nodes are erased.
    """
    before, made, done = point.prev, [], False
    try:
        with graph.inserting_before(point):
            inputs = {k: _read(graph, v) if isinstance(v, Attr) else v for k, v in given.items()}
            returned = build(graph, inputs, scalars)
        done = True
    finally:
        node = before.next
        while node is not point:
            made.append(node)
            node = node.next
        if not done:
            _discard(graph, made)
    return made, returned


def try_build(graph_match: GraphMatch, build: Build) -> None:
    """Run ``build`` for a match in a graph of its own, with placeholders for the values of the match."""
    graph = fx.Graph()
    made: dict[fx.Node | Attr, fx.Node] = {}

    def placeholder(value: fx.Node | Attr, path: str, meta: Mapping[str, Any]) -> fx.Node:
        if value not in made:
            made[value] = named_input(graph, path)
            made[value].meta.update(meta)
        return made[value]

    def given(value: Any) -> Any:
        if isinstance(value, Attr):
            meta = {} if value.value is None else {"spec": TensorSpec.of(value.value)}
            return placeholder(value, value.path, meta)
        return fx.node.map_arg(value, lambda node: placeholder(node, node.name, node.meta))

    inputs = {name: given(value) for name, value in graph_match.inputs.items()}
    build(graph, inputs, {name: given(value) for name, value in graph_match.scalars.items()})


def _read(graph: fx.Graph, attr: Attr) -> fx.Node:
    node = graph.create_node("get_attr", attr.path)
    if attr.value is not None:
        node.meta["spec"] = TensorSpec.of(attr.value)
    return node


def _discard(graph: fx.Graph, made: list[fx.Node]) -> None:
    for node in reversed(made):
        graph.erase_node(node)


def _outputs(
    graph: fx.Graph,
    point: fx.Node,
    graph_match: GraphMatch,
    region: set[fx.Node],
    returned: Any,
    made: list[fx.Node],
) -> list[fx.Node | None]:
    """Return one new node for each output, or None for an unused output."""
    count = len(graph_match.outputs)
    used = [any(u not in region for u in o.users) for o in graph_match.outputs]
    if isinstance(returned, fx.Node) and count > 1:
        items: list[fx.Node | None] = []
        with graph.inserting_before(point):
            for i in range(count):
                items.append(graph.call_function(operator.getitem, (returned, i)) if used[i] else None)
        made += [item for item in items if item is not None]
        return items
    ends = [returned] if isinstance(returned, fx.Node) else list(returned)
    ends += [None] * (count - len(ends))
    for i in range(count):
        if used[i] and not isinstance(ends[i], fx.Node):
            raise MatchError(
                f"the replacement gives no value for {graph_match.outputs[i].name}, which is used",
                node=graph_match.outputs[i],
                fix=f"return {counted(count, 'value')}, one for each output of the pattern",
            )
    return ends[:count]


def _label(made: list[fx.Node], graph_match: GraphMatch, ends: list[fx.Node | None]) -> None:
    """Copy the recorded specs to the new outputs, and the source line to every new node."""
    for old, new in zip(graph_match.outputs, ends, strict=True):
        if new is not None and "spec" not in new.meta and "spec" in old.meta:
            new.meta["spec"] = old.meta["spec"]
    for node in made:
        if graph_match.source:
            node.meta.setdefault("source", graph_match.source)


def _erase(graph: fx.Graph, graph_match: GraphMatch, ends: list[fx.Node | None], hazards: Hazards, by: str) -> None:
    """Erase the region and the pure nodes feeding only it."""
    successor = dict(zip(graph_match.outputs, ends, strict=True))
    gone = erased(graph)
    feeding: list[fx.Node] = []
    for node in reversed(graph_match.nodes):
        feeding += node.all_input_nodes
        graph.erase_node(node)
        gone[node.name] = Erased(successor.get(node), by)
    while feeding:
        node = feeding.pop()
        if node.name in gone or node.users or node.op == "placeholder" or not hazards.effects(node).pure:
            continue
        feeding += node.all_input_nodes
        graph.erase_node(node)
        gone[node.name] = Erased(None, by)


def merge(graph_matches: Sequence[GraphMatch]) -> GraphMatch:
    """Merge parallel matches of one pattern into one with all of their outputs (QKV from one input).

    Inputs and constants shared by all of them keep their names; others become ``name_0``, ``name_1``, ...

    Raises:
        MatchError: there are no matches, they differ in pattern or graph, or they share no input.
    """
    if not graph_matches:
        raise MatchError("there is nothing to merge", fix="give at least two matches")
    first = graph_matches[0]
    if any(o.pattern is not first.pattern or o.graph is not first.graph for o in graph_matches):
        raise MatchError("the matches to merge are of different patterns or graphs", fix="merge one search's matches")
    inputs = _merged([o.inputs for o in graph_matches])
    if len(graph_matches) > 1 and not any(isinstance(inputs.get(k), fx.Node) for k in first.inputs):
        raise MatchError("the matches to merge share no input", fix="merge matches that read one value")
    return replace(
        first,
        nodes=tuple(sorted(n for o in graph_matches for n in o.nodes)),
        inputs=inputs,
        scalars=_merged([o.scalars for o in graph_matches]),
        outputs=tuple(n for o in graph_matches for n in o.outputs),
        binding={},
    )


def _merged(tables: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in tables[0].items():
        values = [table[name] for table in tables]
        if all(v is value or (not isinstance(v, fx.Node) and type(v) is type(value) and v == value) for v in values):
            result[name] = value
        else:
            result |= {f"{name}_{i}": v for i, v in enumerate(values)}
    return result
