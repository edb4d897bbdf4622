"""Kinds of the results of code that a graph calls: the dtype, rank and device of a tensor, or None.

A forward's questions about them (``y.dtype``, ``y is None``) are answered while it is traced, for the recorded call. A
submodule may return something else later, by a flag of its own. So results that the answers depend on are checked::

    graph:     y = self.child(x);                                              return (y * 2).to(float32)
    compiled:  y = self.child(x);  check_kind(y, float32, None, None, "child");  return (y * 2).to(float32)
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from schedule.capture.effects.effects import KIND, LENGTH, runs_other_code
from schedule.capture.recording.structure import TensorSpec
from schedule.util.errors import ScheduleError

PROPERTIES = ("dtype", "rank", "device")
"""What a forward may ask for of a tensor, apart from sizes and data."""

LAYOUT = "layout"
"""A further question, whose answer is taken to be that of a dense tensor."""


class Questions:
    """Questions of one forward about its values.

    Attributes:
        numbers: numbers from other code that the answers depend on, by their class.
    """

    def __init__(self) -> None:
        self.numbers: dict[fx.Node, None] = {}
        self._seen: dict[fx.Node, set[str]] = {}

    def about(self, node: Any, asked: Collection[str]) -> None:
        """Mark the results of other code that the value of ``node`` is computed from.

        Args:
            node: a node, or a constant.
            asked: of :data:`PROPERTIES` and :data:`LAYOUT`; in any case, the result has to be a tensor.
        """
        pending, asked = [node] if isinstance(node, fx.Node) else [], {*asked}
        while pending:
            node = pending.pop()
            seen = self._seen.get(node)
            if seen is not None and asked <= seen:
                continue
            seen = self._seen.setdefault(node, set())
            seen |= asked
            if not is_result(node):
                pending += node.all_input_nodes
            elif isinstance(spec := node.meta.get("spec"), TensorSpec):
                kind = {"dtype": spec.dtype, "rank": spec.ndim, "device": spec.device.type}
                node.meta[KIND] = tuple(kind[name] if name in seen else None for name in PROPERTIES)
            elif type(spec) in (int, float, bool):
                self.numbers[node] = None

    def concern_layout(self, node: fx.Node) -> bool:
        """Check whether an answer depends on the layout of a placeholder."""
        return LAYOUT in self._seen.get(node, ())

    def concern(self, node: fx.Node) -> bool:
        """Check whether an answer depends on the dtype, rank or device of a placeholder."""
        return bool(self._seen.get(node))


def is_result(node: fx.Node) -> bool:
    """Check whether ``node`` is a result of other code, a part of one, or an attribute of an object."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.target in (operator.getitem, getattr) and isinstance(node.args[0], fx.Node):
        return bool(node.args[0].meta.get("object")) or is_result(node.args[0])
    return runs_other_code(node)


def is_of_object(node: fx.Node) -> bool:
    """Check whether ``node`` reads an attribute of an object, or a part of one."""
    while node.target in (getattr, operator.getitem) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if node.meta.get("object"):
            return True
    return False


def is_kind(value: Any, dtype: torch.dtype | None, rank: int | None, device: str | None) -> bool:
    """Check whether ``value`` is a dense tensor of this kind; None stands for any."""
    return (
        isinstance(value, torch.Tensor)
        and (dtype is None or value.dtype is dtype)
        and (rank is None or value.dim() == rank)
        and (device is None or value.device.type == device)
        and value.layout is torch.strided
    )


def check_kind(value: Any, dtype: torch.dtype | None, rank: int | None, device: str | None, call: str) -> None:
    """Raise unless ``value`` is a dense tensor of this kind (graph target); None stands for any.

    Raises:
        ScheduleError: it is another one than in the recorded call.
    """
    if not is_kind(value, dtype, rank, device):
        raise _other(call, value, _described("a tensor", dtype, rank, device))


def check_none(value: Any, call: str) -> None:
    """Raise unless ``value`` is None (graph target).

    Raises:
        ScheduleError: it is something.
    """
    if value is not None:
        raise _other(call, value, "None")


def check_length(value: Any, length: int, call: str) -> None:
    """Raise unless ``value`` is a tuple with this number of items (graph target).

    Raises:
        ScheduleError: it is something else.
    """
    if type(value) is not tuple or len(value) != length:
        raise _other(call, value, f"a tuple of {length}")


def _other(call: str, value: Any, expected: str) -> ScheduleError:
    found = "None" if value is None else f"a {type(value).__name__}"
    if type(value) is tuple:
        found = f"a tuple of {len(value)}"
    if isinstance(value, torch.Tensor):
        tensor = "a tensor" if value.layout is torch.strided else f"a {value.layout} tensor"
        found = _described(tensor, value.dtype, value.dim(), value.device.type)
    return ScheduleError(
        f"the result of {call} is {found}; it was {expected} in the recorded call, and the forward asks about it",
        fix="undo the schedule of this module, or schedule the model anew as it is now",
    )


def _described(tensor: str, dtype: torch.dtype | None, rank: int | None, device: str | None) -> str:
    parts = [] if dtype is None else [f"of {dtype}"]
    parts += [] if rank is None else [f"with {rank} dimensions"]
    parts += [] if device is None else [f"on {device}"]
    return " ".join([tensor, *parts])


def add_check(graph: fx.Graph, node: fx.Node) -> None:
    """Write the check of the result of ``node``, marked in its metadata."""
    with graph.inserting_after(node):
        if LENGTH in node.meta:
            graph.call_function(check_length, (node, node.meta[LENGTH], _named(node)))
        elif kind := node.meta[KIND]:
            graph.call_function(check_kind, (node, *kind, _named(node)))
        else:
            graph.call_function(check_none, (node, _named(node)))


def _named(node: fx.Node) -> str:
    if node.target in (getattr, operator.getitem) and isinstance(node.args[0], fx.Node):
        of = _named(node.args[0])
        return f"{of}.{node.args[1]}" if node.target is getattr else f"{of}[{node.args[1]!r}]"
    return str(node.target) if node.op == "call_module" else node.name
