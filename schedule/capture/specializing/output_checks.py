"""Run-time checks on the structure of the outputs of submodule calls.

A graph is valid for outputs of the recorded structure: the same number of items, the same fields, None in the same
locations. A submodule may change its output structure later, for example by a flag set after tracing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from schedule.capture.effects.effects import graph_check
from schedule.capture.effects.restoring import first_lasting
from schedule.capture.graph.output_structure import Expected, Field, Path, Value, stands_for_tensor
from schedule.capture.specializing.conditions import GuardMiss
from schedule.util.errors import ScheduleError

_LEAVES = ("tensor", "object")
"""Kinds that are checked only of what the graph uses."""


class OutputMiss(GuardMiss):
    """Output of a submodule with a structure other than in the recorded run."""


@graph_check
def check_output(value: Any, expected: Expected, call: str, final: bool) -> None:
    """Raise :class:`OutputMiss` unless ``value`` has the same structure as in the recorded run.

    Args:
        value: what the submodule returned.
        expected: the recorded kinds by path.
        call: name of the submodule or function, for messages.
        final: whether the graph has already changed something, so the original forward would change it a second time.

    Raises:
        ScheduleError: the structure differs and ``final`` is true, so the original forward cannot run any more.
    """
    for path, kind in expected:
        found = _kind(value, path, kind)
        if found != kind:
            where = f"the output of {call}" + "".join(f"[{step!r}]" for step in path)
            why = f"{where} is {found}, was {kind} when it was recorded"
            if final:
                raise ScheduleError(
                    f"{why}; a tensor was written to in place by then, so the original forward cannot run either",
                    fix="undo, or schedule the model anew with inputs and settings as they are now",
                )
            raise OutputMiss(why)


def _kind(value: Any, path: Path, kind: Any) -> Any:
    try:
        for step in path:
            value = getattr(value, step.name) if isinstance(step, Field) else value[step]
    except (KeyError, IndexError, TypeError, AttributeError):
        return "missing"
    if isinstance(kind, Value):
        return Value(value)
    if value is None:
        return "none"
    if isinstance(kind, torch.dtype):
        return value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    if stands_for_tensor(value):
        return "tensor"
    if kind == "object" and not isinstance(value, (tuple, list, dict)):
        return "object"
    if isinstance(kind, int) and isinstance(value, (tuple, list)):
        return len(value)
    if isinstance(kind, tuple) and isinstance(value, dict):
        return kind if set(value) <= set(kind) else tuple(value)
    return type(value).__name__


def insert_checks(outputs: dict[fx.Node, Expected]) -> None:
    """Insert a check after each call of a submodule or function of indices with a structured output.

    Args:
        outputs: nodes of calls → the structure of what they returned.
    """
    lasting = first_lasting(next(iter(outputs)).graph) if outputs else None
    for node, kinds in outputs.items():
        if not kinds:
            continue
        final = lasting is not None and lasting <= node
        expected = tuple((path, kind) for path, kind in kinds if not _is_leaf(kind) or _is_used(node, path, kind))
        with node.graph.inserting_after(node):
            name = node.target if isinstance(node.target, str) else node.name
            inserted = node.graph.call_function(check_output, (node, expected, name, final))
        inserted.meta["source"] = node.meta.get("source", "")


def _is_leaf(kind: Any) -> bool:
    return kind in _LEAVES or isinstance(kind, torch.dtype)


def _is_used(node: fx.Node, path: Path, kind: Any) -> bool:
    """Check whether the graph uses the tensor or object at ``path`` in the output of ``node``."""
    for step in path:
        read, key = (getattr, step.name) if isinstance(step, Field) else (operator.getitem, step)
        item = next((user for user in node.users if user.target is read and user.args[1] == key), None)
        if item is None:
            return False
        node = item
    return bool(node.users) and (kind != "object" or bool(node.meta.get("object")))
