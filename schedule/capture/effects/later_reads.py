"""Reads of Python state after other code has run in a call: a submodule, a hook, a method of an object.

All guards are checked before a graph runs. Code that the graph calls may change what they are on, so the guards on
what the forward reads behind such a call are checked again there::

    graph:     y = self.child(x);                                   return y * 2
    compiled:  y = self.child(x);  state_after_child(self);          return y * 2

The guards are metadata of the call's node. Each such node carries those of all later reads, and the compiled graph
checks the ones up to the next such node: if a rewrite removes a call, the one before it checks what was read behind it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn

from fused.torch_internals.compiled_checks import CompiledCheck
from schedule.capture.effects.effects import KIND, LENGTH, graph_check, remove_dead, runs_other_code
from schedule.capture.effects.regions import REGION_FUNCTIONS
from schedule.capture.effects.result_kinds import add_check, is_of_object, is_result
from schedule.capture.graph.escaped_containers import add_checks, hands_containers
from schedule.capture.guards.guard import Guard
from schedule.capture.guards.guard_set import GuardSet
from schedule.capture.guards.sources import described
from schedule.capture.recording.structure import original_class
from schedule.util.errors import ScheduleError

Later = tuple[tuple[str, GuardSet], ...]
"""Guards on reads behind a node, by stretches between calls of other code, each with the path of the module."""

LATER = "later_reads"
AGAIN = "again"
"""Key of the metadata of checks in a graph that are also made before it runs: other code may have changed the state."""
_MODULE = "__call__.__self__"  # FX reads attributes of the module, and this one is the module


class LaterReads:
    """Guards of one trace on reads after calls of other code.

    Args:
        graph: the graph written by the trace.

    Attributes:
        assigned: whether the graph assigns attributes of modules.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self.assigned = False
        self._last: fx.Node | None = None
        self._call: fx.Node | None = None
        self._found: dict[fx.Node, dict[Hashable, Guard]] = {}
        self._places: dict[int, tuple[Any, fx.Node | None, fx.Node | None]] = {}
        self._asked: dict[Hashable, fx.Node | None] = {}

    @property
    def call(self) -> fx.Node | None:
        """The last node that runs other code, or begins or ends a region behind such a node."""
        last = next(iter(reversed(self._graph.nodes)), None)
        for node in reversed(self._graph.nodes):
            if node is self._last or node is self._call:
                break
            if runs_other_code(node) or (node.target in REGION_FUNCTIONS and self._is_behind_call(node)):
                self._call = node
                break
        self._last = last
        return self._call

    def _is_behind_call(self, node: fx.Node) -> bool:
        if self._call is not None:
            return True
        while node.op != "root":
            if runs_other_code(node):
                return True
            node = node.prev
        return False

    def add(self, key: Hashable, guard: Guard) -> None:
        """Add a guard, identified by ``key``, on what the forward reads at this point."""
        call = self.call
        if call is not None and guard.kind != "computes_in":  # the outputs of the submodule tell
            self._found.setdefault(call, {})[key] = guard

    def is_due(self, key: Hashable) -> bool:
        """Check whether what ``key`` identifies is read for the first time, or other code has run since it was."""
        before, call = self._asked.get(key, self), self.call
        self._asked[key] = call
        return before is not call

    def note(self, value: Any) -> None:
        """Remember where the forward reads ``value``, a tensor or another object, for the first and the last time."""
        _, first, _ = self._places.get(id(value), (value, self.call, None))
        self._places[id(value)] = value, first, self.call

    def place(self, value: Any) -> tuple[fx.Node | None, fx.Node | None]:
        """Return the calls behind which ``value`` was read for the first and the last time; None for none."""
        _, first, last = self._places.get(id(value), (value, self.call, self.call))
        return first, last

    @contextmanager
    def writing_behind(self, call: fx.Node | None) -> Iterator[None]:
        """Write nodes behind ``call``, or behind the inputs if it is None: before other code and assignments since."""
        if call is self.call and not self.assigned:
            yield
            return
        behind = iter(self._graph.nodes) if call is None else iter((call.next,))
        first = next((node for node in behind if node.op not in ("placeholder", "root")), None)
        with contextlib.nullcontext() if first is None else self._graph.inserting_before(first):
            yield

    def write(self) -> None:
        """Write the guards to the metadata of the graph's nodes."""
        later: Later = ()
        found = self._at_kept_calls()
        for node in reversed(self._graph.nodes):
            if node in found:
                later = (("", GuardSet(found[node].values())), *later)
            if later and _is_call(node):
                node.meta[LATER] = later

    def _at_kept_calls(self) -> dict[fx.Node, dict[Hashable, Guard]]:
        """Return the guards by calls still in the graph: those behind another are checked after the one before it."""
        kept, calls = set(self._graph.nodes), dict[fx.Node, dict[Hashable, Guard]]()
        last: fx.Node | None = None
        for call, guards in self._found.items():
            last = call if call in kept else last
            if last is not None:
                calls.setdefault(last, {}).update(guards)
        return calls


