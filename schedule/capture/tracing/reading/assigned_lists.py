"""Lists of a forward's own, assigned to attributes of modules and changed in place afterwards.

Other code may read such an attribute while the forward runs. So if other code runs in between, the graph makes one
list, assigns it, and changes it where the forward does; and it checks that other code has left the list as it is::

    forward:   self.last = [None];  self.last[0] = x;  y = self.child(x);  return y + self.last[0]
    graph:     last = list([None]);  self.__dict__["last"] = last;  last[:] = [x];  y = self.child(x)
               check_items(last, [x], "self.last");  return y + x
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.tracing.effects import graph_check
from schedule.capture.tracing.handed_containers import contents, refuse_changed
from schedule.capture.tracing.later_reads import LaterReads
from schedule.capture.tracing.trace import Trace
from schedule.util.errors import TraceError
from schedule.util.nodes import last_node


@graph_check
def check_items(found: Any, expected: Any, what: str) -> None:
    """Raise unless a list holds the items put in by the forward (graph target).

    Raises:
        ScheduleError: code that the graph called has changed it.
    """
    told = f"{what} was changed by code that the forward calls; it was not in the recorded call"
    refuse_changed(contents(found), contents(expected), told)


@dataclass
class _List:
    """One such list.

    Attributes:
        value: the list, with tracked values.
        what: the attribute, as a user would write it.
        assignments: the nodes that assign it.
        items: what it holds in the graph, in nodes.
        last: the last node of the graph when the forward used it last.
        call: the last node that ran other code by then.
        node: the node that makes it, if it has one.
    """

    value: list[Any]
    what: str
    assignments: list[fx.Node]
    items: list[Any]
    last: fx.Node
    call: fx.Node | None
    node: fx.Node | None = None


class AssignedLists:
    """The assigned lists of one trace.

    Args:
        tracer: the trace.
        later: its reads after other code has run.
        is_storable: whether a graph can put a value into a list.
        refused: makes the error for what a graph cannot repeat.
    """

    def __init__(
        self,
        tracer: Trace,
        later: LaterReads,
        is_storable: Callable[[Any], bool],
        refused: Callable[[str], TraceError],
    ) -> None:
        self._tracer, self._later, self._is_storable, self._refused = tracer, later, is_storable, refused
        self._lists: dict[int, _List] = {}

    def add(self, value: list[Any], what: str, assignment: fx.Node) -> None:
        """Follow ``value``, a list of the forward's own, assigned by the node ``assignment``."""
        known = self._lists.get(id(value))
        if known is None:
            known = _List(value, what, [], self._now(value), assignment, self._later.call)
            self._lists[id(value)] = known
            self._tracer.containers.found_in_object(value, lambda: self._used(known))
        known.assignments.append(assignment)
        if known.node is not None:
            assignment.args = (*assignment.args[:2], known.node)

    def is_seen(self, value: Any) -> bool:
        """Check whether ``value`` is such a list, and other code has run since it was assigned."""
        known = self._lists.get(id(value))
        return known is not None and (known.node is not None or known.call is not self._later.call)

    def node(self, value: Any) -> fx.Node | None:
        """Return a node of a list as it is now, for other code to find; None for any other value."""
        known = self._lists.get(id(value))
        if known is None:
            return None
        node = self._written(known)
        self._update(known)
        return node

    def complete(self) -> None:
        """Write the last changes of the lists known to other code."""
        for each in self._lists.values():
            if self.is_seen(each.value):
                self._update(each)

    def _used(self, used: _List) -> None:
        """Handle a use by the forward, perhaps to change the list next."""
        call = self._later.call
        if call is not used.call:
            self._update(used)
            node, used.call = self._written(used), call
            with DisableTorchFunction():
                self._tracer.emit(check_items, (node, [*used.items], used.what))
        used.last = last_node(self._tracer.graph)

    def _update(self, changed: _List) -> None:
        """Write a change since the last use, right behind it."""
        if not all(map(self._is_storable, changed.value)):
            raise self._refused(f"the forward puts an object into {changed.what} after assigning it")
        now = self._now(changed.value)
        if [*map(_exact, now)] == [*map(_exact, changed.items)]:
            return
        node, graph = self._written(changed), self._tracer.graph
        present = set(graph.nodes)
        while changed.last not in present:  # it was not needed
            changed.last = changed.last.prev
        with graph.inserting_after(changed.last):
            written = self._tracer.emit(operator.setitem, (node, slice(None), now))
        if not all(each < written for each in written.all_input_nodes):
            raise self._refused(f"the forward changes {changed.what} in place after assigning it")
        written.meta["local"] = True
        changed.items = now

    def _written(self, made: _List) -> fx.Node:
        """Return the node to make the list, before its first assignment."""
        if made.node is None:
            first = made.assignments[0]
            with self._tracer.graph.inserting_before(first):
                made.node = self._tracer.emit(list, (first.args[2],))
            for each in made.assignments:
                each.args = (*each.args[:2], made.node)
        return made.node

    def _now(self, value: Sequence[Any]) -> list[Any]:
        with DisableTorchFunction():
            return [self._tracer.node_of(item) for item in value]


def _exact(item: Any) -> tuple[type, Any]:
    """Return an item as compared exactly: 1 is not True, 0.0 is not -0.0."""
    return type(item), item if isinstance(item, fx.Node) else repr(item)
