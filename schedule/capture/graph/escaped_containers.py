"""Lists and dicts that a graph hands to other code, which may change them.

The forward reads them afterwards, and the graph has the values of before. So the compiled graph checks that such code
leaves them as they are::

    graph:     y = self.child(x, [a, b]);  return y + a
    compiled:  items = list([a, b]);  before = contents((items,))
               y = self.child(x, items);  check_contents((items,), before, "child");  return y + a
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from schedule.capture.guards.plain_values import equal, is_atom, is_record, parts
from schedule.capture.recording.structure import attributes_beside, is_dataclass_value, with_items
from schedule.util.errors import ScheduleError

CONTAINER = "container"
"""Key of the metadata of placeholders for lists, dicts and dataclasses among the arguments."""

READ = "container_read"
"""Key of the metadata of calls of other code that are handed a container which the forward reads afterwards."""


class HandedContainers:
    """Containers handed to other code in one trace."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Any, list[fx.Node]]] = {}
        self._read_again: dict[int, tuple[Any, Callable[[], None]]] = {}

    def note(self, values: Any, call: fx.Node) -> None:
        """Remember that the containers in ``values``, the arguments of ``call``, are handed on."""
        for container in _containers(values):
            self._calls.setdefault(id(container), (container, []))[1].append(call)

    def found_in_object(self, value: Any, read_again: Callable[[], None]) -> None:
        """Remember that ``value`` belongs to a stateful object, with a function to call where it is read."""
        self._read_again[id(value)] = value, read_again

    def returned(self, value: Any, read_again: Callable[[], None]) -> list[Any]:
        """Remember and return the containers in the result of a call, with a function to call where one is read."""
        containers = [*_containers(value)]
        for container in containers:
            self._read_again[id(container)] = container, read_again
        return containers

    def read(self, value: Any) -> None:
        """Mark the calls that were handed ``value``, which the forward reads now."""
        if id(value) in self._read_again:
            self._read_again[id(value)][1]()
        for call in self._calls.pop(id(value), (None, ()))[1]:
            call.meta[READ] = True

    def read_all(self, values: Any) -> None:
        """Mark the calls that were handed any container in ``values``, which unknown code reads now."""
        for container in _containers(values) if self._calls or self._read_again else ():
            self.read(container)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists, dicts and dataclasses in ``value``, and itself if it is one."""
    if isinstance(value, (list, dict)) or is_record(value):
        yield value
    for part in parts(value):
        yield from _containers(part)


def contents(value: Any) -> Any:
    """Return ``value`` with all lists, dicts and dataclasses replaced by tuples of what they hold (graph target)."""
    if isinstance(value, dict):
        beside = attributes_beside(value)
        return (*value, *[contents(each) for each in value.values()], *beside, *map(contents, beside.values()))
    if isinstance(value, (list, tuple)):
        return tuple([contents(each) for each in value])
    if is_dataclass_value(value):
        return tuple([contents(getattr(value, name)) for name in value.__dataclass_fields__])
    return value


def check_contents(containers: tuple[Any, ...], before: Any, call: str) -> None:
    """Raise if ``containers`` do not hold what they did ``before`` a call (graph target).

    Raises:
        ScheduleError: code that the graph called has changed them.
    """
    told = f"{call} changed a list or dict that the forward handed to it; it did not in the recorded call"
    refuse_changed(contents(containers), before, told)


def refuse_changed(now: Any, before: Any, told: str) -> None:
    """Raise an error that says ``told`` unless the contents of containers are what they were before.

    Raises:
        ScheduleError: they are not.
    """
    if not is_same(now, before):
        raise ScheduleError(
            f"{told}, so the graph holds its items of before",
            fix="undo the schedule of this module, or schedule the model anew with a call in which it changes",
        )


def is_same(now: Any, before: Any) -> bool:
    """Check whether the contents of containers are the same objects, or equal plain values."""
    if isinstance(now, tuple) and isinstance(before, tuple):  # first, as torch.compile knows no `is` of tuples
        return len(now) == len(before) and all([is_same(a, b) for a, b in zip(now, before, strict=True)])
    return now is before or (is_atom(now) and type(now) is type(before) and equal(now, before))


def hands_containers(node: fx.Node) -> bool:
    """Check whether ``node`` passes other code a list, a dict or a dataclass that the forward reads afterwards."""
    return bool(node.meta.get(READ)) and any(map(_holds_container, _arguments(node)))


def add_checks(graph: fx.Graph, node: fx.Node) -> None:
    """Write checks of the containers that ``node``, a call of ``graph``, passes to other code."""
    with graph.inserting_before(node):
        node.args = tuple(_made(graph, each) for each in node.args)
        node.kwargs = {name: _made(graph, each) for name, each in node.kwargs.items()}
        given = tuple(each for each in _arguments(node) if _holds_container(each))
        before = graph.call_function(contents, (given,))
    with graph.inserting_after(node):
        graph.call_function(check_contents, (given, before, node.name))


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return (*node.args, *node.kwargs.values())


def _holds_container(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return _is_container(value)
    return isinstance(value, (list, dict)) or (isinstance(value, tuple) and any(map(_holds_container, value)))


def _is_container(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(node.meta.get(CONTAINER))
    made = node.target
    return made is with_items or (
        isinstance(made, type) and (issubclass(made, (list, dict)) or dataclasses.is_dataclass(made))
    )


def _made(graph: fx.Graph, value: Any) -> Any:
    """Return ``value`` with the lists and dicts that it is written with replaced by nodes that make them."""
    if isinstance(value, list):
        return graph.call_function(list, ([_made(graph, each) for each in value],))
    if isinstance(value, dict):
        return graph.call_function(dict, ({key: _made(graph, each) for key, each in value.items()},))
    if isinstance(value, tuple):
        items = [_made(graph, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
