"""Lists and dicts of stateful objects, such as caches.

Items assigned in a dict and put at the end of a list become nodes of the graph. Other changes by the forward are
refused; changes by other code are checked for where the forward reads the container again.

Questions about objects of one trace: nodes whose answers are guarded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects.effects import ASSUMED, IS_PLAIN, QUIET, graph_check, is_dict
from schedule.capture.graph.escaped_containers import CONTAINER, contents, is_same, refuse_changed
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.plain_values import Tracked
from schedule.capture.recording.structure import map_structure, rebuilt_mapping, rebuilt_sequence
from schedule.capture.recording.user_lines import user_line
from schedule.util.errors import TraceError
from schedule.util.internal_errors import as_python_does, perform

# -- Questions about objects of one trace -------------------------------------------------------------------


def ask(
    trace: Trace, question: Callable[..., Any], operands: tuple[Any, ...], answer: Any, quiet: bool = False
) -> fx.Node:
    """Write a question about an object with a guard on its answer.

    Args:
        trace: the trace.
        question: the function to call, such as ``len``.
        operands: its arguments.
        answer: what it returned.
        quiet: whether it runs no code of the user.
    """
    asked = trace.emit(question, operands)
    asked.meta["opaque"] = True
    if quiet:
        asked.meta[QUIET] = True
    trace.guard(asked, answer)
    return asked


def assume(trace: Trace, question: Callable[..., bool], operands: tuple[Any, ...]) -> None:
    """Guard on a question that is answered by yes, and that the forward may not ask itself."""
    ask(trace, question, operands, True, quiet=True).meta[ASSUMED] = True


def ask_keys(trace: Trace, node: fx.Node, container: Any) -> None:
    """Guard on the length of a list or tuple at ``node``, or on the keys of a dict there, and before on its class."""
    if type(container) in IS_PLAIN:
        assume(trace, IS_PLAIN[type(container)], (node,))
    question, answer = (tuple, tuple(container)) if isinstance(container, dict) else (len, len(container))
    ask(trace, question, (node,), answer, quiet=type(container) in IS_PLAIN)


# -- Lists and dicts of stateful objects, such as caches ----------------------------------------------------


@dataclass(slots=True)
class _Found:
    """Container read from an object.

    Attributes:
        container: its tracked form.
        real: the container in the data-free object.
        contents: what that one held at the time.
        node: the node that reads it.
        call: the last node by then that runs other code.
    """

    container: Any
    real: Any
    contents: Any
    node: fx.Node
    call: fx.Node | None


class ObjectContainers:
    """Lists and dicts that a forward has read from stateful objects.

    Args:
        tracer: the trace.
    """

    def __init__(self, tracer: Trace) -> None:
        self._tracer = tracer
        self._found: dict[int, _Found] = {}

    def found(self, value: Any, real: Any, node: fx.Node) -> Any:
        """Return the form of a container, and of those in it, that the forward may read.

        Args:
            value: the container with its items tracked, or any other value.
            real: the value in the data-free object.
            node: the node that reads it.
        """
        if not isinstance(value, (list, tuple, dict)) or isinstance(value, torch.Size):
            return value
        nodes = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        keys: Collection[Any] = value.keys() if isinstance(value, dict) else range(len(value))
        items = {key: self.found(value[key], real[key], nodes[key]) for key in keys}
        container: Any
        if type(real) is dict:  # its keys are guarded where they are read
            with before_items(node):
                assume(self._tracer, is_dict, (node,))
            container = TrackedDict(self._tracer, node, items, partial(self._write, real))
        else:
            with before_items(node):
                ask_keys(self._tracer, node, real)
            for key in keys if not isinstance(value, list) else ():
                if is_constant(items[key]):
                    self._tracer.guard(nodes[key], items[key])
            if isinstance(value, list):
                extend = partial(self._extend, real) if type(real) is list else None
                container = TrackedList(self._tracer, node, items.values(), nodes, extend)
            elif isinstance(value, dict):
                container = rebuilt_mapping(type(value), items, {})
                self._tracer.refuse_writes(container)
            else:
                return rebuilt_sequence(value, list(items.values()))
        found = _Found(container, real, contents(real), node, self._tracer.last_call)
        self._found[id(container)] = found
        self._tracer.containers.found_in_object(container, lambda: self._read_again(found))
        return container

    def node_of(self, value: Any) -> fx.Node | None:
        """Return the node that reads ``value`` from an object, or None."""
        found = self._found.get(id(value))
        if found is None:
            return None
        found.node.meta["object"] = found.node.meta[CONTAINER] = True
        return found.node

    def _write(self, real: dict[Any, Any], key: Any, value: Any) -> None:
        real[key] = map_structure(value, self._tracer.value_of)
        self._changed(real)

    def _extend(self, real: list[Any], added: list[Any]) -> None:
        real += map_structure(added, self._tracer.value_of)
        self._changed(real)

    def _changed(self, real: Any) -> None:
        for found in self._found.values():
            if found.real is real:
                found.contents = contents(real)

    def _read_again(self, found: _Found) -> None:
        """Write a check that a container still has the same items, if other code has run since it was read."""
        if not is_same(contents(found.real), found.contents):
            raise TraceError(
                f"the forward reads a {type(found.real).__name__} of a stateful object, which a method then changes, "
                "and reads it again",
                where=user_line(),
                fix="schedule its submodules instead",
            )
        call = self._tracer.last_call
        if call is not found.call:
            found.call = call
            if isinstance(found.container, TrackedDict):
                found.container.guard_keys()
            with DisableTorchFunction():
                expected = self._tracer.as_nodes(contents(_plain(found.container)))
                self._tracer.emit(check_items, (found.node, expected))


def _plain(value: Any) -> Any:
    """Return ``value`` with tracked dicts replaced by plain ones, whose keys are read without a guard."""
    if isinstance(value, TrackedDict):
        return {key: _plain(part) for key, part in dict.items(value)}
    return [_plain(part) for part in value] if isinstance(value, list) else value


@graph_check
def check_items(container: Any, expected: tuple[Any, ...]) -> None:
    """Raise unless a list or dict of a stateful object, read again, holds what it did before (graph target).

    Raises:
        ScheduleError: code that the graph called has changed it.
    """
    told = f"a {type(container).__name__} of an object that the forward reads was changed by code that it calls, "
    refuse_changed(contents(container), contents(expected), told + "which it was not in the recorded call")


def before_items(node: fx.Node) -> AbstractContextManager[Any]:
    """Write nodes behind that of a container and questions about it, before its items are read: there may be none."""
    while node.next.meta.get(QUIET) and node.next.target is not getattr:
        node = node.next
    return node.graph.inserting_after(node)


def is_constant(value: Any) -> bool:
    """Check whether ``value`` is a constant in a graph that reads it: None, a text or a dtype."""
    return value is None or type(value) is str or isinstance(value, torch.dtype)


class TrackedList(Tracked, list[Any]):
    """A list read from an object such as a cache: ``cache.layers += more`` becomes a node of the graph.

    Texts and None that it had before are guarded where they are read.
    """

    replaces = list

    def __init__(
        self,
        tracer: Trace,
        node: fx.Node,
        items: Iterable[Any],
        nodes: Mapping[Any, fx.Node],
        extend: Callable[[list[Any]], None] | None,
    ) -> None:
        super().__init__(items)
        self._tracer, self._node, self._nodes, self._extend = tracer, node, nodes, extend

    def _item(self, index: int) -> Any:
        found = super().__getitem__(index)
        if is_constant(found) and index in self._nodes:
            self._tracer.guard(self._nodes[index], found)
        return found

    def copy(self) -> list[Any]:
        """Return a plain list of the forward's own."""
        return [self._item(index) for index in range(len(self))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copy())

    def __getitem__(self, key: Any) -> Any:
        numbers = perform(operator.getitem, range(len(self)), key)
        return self._item(numbers) if isinstance(numbers, int) else [self._item(each) for each in numbers]

    def __contains__(self, value: object) -> bool:
        return value in self.copy()

    def __add__(self, other: Any) -> Any:
        return perform(operator.add, self.copy(), other)

    def __radd__(self, other: Any) -> Any:
        return perform(operator.add, other, self.copy())

    def __mul__(self, count: Any) -> Any:
        return perform(operator.mul, self.copy(), count)

    __rmul__ = __mul__

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.copy())

    def index(self, *args: Any) -> int:
        """Return the index of a value as ``list.index`` does."""
        return int(perform(self.copy().index, *args))

    def count(self, value: Any) -> int:
        """Count a value as ``list.count`` does."""
        return self.copy().count(value)

    __copy__ = copy

    def extend(self, values: Iterable[Any]) -> None:
        """Put ``values`` at the end, in the graph, too."""
        if self._extend is None:  # a class of its own, perhaps with an `append` of its own
            self._refuse()
        added = perform(list, values)
        self._node.meta["object"] = True
        with DisableTorchFunction():
            self._tracer.emit(operator.iadd, (self._node, self._tracer.as_nodes(added)))
            self._extend(added)
        super().extend(added)

    def append(self, value: Any) -> None:
        """Put ``value`` at the end, in the graph, too."""
        self.extend([value])

    def __iadd__(self, values: Iterable[Any]) -> Self:  # type: ignore[misc] # `+` makes a list of the forward's own
        self.extend(values)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            "the forward, or a method that Python calls for it, changes a list of an argument, which a graph would "
            "not do at each call",
            where=user_line(),
            fix="schedule its submodules instead",
        )

    __setitem__ = __delitem__ = __imul__ = clear = insert = pop = remove = _refuse
    reverse = sort = _refuse


