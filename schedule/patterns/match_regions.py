"""Region of a graph replaced by a match, and checks of whether it can be taken out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from schedule.capture import TensorSpec

RETURNED = "returned (a flat graph, sch.trace(flatten=True), leaves out results that no code reads)"
"""What messages say of an interior value that is used as a result of the graph alone."""

_READS = ("size", "dim", "ndimension", "numel", "__len__", "shape", "ndim", "is_floating_point")


def reads_metadata(node: fx.Node) -> bool:
    """Check whether ``node`` yields a size, a dtype, a device or arithmetic on them.

    Such reads may be erased.
    """
    spec = node.meta.get("spec")
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(spec, (bool, int, float, torch.dtype, torch.device, torch.Size)):
        return True
    if isinstance(spec, TensorSpec):
        return False
    if node.target is getattr or node.target == "getattr":
        return node.args[1] in ("shape", "dtype", "device", "ndim")
    if node.op == "call_method":
        return node.target in _READS
    name = getattr(node.target, "__name__", "")
    sources = node.all_input_nodes
    return (
        bool(sources)
        and name in ("getitem", "add", "mul", "sub", "floordiv", "neg", "mod", "len")
        and all(reads_metadata(n) for n in sources)
    )


def absorb(nodes: Iterable[fx.Node], passed: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the region of ``nodes`` extended by the size reads used only within it.

    Args:
        passed: nodes that only pass their argument on, which belong to the region likewise.
    """
    region = set(nodes)
    waiting = [u for n in region for u in n.users if u not in region]
    while waiting:
        user = waiting.pop()
        if user not in region and (user in passed or reads_metadata(user)):
            tail = _tail(user, region, passed)
            if tail is not None:
                region |= tail
    return region


def _tail(start: fx.Node, region: Collection[fx.Node], passed: Collection[fx.Node]) -> set[fx.Node] | None:
    """Return ``start`` and the nodes derived from it up to the region, or None if anything else reads them."""
    tail, stack = {start}, [start]
    while stack:
        for user in stack.pop().users:
            if user in region or user in tail:
                continue
            if user not in passed and not reads_metadata(user):
                return None
            tail.add(user)
            stack.append(user)
    return tail


def escape(region: Collection[fx.Node], outputs: Collection[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Return an interior node and its user outside of the region, or None if there is none."""
    for node in region:
        if node not in outputs:
            for user in node.users:
                if user not in region:
                    return node, user
    return None


def detour(region: Collection[fx.Node], outputs: Collection[fx.Node]) -> fx.Node | None:
    """Return an outside node on a path from an output back into the region, or None if it is convex."""
    last = max(region)
    seen: set[fx.Node] = set()
    stack = [u for o in outputs for u in o.users if u not in region]
    while stack:
        node = stack.pop()
        if node in seen or not node < last:
            continue
        seen.add(node)
        for user in node.users:
            if user in region:
                return node
            stack.append(user)
    return None


def first_and_last(nodes: Iterable[Any]) -> tuple[Any, Any]:
    """Return the earliest and the latest of ``nodes`` in graph order."""
    ordered = sorted(nodes)
    return ordered[0], ordered[-1]
