"""Values that a graph returns, stores or hands to other code, with their classes and identities.

FX writes containers of nodes as lists, tuples and dicts. Other code may notice more: the class of a result
(``torch.Size``, ``torch.return_types.max``, ``ModelOutput``), whether two lists are one, and whether a tuple is the
caller's. A container with such a property becomes a node of its own.

Lists, dicts and dataclasses that a submodule returns, and that it may keep, so that other code changes them.

The trace has the items of when the call returned. Where the forward reads such a container after other code has run,
the graph checks that it still has them::

    forward:  r = self.child(x);  y = self.other(x);                                      return y + r[0]
    graph:    r = self.child(x);  y = self.other(x);  check_returned(r, [r[0]], "child");  return y + r[0]
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects.effects import graph_check
from schedule.capture.graph.escaped_containers import contents, is_same, refuse_changed
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.plain_values import is_record, parts
from schedule.capture.python.evaluator import Evaluator
from schedule.capture.recording.structure import (
    attributes_beside,
    constructor_arguments,
    is_as_constructed,
    is_dataclass_value,
    is_plain_dataclass,
    is_plain_mapping,
    with_items,
)

# -- Lists --------------------------------------------------------------------------------------------------


def watch_returned(tracer: Trace, value: Any, node: fx.Node) -> list[Any]:
    """Write a check where the forward reads a container in ``value``, the result of ``node``, after other code.

    Returns:
        The lists and dicts, which the forward must not change, because a graph would not.
    """
    checked, expected = tracer.last_call, contents(value)

    def read_again() -> None:
        nonlocal checked
        call = tracer.last_call
        if call is not checked and is_same(contents(value), expected):  # else the forward has changed it
            checked = call
            with DisableTorchFunction():
                tracer.emit(check_returned, (node, tracer.as_nodes(expected), str(node.target)))

    containers = tracer.containers.returned(value, read_again)
    return [each for each in containers if type(each) in (list, dict)]


@graph_check
def check_returned(value: Any, expected: Any, call: str) -> None:
    """Raise unless the containers in ``value``, returned by a call, hold what they did then (graph target).

    Raises:
        ScheduleError: code that the graph called since has changed them.
    """
    told = f"a list or dict that {call} returned was changed by code that the forward called since"
    refuse_changed(contents(value), contents(expected), f"{told}; it was not in the recorded call")


# -- Values that a graph returns ----------------------------------------------------------------------------


class _Tracer(Trace, Protocol):
    evaluator: Evaluator

    def container_input(self, value: Any) -> fx.Node | None:
        """Return a placeholder for a container among the arguments, or None for any other value."""

    def outside_container(self, value: Any, required: bool) -> fx.Node | None:
        """Return the node of a container that the forward did not make, or None; raise if it is ``required``."""


class Written:
    """Nodes of values that leave a graph together.

    Args:
        tracer: the trace.
        values: the values.
        returned: whether the graph returns or stores them; otherwise it hands them to code that it calls.
    """

    def __init__(self, tracer: _Tracer, *values: Any, returned: bool) -> None:
        self._tracer, self._returned = tracer, returned
        self._counts = Counter[int]()
        self._made: dict[int, Any] = {}
        with DisableTorchFunction():
            for value in values:
                self._count(value)

    def of(self, value: Any) -> Any:
        """Return ``value``, one of the values or a part of one, as nodes and plain containers of nodes."""
        with DisableTorchFunction():
            return self._of(value)

    def _count(self, value: Any) -> None:
        """Count how often each container occurs."""
        if found := parts(value):
            self._counts[id(value)] += 1
            for part in found if self._counts[id(value)] == 1 else ():
                self._count(part)

    def _of(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if not isinstance(value, (list, tuple, dict)) and not is_record(value):
            return self._tracer.as_nodes(value)
        written = self._from_outside(value) or self._assigned(value)
        if written is None:
            written = self._rebuilt(value)
        if self._counts[id(value)] > 1:
            written = written if isinstance(written, fx.Node) else self._tracer.emit(type(written), (written,))
            self._made[id(value)] = written
        return written

    def _from_outside(self, value: Any) -> Any:
        """Return the node of a container that the forward was given or has read, or None."""
        if isinstance(value, tuple):
            return self._tracer.container_input(value) if self._returned else None
        node = self._tracer.container_input(value)
        if node is not None or not self._tracer.is_outside(value):
            return node
        is_container = isinstance(value, (list, dict))
        return self._tracer.outside_container(value, self._returned) if is_container else self._tracer.node_of(value)

    def _assigned(self, value: Any) -> fx.Node | None:
        """Return the node of a list assigned to an attribute by the forward, if other code may find it there."""
        lists = self._tracer.evaluator.assignments.lists
        return lists.node(value) if lists.is_seen(value) or not self._returned else None

    def _rebuilt(self, value: Any) -> Any:
        self._tracer.containers.read(value)
        cls = type(value)
        if isinstance(value, (list, tuple)):
            items = [self._of(item) for item in value]
            if isinstance(value, list):
                return items
            if cls is tuple:
                return tuple(items)
            if not hasattr(value, "_fields"):
                return self._tracer.emit(cls, (tuple(items),))
            return self._tracer.emit(cls, tuple(items)) if self._returned else cls(*items)
        if is_plain_mapping(value) or (self._returned and is_record(value)) or is_plain_dataclass(value):
            return self._fields(value)
        return self._tracer.node_of(value)

    def _fields(self, value: Any) -> Any:
        names = list(value) if isinstance(value, dict) else list(value.__dataclass_fields__)
        found = {n: self._of(value[n] if isinstance(value, dict) else getattr(value, n)) for n in names}
        if type(value) is dict:
            return found
        if is_plain_mapping(value) and not is_as_constructed(value):
            beside = {name: self._of(each) for name, each in attributes_beside(value).items()}
            fields, others = constructor_arguments(type(value), found, beside)
            return self._tracer.emit(with_items, (self._tracer.emit(type(value), (), fields), (*found,), others))
        return self._tracer.emit(type(value), *(((), found) if is_dataclass_value(value) else ((found,),)))