class TrackedDict(Tracked, dict[Any, Any]):
    """A dict read from an object such as a cache: ``cache.is_updated[3] = True`` becomes a node of the graph."""

    replaces = dict

    def __init__(self, tracer: Trace, node: fx.Node, items: dict[Any, Any], write: Callable[[Any, Any], None]) -> None:
        super().__init__(items)
        self._tracer, self.node, self._write = tracer, node, write
        self._unwritten = set(items)
        node.meta["object"] = True

    def __setitem__(self, key: Any, value: Any) -> None:
        with DisableTorchFunction():
            self._tracer.emit(operator.setitem, (self.node, key, self._tracer.as_nodes(value)))
            self._write(key, value)
        self._unwritten.discard(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        with DisableTorchFunction(), before_items(self.node) if key in self._unwritten else nullcontext():
            ask(self._tracer, operator.contains, (self.node, key), found, quiet=True)
        return found

    def __getitem__(self, key: Any) -> Any:
        if key not in self:  # guarded, since the forward may handle the error
            raise as_python_does(KeyError(key))
        found = super().__getitem__(key)
        if is_constant(found):
            with DisableTorchFunction():
                self._tracer.guard(self._tracer.emit(operator.getitem, (self.node, key)), found)
        return found

    def guard_keys(self) -> tuple[Any, ...]:
        """Return the keys, with a guard on them."""
        keys = tuple(super().keys())
        with DisableTorchFunction(), before_items(self.node) if self._unwritten.issuperset(keys) else nullcontext():
            ask(self._tracer, tuple, (self.node,), keys, quiet=True)
        return keys

    def __len__(self) -> int:
        return len(self.guard_keys())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.guard_keys())

    def keys(self) -> Any:
        """Return the keys, with a guard on them."""
        return dict.fromkeys(self).keys()

    def items(self) -> Any:
        """Return the items, with a guard on the keys."""
        return self.copy().items()

    def values(self) -> Any:
        """Return the values, with a guard on the keys."""
        return self.copy().values()

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict of the forward's own, with a guard on the keys."""
        return {key: self[key] for key in self}

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.guard_keys())

    __copy__ = copy

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value for ``key`` as ``dict.get`` does, with a guard on whether it is present."""
        if key not in self:
            return default
        return self[key]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            "the forward changes a dict of a stateful object other than by assigning an item",
            where=user_line(),
            fix="schedule its submodules instead",
        )

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse
