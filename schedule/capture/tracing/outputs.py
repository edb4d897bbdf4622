"""Run-time checks on the structure of the outputs of submodule calls.

A graph is valid for outputs of the recorded structure: the same number of items, the same fields, None in the same
locations. A submodule may change its output structure later, for example by a flag set after tracing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from schedule.capture.recording.structure import is_plain_dataclass, is_plain_mapping
from schedule.capture.tracing.effects import graph_check
from schedule.capture.tracing.guards import GuardMiss
from schedule.capture.tracing.parts import is_record
from schedule.capture.tracing.restoring import first_lasting
from schedule.util.errors import ScheduleError

_VALUES = (str, torch.dtype)


class Field(NamedTuple):
    """Step of a path to an attribute of a dataclass."""

    name: str

    def __repr__(self) -> str:
        return self.name


class Value(NamedTuple):
    """Kind of a string or dtype: the graph is made for this one alone."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


Path = tuple[Any, ...]
Expected = tuple[tuple[Path, Any], ...]
"""Paths in an output, each with its kind: ``"tensor"``, ``"object"``, ``"none"``, a number of items, names of fields,
or a :class:`Value`."""


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
    if _stands_for_tensor(value):
        return "tensor"
    if kind == "object" and not isinstance(value, (tuple, list, dict)):
        return "object"
    if isinstance(kind, int) and isinstance(value, (tuple, list)):
        return len(value)
    if isinstance(kind, tuple) and isinstance(value, dict):
        return kind if set(value) <= set(kind) else tuple(value)
    return type(value).__name__


def _stands_for_tensor(value: Any) -> bool:
    """Check whether ``value`` is a tensor, or an object in the place of one, such as weights that were never made."""
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__")


def insert_checks(outputs: dict[fx.Node, Any]) -> None:
    """Insert a check after each call of a submodule or function of indices with a structured output.

    Args:
        outputs: nodes of calls → the tracked values they returned.
    """
    lasting = first_lasting(next(iter(outputs)).graph) if outputs else None
    for node, value in outputs.items():
        if (
            not isinstance(value, (tuple, list, *_VALUES))
            and not is_plain_mapping(value)
            and not _is_plain_record(value)
        ):
            continue
        final = lasting is not None and lasting <= node
        with node.graph.inserting_after(node):
            name = node.target if isinstance(node.target, str) else node.name
            arguments = (node, tuple(_expected(node, value, ())), name, final)
            inserted = node.graph.call_function(check_output, arguments)
        inserted.meta["source"] = node.meta.get("source", "")


def _expected(node: fx.Node | None, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the properties required by the rest of the graph: structure, None values, and used tensors."""
    if value is None:
        yield path, "none"
    elif _stands_for_tensor(value):
        if node is not None and node.users:
            yield path, "tensor"
    elif isinstance(value, (tuple, list)):
        yield path, len(value)
        for index, item in enumerate(value):
            yield from _expected(_item(node, index), item, (*path, index))
    elif is_plain_mapping(value) and all(isinstance(key, str) for key in value):
        yield path, tuple(value)
        for key, item in value.items():
            yield from _expected(_item(node, key), item, (*path, key))
    elif _is_plain_record(value):
        for name in value.__dataclass_fields__:
            yield from _expected(_item(node, name, getattr), getattr(value, name), (*path, Field(name)))
    elif isinstance(value, _VALUES):
        yield path, Value(value)
    elif node is not None and node.meta.get("object") and node.users:
        yield path, "object"


def _item(node: fx.Node | None, key: Any, read: Any = operator.getitem) -> fx.Node | None:
    users = () if node is None else node.users
    return next((user for user in users if user.target is read and user.args[1] == key), None)


def _is_plain_record(value: Any) -> bool:
    return is_record(value) and is_plain_dataclass(value)
