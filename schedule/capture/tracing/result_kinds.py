"""Kinds of the results of code that a graph calls: the dtype, rank and device of a tensor, or None.

A forward's questions about them (``y.dtype``, ``y is None``) are answered while it is traced, for the recorded call. A
submodule may return something else later, by a flag of its own. So results that the answers depend on are checked::

    graph:     y = self.child(x);                                              return (y * 2).to(float32)
    compiled:  y = self.child(x);  check_kind(y, float32, 2, "cpu", "child");  return (y * 2).to(float32)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.effects import KIND, runs_other_code
from schedule.util.errors import ScheduleError


class Questions:
    """Questions of one forward about its values."""

    def __init__(self) -> None:
        self._seen: set[fx.Node] = set()

    def about(self, node: Any) -> None:
        """Mark the results of other code that the value of ``node`` is computed from."""
        pending = [node] if isinstance(node, fx.Node) else []
        while pending:
            node = pending.pop()
            if node in self._seen or node.op in ("placeholder", "get_attr"):
                continue
            self._seen.add(node)
            if is_result(node):
                spec = node.meta.get("spec")
                if isinstance(spec, TensorSpec):
                    node.meta[KIND] = (spec.dtype, spec.ndim, spec.device.type)
            else:
                pending += node.all_input_nodes


def is_result(node: fx.Node) -> bool:
    """Check whether ``node`` is a result of other code, a part of one, or an attribute of an object."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.target in (operator.getitem, getattr) and isinstance(node.args[0], fx.Node):
        return bool(node.args[0].meta.get("object")) or is_result(node.args[0])
    return runs_other_code(node)


def is_kind(value: Any, dtype: torch.dtype, rank: int, device: str) -> bool:
    """Check whether ``value`` is a dense tensor of this kind."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is dtype
        and value.dim() == rank
        and value.device.type == device
        and value.layout is torch.strided
    )


def check_kind(value: Any, dtype: torch.dtype, rank: int, device: str, call: str) -> None:
    """Raise unless ``value`` is a dense tensor of this kind (graph target).

    Raises:
        ScheduleError: it is another one than in the recorded call.
    """
    if not is_kind(value, dtype, rank, device):
        raise _other(call, value, f"a tensor of {dtype} with {rank} dimensions on {device}")


def check_none(value: Any, call: str) -> None:
    """Raise unless ``value`` is None (graph target).

    Raises:
        ScheduleError: it is something.
    """
    if value is not None:
        raise _other(call, value, "None")


def _other(call: str, value: Any, expected: str) -> ScheduleError:
    found = "None" if value is None else f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" in {value.layout}"
        found = f"a tensor of {value.dtype} with {value.dim()} dimensions on {value.device.type}{layout}"
    return ScheduleError(
        f"the result of {call} is {found}; it was {expected} in the recorded call, and the forward asks about it",
        fix="undo the schedule of this module, or schedule the model anew as it is now",
    )


def add_check(graph: fx.Graph, node: fx.Node) -> None:
    """Write the check of the result of ``node``, marked in its metadata."""
    kind = node.meta[KIND]
    with graph.inserting_after(node):
        graph.call_function(check_kind if kind else check_none, (node, *kind, _named(node)))


def _named(node: fx.Node) -> str:
    if node.target in (getattr, operator.getitem) and isinstance(node.args[0], fx.Node):
        of = _named(node.args[0])
        return f"{of}.{node.args[1]}" if node.target is getattr else f"{of}[{node.args[1]!r}]"
    return str(node.target) if node.op == "call_module" else node.name
