"""Stateful objects with methods called by a forward, such as caches.

Such an object is replaced with a watched placeholder, an instance of a subclass of its class, so ``isinstance`` is
correct. Each attribute read and method call becomes a node, and a data-free copy of the object computes the result.
"""

from __future__ import annotations

import copy
import enum
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects.effects import LENGTH, QUIET, changes_object, is_pure_query
from schedule.capture.effects.object_containers import ObjectContainers, TrackedDict, ask, ask_keys, assume, is_constant
from schedule.capture.effects.question_methods import may_change
from schedule.capture.effects.restoring import parts_of, versions
from schedule.capture.graph.scalars import scalar_of
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.plain_values import CONTAINERS, Placeholder, is_array, is_atom
from schedule.capture.recording.structure import map_structure
from schedule.capture.recording.user_lines import user_line
from schedule.capture.snapshots.code_state import slots_of
from schedule.capture.snapshots.snapshot import Snapshot
from schedule.util.copying import copied
from schedule.util.errors import TraceError
from schedule.util.internal_errors import perform

_SPECIAL: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__contains__": operator.contains,
}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_opaque_classes: list[Callable[[], type | None]] = []


def is_object(value: Any) -> bool:
    """Check whether a graph is made for this very object: one to call, such as a function, or a member of an enum."""
    return callable(value) or isinstance(value, enum.Enum)


class Constant:
    """Graph target to return one Python object: the form of a function or a config in a graph."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__name__ = f"constant_{getattr(value, '__name__', type(value).__name__).strip('<>')}"
        self.__module__ = __name__

    def __call__(self) -> Any:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.value is other.value

    def __hash__(self) -> int:
        return hash((Constant, id(self.value)))


class Copied(Constant):
    """Graph target to return a new copy of an object that the forward makes of plain data, such as a config."""

    def __call__(self) -> Any:
        return copy.deepcopy(self.value)


def opaque_class(find: Callable[[], type | None]) -> Callable[[], type | None]:
    """Register a class to be constructed by a graph node inside a forward.

    ``find`` returns the class, or None if it is not available.
    """
    _opaque_classes.append(find)
    return find


@opaque_class
def _transformers_cache() -> type | None:
    module = sys.modules.get("transformers.cache_utils")
    return getattr(module, "Cache", None)


class _Watched(Placeholder):
    """Mixin of every watched object, with ``_watch`` as ``(tracker, value, node)``."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing: transformers registers cache layer classes when they are defined, and this is not one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: a watched object is complete when it is made."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        tracker, value, node = object.__getattribute__(self, "_watch")
        return tracker.read(value, node, name)

    def __setattr__(self, name: str, new: Any) -> None:
        tracker, value, node = object.__getattribute__(self, "_watch")
        tracker.call(setattr, node, (node, name), value, (name, new))