def _is_call(node: fx.Node) -> bool:
    return runs_other_code(node) or node.target in REGION_FUNCTIONS


def inlined_later(path: str, inside: fx.Node, call: fx.Node) -> Later:
    """Return the later reads of a node inlined from the graph of a submodule.

    Args:
        path: path of the submodule.
        inside: the node in its graph.
        call: the call that is replaced.
    """
    if LATER not in inside.meta and not _is_call(inside):
        return ()
    own = ((f"{path}.{name}" if name else path, guard_set) for name, guard_set in inside.meta.get(LATER, ()))
    return (*own, *call.meta.get(LATER, ()))


def reads_later(graph: fx.Graph) -> bool:
    """Check whether guards on state are checked again behind calls of other code."""
    return any(LATER in node.meta or node.meta.get(AGAIN) for node in graph.nodes)


def can_follow(graph: fx.Graph) -> bool:
    """Check whether ``torch.compile`` can follow all later reads of state of modules."""
    return all(guard_set.is_followed for node in graph.nodes for _, guard_set in node.meta.get(LATER, ()))


def with_checks(graph: fx.Graph, of_state: bool = True) -> fx.Graph:
    """Return ``graph``, or a copy with checks of the results of other code and of state it may have changed.

    Args:
        graph: the graph.
        of_state: whether to check guards on state again behind each call.
    """
    calls = [node for node in graph.nodes if _is_call(node)]
    handing = [node for node in calls if hands_containers(node)]
    results = [node for node in graph.nodes if LENGTH in node.meta or (KIND in node.meta and is_result(node))]
    lookups = [*_later_parts(graph)]
    stretches = list(_stretches(calls)) if of_state and any(LATER in node.meta for node in calls) else []
    again = [] if of_state else [node for node in graph.nodes if node.meta.get(AGAIN)]
    if not any((handing, results, lookups, stretches, again)):
        return graph
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copied))
    for node in lookups:
        copied[node].target = _CHECKED_PARTS[node.target]
    for node in results:
        add_check(copy, copied[node])
    for node in handing:
        add_checks(copy, copied[node])
    for node, guard_sets in stretches:
        for path, guard_set in guard_sets:
            with copy.inserting_after(copied[node]):
                module = copy.get_attr(path or _MODULE)
            with copy.inserting_after(module):
                copy.call_function(StateCheck(guard_set, node.name), (module,))
    for node in again:
        copy.erase_node(copied[node])
    if again:
        remove_dead(copy)
    return copy


