"""Remapping of matches to the rewritten versions of their graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from schedule.capture import Expansion, TensorSpec
from schedule.core.history import Step
from schedule.patterns import GraphMatch
from schedule.patterns.graph_copies import Erased, Follower, LostNode, erased
from schedule.util.errors import MatchError

if TYPE_CHECKING:
    from schedule.core.matching import Match, Site


class StaleMatch(MatchError):
    """Error for a match no longer in the graph (:func:`blamed` adds the steps since)."""


def rebound(site: Site, expansion: Expansion, modules: Mapping[str, nn.Module]) -> GraphMatch:
    """Remap a match to a copy of its graph, or to a rewritten version of it.

    Args:
        modules: path → module, for the calls in the graph now.

    Raises:
        MatchError: its nodes are gone, have other inputs or compute something else; names the primitive that consumed
            them.
    """
    graph_match, follower = site.graph_match, Follower(expansion.graph, site.origin)
    for path, module in site.called.items():
        if modules.get(path) is not module:
            raise StaleMatch(f"{path}, whose call is the match, was replaced since", fix="find it again")
    consumed = frozenset(graph_match.nodes)
    try:
        moved = follower.match(graph_match)
        for old, new in zip(graph_match.nodes, moved.nodes, strict=True):
            same = _alike((old.args, old.kwargs), (new.args, new.kwargs), lambda node: follower.node(node, consumed))
            if not same or _kind(old) != _kind(new):
                raise StaleMatch(
                    f"{new.name} computes something else, or from something else, "
                    f"since {graph_match.pattern.name} was found",
                    fix="find it again",
                )
    except LostNode as lost:
        raise _lost(site, lost.node, follower.erased) from None
    return moved


def _alike(old: Any, new: Any, here: Callable[[fx.Node], fx.Node]) -> bool:
    """Check whether arguments of a node are the same up to remapped nodes."""
    if isinstance(old, fx.Node):
        return here(old) is new
    if isinstance(old, (tuple, list)):
        same = isinstance(new, (tuple, list)) and len(old) == len(new)
        return same and all(_alike(a, b, here) for a, b in zip(old, new, strict=True))
    if isinstance(old, Mapping):
        return isinstance(new, Mapping) and list(old) == list(new) and _alike([*old.values()], [*new.values()], here)
    if isinstance(old, slice):
        parts = ("start", "stop", "step")
        return isinstance(new, slice) and all(_alike(getattr(old, p), getattr(new, p), here) for p in parts)
    return old is new or (type(old) is type(new) and repr(old) == repr(new))


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """Return the properties of a value checked by rules besides its operation: dtype and rank."""
    spec = node.meta.get("spec")
    return (spec.dtype, spec.ndim) if isinstance(spec, TensorSpec) else ()


def _lost(site: Site, node: fx.Node, gone: Mapping[str, Erased]) -> MatchError:
    name = site.graph_match.pattern.name
    call = site.origin.get(node.name)
    was = gone.get(node.name) or (gone.get(call) if call else None)
    if was is not None:
        by = was.by or "another rewrite"
        return MatchError(
            f"this match of {name} was already consumed by {by}", fix="undo that step, or find again what is left"
        )
    if call is not None:
        return StaleMatch(
            f"the module called as {call} can no longer be inlined: it was hooked, wrapped or replaced since",
            fix="remove the hook, or find again",
        )
    return StaleMatch(
        f"{node.name}, of which this match of {name} is made or which it reads, is no longer in the graph",
        fix="find it again",
    )


def blamed(error: StaleMatch, match: Match) -> MatchError:
    """Add to the error the steps made or undone since on the module of ``match``, or on one above or below it."""
    found = match.search.found if match.search is not None else None
    now = match.schedule.tree.history.steps
    then = found.after if found is not None else now
    prefix = [*(old is new for old, new in zip(then, now, strict=False)), False].index(False)
    made = [step.description for step in now[prefix:] if _concerns(step, match.path)]
    undone = [f"undo of {step.description}" for step in then[prefix:] if _concerns(step, match.path)]
    since = f"done since it was found: {'; '.join(undone + made)}" if made or undone else ""
    return MatchError(error.why, fix=error.fix, where=since)


def _concerns(step: Step, path: str) -> bool:
    """Check whether ``step`` changed the module at ``path``, or one above or below it."""
    return any(
        not at or not path or f"{path}.".startswith(f"{at}.") or f"{at}.".startswith(f"{path}.") for at in step.touched
    )


def keep_erased(old: fx.Graph, new: fx.Graph) -> None:
    """Copy the records of erased nodes from ``old`` to its copy ``new``, and reserve their names there."""
    names = {node.name: node for node in new.nodes}
    for name, was in erased(old).items():
        new._graph_namespace.create_name(name, None)
        successor = names.get(was.successor.name) if was.successor is not None else None
        erased(new)[name] = Erased(successor, was.by)
