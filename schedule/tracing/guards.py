"""From guards found while tracing to conditions that are checked before a graph runs.

A guard says: the graph holds only where this node computes the value seen. Where the node depends on nothing but
inputs' sizes, parameters and plain numbers it becomes a Python condition on the arguments; otherwise a check is
put into the graph, which is allowed only before anything that cannot be done twice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from schedule.errors import TraceError
from schedule.tracing.effects import has_effect, is_pure_query

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
}
_PURE_CALLS = {"min": min, "max": max, "float": float, "int": int, "abs": abs, "round": round}


class GuardMiss(Exception):
    """A check inside a graph failed; the caller runs the original forward."""


def check(value: Any, expected: Any, condition: str) -> None:
    """Raise :class:`GuardMiss` unless ``value`` is what it was in the recorded run."""
    if value != expected:
        raise GuardMiss(f"{condition} is {value}, was {expected}")


class NotBeforehand(Exception):
    """The value is only known while the graph runs."""


def expression(node: Any, inputs: dict[fx.Node, str]) -> str:
    """Python source that computes ``node`` from ``self`` and the arguments.

    Args:
        node: a graph node or a constant.
        inputs: how each placeholder is written.

    Raises:
        NotBeforehand: it depends on more than sizes and numbers.
    """
    if not isinstance(node, fx.Node):
        return repr(node)
    if node in inputs:
        return inputs[node]
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_method" and (node.target == "numel" or (node.meta.get("opaque") and is_pure_query(node.target))):
        parts = [expression(arg, inputs) for arg in node.args]
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    if node.op != "call_function":
        raise NotBeforehand(node.name)
    return _call_expression(node, [expression(arg, inputs) for arg in node.args])


def _call_expression(node: fx.Node, parts: list[str]) -> str:
    if node.target is getattr:
        return f"{parts[0]}.{node.args[1]}"
    if node.target is operator.getitem and isinstance(node.args[1], int):
        return f"{parts[0]}[{parts[1]}]"
    if node.target in _INFIX:
        return f"({parts[0]} {_INFIX[node.target]} {parts[1]})"
    if node.target is operator.neg:
        return f"(-{parts[0]})"
    if node.target is operator.not_:
        return f"(not {parts[0]})"
    name = getattr(node.target, "__name__", "")
    if _PURE_CALLS.get(name) is node.target:
        return f"{name}({', '.join(parts)})"
    raise NotBeforehand(node.name)


def conditions(graph: fx.Graph, guards: dict[fx.Node, Any], inputs: dict[fx.Node, str]) -> list[str]:
    """Python conditions for ``guards``; those that can only be decided on the way become checks in ``graph``."""
    found: list[str] = []
    for node, value in guards.items():
        try:
            text = expression(node, inputs)
        except NotBeforehand:
            _insert_check(graph, node, value)
            continue
        if isinstance(value, bool):
            found.append(text if value else f"not {text}")
        elif isinstance(value, torch.dtype):
            found.append(f"{text} is {value}")
        else:
            found.append(f"{text} == {value!r}")
    return list(dict.fromkeys(found))


def _insert_check(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    for earlier in graph.nodes:
        if earlier is node:
            break
        if has_effect(earlier):
            raise TraceError(
                f"a branch depends on {node.format_node()}, which is only known after "
                f"{earlier.format_node()} has changed state",
                where=node.meta.get("source", ""),
                fix="schedule the submodules instead, or mark the module that holds the branch as a leaf",
            )
    with graph.inserting_after(node):
        inserted = graph.call_function(check, (node, value, node.name))
    inserted.meta["source"] = node.meta.get("source", "")