def _later_parts(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that read an attribute or item of an object after other code has run, which may remove it."""
    behind_call = False
    for node in graph.nodes:
        if node.target in _CHECKED_PARTS:
            if behind_call and is_of_object(node):
                yield node
        elif runs_other_code(node):
            behind_call = True


def attribute_left(value: Any, name: str) -> Any:
    """Return an attribute of an object (graph target).

    Raises:
        ScheduleError: code that the graph called has removed it.
    """
    try:
        return getattr(value, name)
    except AttributeError as error:
        raise _removed(f"attribute {name!r}", value) from error


def item_left(value: Any, key: Any) -> Any:
    """Return an item of a container of an object (graph target).

    Raises:
        ScheduleError: code that the graph called has removed it.
    """
    try:
        return value[key]
    except (LookupError, TypeError) as error:
        raise _removed(f"item {key!r}", value) from error


_CHECKED_PARTS: dict[Any, Callable[..., Any]] = {getattr: attribute_left, operator.getitem: item_left}


def _removed(part: str, value: Any) -> ScheduleError:
    return ScheduleError(
        f"{part} of a {type(value).__name__} that the forward reads was removed by code that it calls, which it was "
        "not in the recorded call",
        fix="undo the schedule of this module, or schedule the model anew with a call in which it changes",
    )


def _stretches(calls: list[fx.Node]) -> Iterator[tuple[fx.Node, Later]]:
    """Yield each call with the guards to check behind it: on reads up to the next call with reads behind it."""
    behind = list[set[tuple[str, GuardSet]]]()  # the guards of the next such call, for each call, last first
    following = set[tuple[str, GuardSet]]()
    for node in reversed(calls):
        behind.append(following)
        following = set(node.meta[LATER]) if LATER in node.meta else following
    later: Later = ()
    for node, excluded in zip(calls, reversed(behind), strict=True):
        later = node.meta.get(LATER, later)
        yield node, _merged(each for each in later if each not in excluded)


def _merged(later: Iterable[tuple[str, GuardSet]]) -> Later:
    """Return one guard_set for each path; stretches of one graph share their guards."""
    found: dict[str, dict[int, Guard]] = {}
    for path, guard_set in later:
        found.setdefault(path, {}).update((id(guard), guard) for guard in guard_set)
    return tuple((path, GuardSet(guards.values())) for path, guards in found.items())


@graph_check
def check_same(value: Any, now: Any, what: str) -> None:
    """Raise if ``now``, read again after other code has run, is not the object ``value`` (graph target).

    Raises:
        ScheduleError: code that the graph called has replaced it.
    """
    if now is not value:
        raise ScheduleError(
            f"{what} is another object than the graph was made for: code that the forward calls has replaced it, which "
            "it did not in the recorded call",
            fix="undo the schedule of this module, or schedule the model anew with a call in which it changes",
        )


class StateCheck:
    """Graph target to raise unless guards still hold for a module, after a call of other code.

    Args:
        guard_set: the guards.
        call: name of the node that runs other code.
    """

    def __init__(self, guard_set: GuardSet, call: str) -> None:
        self._guard_set, self._call = guard_set, call
        self._holds, self._holds_compiled = guard_set.function, guard_set.under_compiler
        self._holds_outside = CompiledCheck(lambda: guard_set.outside.function(None), guard_set.places_outside)
        self.__name__, self.__module__ = f"state_after_{call}", __name__

    def __call__(self, module: nn.Module) -> None:
        """Check the guards.

        Raises:
            ScheduleError: code that the graph called has changed what the graph depends on.
        """
        compiling = torch.compiler.is_dynamo_compiling()
        if self._holds_compiled(module) and self._holds_outside.holds() if compiling else self._holds(module):
            return
        missed = None if compiling else self._guard_set.missed(module)
        what = "Python state" if missed is None else described(missed.source)
        _raise_changed(what, self._call, original_class(module).__name__)


def _raise_changed(what: str, call: str, owner: str) -> NoReturn:
    """Raise the error of a :class:`StateCheck`.

    A function of strings alone: torch.compile leaves its frame as it is. In one that it compiles, torch 2.11 replaces
    the error by an AssertionError of its own.
    """
    raise ScheduleError(
        f"{what} changed while {call} ran, and the forward of {owner} reads it afterwards; it did not change in the "
        "recorded call, so the graph holds its value of before",
        fix="undo the schedule of this module, or schedule the model anew with a call in which it changes",
    )
