"""Assignments of a forward to attributes of modules, and lists that it assigns and changes afterwards.

Other code may read such an attribute while the forward runs. So if other code runs in between, the graph makes one
list, assigns it, and changes it where the forward does; and it checks that other code has left the list as it is::

    forward:   self.last = [None];  self.last[0] = x;  y = self.child(x);  return y + self.last[0]
    graph:     last = list([None]);  self.__dict__["last"] = last;  last[:] = [x];  y = self.child(x)
               check_items(last, [x], "self.last");  return y + x

They are read back during tracing. The graph executes them at its end, or where the forward does if other code runs
afterwards that may read them: a submodule, its hooks, a method of an object. If a check in the graph fails, they are
undone (:mod:`schedule.capture.specializing.rollback`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects.effects import graph_check, runs_other_code
from schedule.capture.effects.later_reads import LaterReads, check_same
from schedule.capture.graph.escaped_containers import contents, refuse_changed
from schedule.capture.graph.scalars import scalar_of
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.plain_values import is_atom, same
from schedule.capture.guards.sources import DictOf, Item, Source, described, submodule_path
from schedule.capture.python.state_reads import Reads
from schedule.capture.recording.structure import leaves
from schedule.util.errors import TraceError
from schedule.util.nodes import last_node

# -- Lists of a forward's own -------------------------------------------------------------------------------


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


# -- Assignments of a forward to attributes of modules ------------------------------------------------------


_TABLES = ("_buffers", "_parameters", "_modules")
_NOTHING = object()
_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class Assignments:
    """The assignments of one trace.

    Attributes:
        count: number of assignments, including those of the current value.
        lists: the lists among the assigned values.
    """

    def __init__(self, evaluator: Reads) -> None:
        self._evaluator = evaluator
        self._values: dict[tuple[str, str], Any] = {}
        self._places: dict[tuple[str, str], tuple[fx.Node, fx.Node | None]] = {}
        self._written: dict[fx.Node, tuple[tuple[str, str], Any]] = {}
        self._unchanged: dict[tuple[str, str], fx.Node] = {}  # assigned what it is, by a condition so far
        self.count = 0
        self.lists = AssignedLists(
            evaluator.tracer, evaluator.later, _is_storable, lambda why: evaluator.refused(why, _FIX)
        )

    def value(self, source: Source, name: str) -> tuple[Any] | None:
        """Return the value assigned to attribute ``name`` of the module at ``source``, in a tuple, or None."""
        path = submodule_path(source) if self._values else None
        if path is None or (path, name) not in self._values:
            return None
        self._check_kept(path, name)
        return (self._values[path, name],)

    def _check_kept(self, path: str, name: str) -> None:
        """Write a check that code that has run since the assignment did not assign the attribute too."""
        written, call = self._places[path, name]
        if call is not self._evaluator.later.call:
            self._places[path, name] = written, self._evaluator.later.call
            self.lists.node(self._values[path, name])
            holder, key, value = written.args
            own = self._evaluator.tracer.calls.traces_into(path)
            if not own or (not isinstance(value, fx.Node) and not is_atom(value)):
                raise self._evaluator.refused(
                    f"the forward reads attribute {name!r} back after other code has run", _FIX
                )
            tracer: Trace = self._evaluator.tracer
            with DisableTorchFunction():
                now = tracer.emit(operator.getitem, (holder, key))
                tracer.emit(check_same, (value, now, f"self.{path}.{name}" if path else f"self.{name}"))

    def assign(self, owner: Any, source: Source, name: str, value: Any) -> None:
        """Handle ``owner.name = value`` for an outside ``owner``: guard if unchanged, leave to the graph, or refuse."""
        self.count += 1
        evaluator, path = self._evaluator, submodule_path(source)
        own = vars(owner) if hasattr(owner, "__dict__") else {}
        table = next((t for t in _TABLES if isinstance(owner, nn.Module) and name in own.get(t, ())), "__dict__")
        current = (own if table == "__dict__" else own[table]).get(name, _NOTHING)
        target = Item(DictOf(source) if table == "__dict__" else Item(DictOf(source), table), name)
        written = f"{path}.{table}" if path else table
        if (path, name) not in self._values:
            if current is value and not is_atom(value):
                evaluator.read(value, target)
                return
            if is_atom(current) and not self._may_have_changed(path) and _equal(current, value):
                if path is not None and table == "__dict__" and not evaluator.was_compared(target):
                    self._unchanged[path, name] = self._emitted(written, name, value)
                evaluator.guard("same", target, current)
                return
        kind = type(owner).__name__
        if path is None or table in ("_parameters", "_modules"):
            raise evaluator.refused(f"the forward assigns attribute {name!r} of a {kind}, {described(source)}", _FIX)
        if (path, name) in self._unchanged:  # this assignment differs, so the first one is written too
            evaluator.forget(target)
            self._written[self._unchanged.pop((path, name))] = (path, name), current
        elif evaluator.was_compared(target):
            raise evaluator.refused(
                f"the forward assigns attribute {name!r} of a {kind}, which it reads before: a graph made while it is "
                f"{current!r} would hold for one call",
                _FIX,
            )
        if not all(_is_storable(leaf) for _, leaf in leaves(value)):
            raise evaluator.refused(f"the forward assigns an object to attribute {name!r} of a {kind}", _FIX)
        self._values[path, name] = value
        emitted = self._emitted(written, name, value)
        self._evaluator.later.assigned = True
        self._written[emitted] = (path, name), value
        self._places[path, name] = emitted, self._evaluator.later.call
        own = not evaluator.is_outside(value) and evaluator.may_write(value)
        if own and type(value) is list and all(map(_is_storable, value)):
            self.lists.add(value, described(target), emitted)

    def _may_have_changed(self, path: str | None) -> bool:
        """Check whether a submodule left as a call may have assigned its attributes by now."""
        if path is None or self._evaluator.later.call is None:
            return False
        return not self._evaluator.tracer.calls.traces_into(path)

    def _emitted(self, table: str, name: str, value: Any) -> fx.Node:
        tracer: Trace = self._evaluator.tracer
        with DisableTorchFunction():
            return tracer.emit(operator.setitem, (tracer.graph.get_attr(table), name, tracer.as_nodes(value)))

    def last(self) -> list[Any]:
        """Return the values assigned last."""
        return list(self._values.values())

    def complete(self, graph: fx.Graph, written: Callable[[Any], Any]) -> None:
        """Move assignments that no other code can read to the end of ``graph``, and drop those overwritten by then.

        Args:
            graph: the graph, complete except for its output.
            written: function to return a value, as it is at the end, in nodes.

        Raises:
            TraceError: the forward changes a container after other code could read it as an attribute.
        """
        self.lists.complete()
        for node in self._unchanged.values():
            graph.erase_node(node)
        moved: list[fx.Node] = []
        readers, at_next = 0, dict[tuple[str, str], int]()
        for node in reversed(graph.nodes):
            readers += runs_other_code(node) or node.target is check_same
            if node not in self._written:
                continue
            key, value = self._written[node]
            if readers > at_next.get(key, 0):  # it is read before it is overwritten
                self._refuse_changed(key[1], node, value)
            elif key in at_next:
                graph.erase_node(node)
            else:
                moved.insert(0, node)
            at_next[key] = readers
        for node in moved:
            holder, name, _ = node.args
            node.args = holder, name, written(self._written[node][1])
            last_node(graph).append(node)

    def _refuse_changed(self, name: str, node: fx.Node, value: Any) -> None:
        if self.lists.is_seen(value):
            return
        with DisableTorchFunction():
            now = self._evaluator.tracer.as_nodes(value)
        if isinstance(value, (list, dict)) and fx.node.map_aggregate(now, lambda leaf: leaf) != node.args[2]:
            raise self._evaluator.refused(f"the forward changes attribute {name!r} in place after assigning it", _FIX)


_FIX = "schedule its submodules instead, or keep state in buffers that are updated in place"


def _is_storable(leaf: Any) -> bool:
    """Check whether a graph can assign ``leaf``."""
    plain = is_atom(leaf) or scalar_of(leaf) is not None
    return plain or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter))


def _equal(current: Any, value: Any) -> bool:
    """Check whether an atom is assigned its current value.

    The comparison with a symbolic size becomes a guard of the trace.
    """
    if type(value) in _KINDS:
        return type(current) is _KINDS[type(value)] and bool(value == current)
    return same(value, current)
