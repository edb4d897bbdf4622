"""Restoring of input objects changed by a forward, such as caches, and of attributes that it assigns.

A check inside a graph may fail after the graph has written to a cache; the original forward then needs the cache as it
was before. Only the structure is saved, not the data of its tensors: most caches replace old tensors with new ones, so
putting back the old tensors is enough.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.schemas import is_custom
from schedule.capture.effects.effects import assigned_attribute, changes_object, has_effect, is_local
from schedule.capture.snapshots.run_effects import MISSING, Entry
from schedule.util.errors import ScheduleError

FEW = 16
"""Largest number of elements of a tensor saved with its data, such as a counter."""

_PASSED_BY = (nn.Module, type, types.FunctionType, types.ModuleType)
Restore = Callable[[], None]


def changes_given(node: fx.Node) -> bool:
    """Check whether the node changes only the structure of an input object or a part of it."""
    if not changes_object(node) or node.meta.get("in_place"):
        return False
    return _origin(node.all_input_nodes[0]).op == "placeholder"


def can_be_undone(node: fx.Node) -> bool:
    """Check whether the node makes no permanent change outside the graph.

    Submodule outputs can be replayed, unless the call changes a tensor in place that exists outside. A custom operator
    may do anything: its schema is not checked.
    """
    if node.op == "call_module":
        return not node.meta.get("writes")
    if is_custom(node.target):
        return False
    return not has_effect(node) or is_local(node) or changes_given(node) or assigned_attribute(node) is not None


def first_lasting(graph: fx.Graph) -> fx.Node | None:
    """Return the first node of ``graph`` with a change that cannot be undone, or None."""
    return next((node for node in graph.nodes if not can_be_undone(node)), None)


def _origin(node: fx.Node) -> fx.Node:
    """Return the object of ``node``: the first input of its chain of calls."""
    while node.op in ("call_function", "call_method") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def versions(value: Any) -> dict[int, int]:
    """Return the version counter of each tensor in ``value`` with more than :data:`FEW` elements, by id."""
    return {id(each): each._version for each in parts_of([value]) if _is_big(each)}


def _is_big(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > FEW and not value.is_inference()


def restoring(objects: Iterable[Any]) -> list[Restore]:
    """Return functions to restore the current structure of ``objects``, one for each part.

    Raises (when called):
        ScheduleError: a tensor of more than :data:`FEW` elements was changed in place since.
    """
    return [_KINDS[kind](part) for part in parts_of(objects) for kind in _KINDS if isinstance(part, kind)]


def restoring_attributes(module: nn.Module, assigned: Iterable[tuple[str, str]]) -> list[Restore]:
    """Return functions to restore attributes of ``module``, given by table and name, to their current values."""
    tables = [(operator.attrgetter(table)(module), name) for table, name in assigned]
    entries = [Entry(table, name, table.get(name, MISSING), None) for table, name in tables]
    return [partial(entry.put, entry.before) for entry in entries]


def parts_of(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors, lists and dicts in ``objects``, each once."""
    known: set[int] = set()
    pending = list(objects)
    while pending:
        value = pending.pop()
        if id(value) in known or isinstance(value, _PASSED_BY):
            continue
        known.add(id(value))
        if isinstance(value, tuple(_KINDS)):
            yield value
        if isinstance(value, (list, tuple, set, deque)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif not isinstance(value, torch.Tensor):
            pending.append(getattr(value, "__dict__", None))


def _list(value: list[Any]) -> Restore:
    items = list(value)

    def restore() -> None:
        value[:] = items

    return restore


def _table(value: dict[Any, Any] | set[Any]) -> Restore:
    items: Any = dict(value) if isinstance(value, dict) else set(value)

    def restore() -> None:
        value.clear()
        value.update(items)

    return restore


def _tensor(tensor: torch.Tensor) -> Restore:
    counted = not tensor.is_inference()  # inference tensors have no version counter
    version = tensor._version if counted else None
    data = None if counted and tensor.numel() > FEW else tensor.detach().clone()

    def restore() -> None:
        if counted and tensor._version == version:
            return
        if data is None:
            raise ScheduleError(
                f"a branch of the forward came out unlike in the recorded run after a tensor of shape "
                f"{tuple(tensor.shape)} in a cache was written to in place, so the original forward cannot run either",
                fix="undo the schedule of this module, or schedule it anew with a call like this one",
            )
        with torch.no_grad():
            tensor.copy_(data)

    return restore


def _deque(value: deque[Any]) -> Restore:
    items = list(value)

    def restore() -> None:
        value.clear()
        value.extend(items)

    return restore


_KINDS: dict[type, Callable[[Any], Restore]] = {
    torch.Tensor: _tensor,
    list: _list,
    bytearray: _list,
    dict: _table,
    set: _table,
    deque: _deque,
}