def called_on(watched: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(watched, *args)``, which becomes a node of the graph."""
    tracker, value, node = object.__getattribute__(watched, "_watch")
    return tracker.call(function, node, (node,), value, args)


def _special_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        result = called_on(self, function, *args)
        if function is len:
            return int(result)
        return bool(result) if function in (operator.contains, operator.truth) else result

    return method


_UNREAD = {"__new__", "__init__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__dir__", "__doc__"}
_UNREAD |= {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__sizeof__", "__class_getitem__"}
_UNREAD |= {"__init_subclass__", "__subclasshook__", "__copy__", "__deepcopy__", "__hash__"}


def _read_in_c(cls: type) -> str | None:
    """Return a special method of ``cls`` written in C, which would read a placeholder and not the object, or None."""
    for name in dir(cls):
        if name.startswith("__") and name.endswith("__") and name not in (*_SPECIAL, *_UNREAD):
            found = getattr(cls, name, None)
            in_c = isinstance(found, (types.WrapperDescriptorType, types.MethodDescriptorType))
            if in_c and found is not getattr(object, name, None):
                return name
    return None


_watched_classes: dict[type, Any] = {}


def _watched_class(cls: type) -> Any:
    """Return the watched subclass of ``cls``."""
    if cls not in _watched_classes:
        members: dict[str, Any] = {"__module__": __name__}  # an abstract class would set it to that of its metaclass
        if unknown := _read_in_c(cls):
            raise TypeError(f"{cls.__name__}.{unknown} is written in C")
        members |= {name: _special_method(function) for name, function in _SPECIAL.items() if hasattr(cls, name)}
        if hasattr(cls, "__len__") or hasattr(cls, "__bool__"):
            members["__bool__"] = _special_method(operator.truth)
        _watched_classes[cls] = type(f"Watched{cls.__name__}", (_Watched, cls), members)
    return _watched_classes[cls]


class OpaqueTracker:
    """Tracker of the opaque objects of one trace."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer
        self._constants: dict[int, tuple[Any, fx.Node]] = {}
        self.containers = ObjectContainers(tracer)

    def watch(self, value: Any, node: fx.Node) -> Any:
        """Return a watched placeholder, or ``value`` itself if it is a module, function, class or member of an enum."""
        if isinstance(value, (nn.Module, types.FunctionType, type, enum.Enum)):
            self.tracer.guard(node, value)
            return value
        try:
            watched_class = _watched_class(type(value))
            watched = watched_class.__new__(watched_class)
            object.__setattr__(watched, "_watch", (self, value, node))
        except (TypeError, AttributeError) as error:
            raise TraceError(
                f"a value of type {type(value).__name__} cannot be followed through the forward",
                where=user_line(),
                fix="flatten less, or mark the module that makes it as a leaf",
            ) from error
        node.meta["object"] = True
        return watched

    def read(self, value: Any, node: fx.Node, name: str) -> Any:
        """Return attribute ``name`` of a watched object: its value, or a method to write a node when called."""
        attribute = perform(getattr, value, name)
        if callable(attribute) and getattr(attribute, "__self__", None) is value:
            return lambda *args, **kwargs: self.call(name, node, (node,), value, args, kwargs)
        read = self.tracer.emit(getattr, (node, name))
        if isinstance(attribute, bool):  # and no other value that is true or false
            self.tracer.guard(self.tracer.emit(operator.is_, (read, attribute)), True)
            return attribute
        with DisableTorchFunction():
            if name in vars(value) and type(value).__getattribute__ is object.__getattribute__:
                read.meta[QUIET] = True
                with self.tracer.graph.inserting_before(read):
                    assume(self.tracer, hasattr, (node, name))
            if is_constant(attribute) or is_object(attribute):  # numbers stay values of the graph
                self.tracer.guard(read, attribute)
                self.tracer.know_constant(attribute)
                return attribute
            return self.containers.found(self.tracer.track(attribute, read), attribute, read)

    def lacks(self, watched: Any, name: str) -> None:
        """Guard on a watched object having no attribute ``name``."""
        _, _, node = object.__getattribute__(watched, "_watch")
        ask(self.tracer, hasattr, (node, name), False)

    def call(
        self,
        target: Callable[..., Any] | str,
        node: fx.Node,
        leading: tuple[Any, ...],
        value: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of a watched object on its data-free copy, and write the call as a node."""
        tracer, kwargs = self.tracer, kwargs or {}
        with DisableTorchFunction():
            operands, options = tracer.handed(args[len(leading) - 1 :], kwargs)
            written = tracer.emit(target, (*leading, *operands), options)
            written.meta["opaque"] = True
            tracer.containers.note((args[len(leading) - 1 :], kwargs), written)
            real_args = map_structure(args, tracer.value_of)
            real_kwargs = map_structure(kwargs, tracer.value_of)
            before, structure = versions(value), _structure(value) if is_pure_query(target) else None
            tracer.recording.fake_mode.observe()
            with tracer.recording.fake_mode:
                result = _result_of(target, value, real_args, real_kwargs)
            written.meta["in_place"] = any(now > before.get(key, 0) for key, now in versions(value).items())
            if structure is not None:
                changed = bool(tracer.recording.fake_mode.written or structure.difference())
                if changed and target is operator.truth:  # `and` and `or` ask once, the code of a trace twice
                    raise TraceError(
                        f"the truth of a {type(value).__name__} changes it",
                        where=user_line(),
                        fix="schedule its submodules instead",
                    )
                written.meta["changes"] = changed or may_change(getattr(value, str(target), None))
            return self._result(target, value, result, written)

    def _result(self, target: Callable[..., Any] | str, value: Any, result: Any, written: fx.Node) -> Any:
        """Return the result of a method of an object, tracked, with a guard on what the graph is made for."""
        if is_constant(result) and (result is not None or isinstance(target, str)):
            self.tracer.guard(written, result)
        if type(result) is tuple and changes_object(written):
            written.meta[LENGTH] = len(result)
        elif isinstance(result, (list, tuple, dict)):
            ask_keys(self.tracer, written, result)
        tracked = self.tracer.track(result, written)
        own = isinstance(result, (list, dict)) and any(part is result for part in parts_of([value]))
        return self.containers.found(tracked, result, written) if own else tracked

    def node_of(self, leaf: Any) -> Any:
        """Return the node of a watched object, or a constant for any other non-tensor."""
        if isinstance(leaf, _Watched):
            return object.__getattribute__(leaf, "_watch")[2]
        if isinstance(leaf, TrackedDict):
            return leaf.node
        if type(leaf).__module__ == "numpy" and hasattr(leaf, "item") and not getattr(leaf, "ndim", 0):
            return leaf.item()  # a number
        if isinstance(leaf, _PLAIN) or leaf is Ellipsis:
            return leaf
        made = not self._is_lasting(leaf)
        if made and not _is_plain_object(leaf):
            raise TraceError(
                f"an object of class {type(leaf).__name__} that the forward makes is returned or handed on, which a "
                "graph cannot make at each call",
                where=user_line(),
                fix="mark the module that makes it as a leaf (`leaves=(…,)`), or schedule its submodules instead",
            )
        if id(leaf) not in self._constants:
            for each in (leaf, getattr(leaf, "__self__", None)):
                self.tracer.guard_identity(each)
            self._constants[id(leaf)] = (leaf, self.tracer.emit(Copied(leaf) if made else Constant(leaf), ()))
        return self._constants[id(leaf)][1]

    def _is_lasting(self, leaf: Any) -> bool:
        """Check whether ``leaf`` exists outside the forward, or is plain data, so each call may use the same object."""
        if isinstance(leaf, types.MethodType):
            return self._is_lasting(leaf.__self__) and self._is_lasting(leaf.__func__)
        if isinstance(leaf, types.BuiltinFunctionType):
            owner = leaf.__self__
            return owner is None or isinstance(owner, (type, types.ModuleType)) or self._is_lasting(owner)
        if isinstance(leaf, types.FunctionType) and _is_importable(leaf):
            return True
        return (
            isinstance(leaf, (type, types.ModuleType))
            or is_atom(leaf)
            or is_array(leaf)
            or self.tracer.is_outside(leaf)
        )

    def construct(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Construct ``cls(*args, **kwargs)``, such as ``DynamicCache(…)``, as a node, and watch the object."""
        tracer = self.tracer
        with DisableTorchFunction():
            node = tracer.emit(cls, *tracer.handed(args, kwargs))
            tracer.containers.note((args, kwargs), node)
            real_args, real_kwargs = (map_structure(part, tracer.value_of) for part in (args, kwargs))
            with tracer.recording.fake_mode:
                value = cls(*real_args, **real_kwargs)
            return self.watch(value, node)


_RAISED = (LookupError, AttributeError, StopIteration, ArithmeticError, ValueError, TypeError, AssertionError)


def _result_of(target: Callable[..., Any] | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = target if isinstance(target, str) else target.__name__
    try:
        if target is copy.deepcopy:
            return copied(value, _cloned)  # Python's own would read data
        return getattr(value, target)(*args, **kwargs) if isinstance(target, str) else target(value, *args, **kwargs)
    except _RAISED as error:
        raise TraceError(
            f"{named}() of a {type(value).__name__} raises {type(error).__name__}: {error}",
            where=user_line(),
            fix="schedule its submodules instead",
        ) from error


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction():
        return tensor.clone()


def _structure(value: Any) -> Snapshot:
    """Save the attributes and items of an object, and those of the objects in it."""
    return Snapshot({type(value).__name__: value}, data=False)


def is_opaque_class(cls: type) -> bool:
    """Check whether constructing ``cls`` is a node of the graph."""
    return any(issubclass(cls, found) for find in _opaque_classes if (found := find()) is not None)


def _is_plain_object(value: Any, deeper: int = 8) -> bool:
    """Check whether ``value`` contains only plain data, functions and classes, so that a copy is as good."""
    if is_atom(value) or is_array(value) or isinstance(value, type):
        return scalar_of(value) is None
    if isinstance(value, types.FunctionType):
        return _is_importable(value)
    if type(value) in CONTAINERS:
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    else:
        cls: Any = type(value)
        if isinstance(value, nn.Module) or cls.__new__ is not object.__new__ or slots_of(cls):
            return False  # it may hold more than its attributes, as classes written in C do
        parts = list(getattr(value, "__dict__", {"": value}).values())
    return deeper > 0 and all(_is_plain_object(part, deeper - 1) for part in parts)


def _is_importable(function: types.FunctionType) -> bool:
    """Check whether ``function`` is found by its name in its file, so the forward did not make it."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def untracked(leaf: Any) -> Any:
    """Return the object behind a watched one, or any other ``leaf`` as it is."""
    return object.__getattribute__(leaf, "_watch")[1] if isinstance(leaf, _Watched) else leaf
