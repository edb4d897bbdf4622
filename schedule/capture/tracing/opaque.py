"""Stateful objects with methods called by a forward, such as caches.

Such an object is replaced with a watched placeholder, an instance of a subclass of its class, so ``isinstance`` is
correct. Each attribute read and method call becomes a node, and a data-free copy of the object computes the result.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensors import FakeTensor
from schedule.capture.recording.source import user_line
from schedule.capture.recording.structure import map_structure
from schedule.capture.tracing.containers import TrackedDict
from schedule.capture.tracing.restoring import versions
from schedule.capture.tracing.scalars import scalar_of
from schedule.capture.tracing.trace import Trace
from schedule.util.errors import TraceError

_SPECIAL: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__contains__": operator.contains,
}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_opaque_classes: list[Callable[[], type | None]] = []


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


class _Watched:
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


def _special_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        tracker, value, node = object.__getattribute__(self, "_watch")
        result = tracker.call(function, node, (node,), value, args)
        if function is len:
            return int(result)
        return bool(result) if function in (operator.contains, operator.truth) else result

    return method


_watched_classes: dict[type, Any] = {}


def _watched_class(cls: type) -> Any:
    """Return the watched subclass of ``cls``."""
    if cls not in _watched_classes:
        members = {name: _special_method(function) for name, function in _SPECIAL.items() if hasattr(cls, name)}
        if hasattr(cls, "__len__") or hasattr(cls, "__bool__"):
            members["__bool__"] = _special_method(operator.truth)
        _watched_classes[cls] = type(f"Watched{cls.__name__}", (_Watched, cls), members)
    return _watched_classes[cls]


class OpaqueTracker:
    """Tracker of the opaque objects of one trace."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer
        self._constants: dict[int, tuple[Any, fx.Node]] = {}

    def watch(self, value: Any, node: fx.Node) -> Any:
        """Return a watched placeholder for ``value``, or ``value`` itself if it is a module, function or class."""
        if isinstance(value, (nn.Module, types.FunctionType, type)):
            return value
        try:
            watched_class = _watched_class(type(value))
            watched = watched_class.__new__(watched_class)
        except TypeError as error:
            raise TraceError(
                f"a value of type {type(value).__name__} cannot be followed through the forward",
                where=user_line(),
                fix="flatten less, or mark the module that makes it as a leaf",
            ) from error
        object.__setattr__(watched, "_watch", (self, value, node))
        node.meta["object"] = True
        return watched

    def read(self, value: Any, node: fx.Node, name: str) -> Any:
        """Return attribute ``name`` of a watched object: its value, or a method to write a node when called."""
        attribute = getattr(value, name)
        if isinstance(attribute, types.MethodType) and attribute.__self__ is value:
            return lambda *args, **kwargs: self.call(name, node, (node,), value, args, kwargs)
        if isinstance(attribute, (str, types.FunctionType, type)) or callable(attribute):
            return attribute
        read = self.tracer.emit(getattr, (node, name))
        if isinstance(attribute, bool) or attribute is None:
            self.tracer.guard(read, attribute)
            return attribute
        with DisableTorchFunction():
            tracked = self.tracer.track(attribute, read)
        return TrackedDict(self.tracer, read, tracked) if type(attribute) is dict else tracked

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
            operands = (*leading, *tracer.as_nodes(args[len(leading) - 1 :]))
            written = tracer.emit(target, operands, tracer.as_nodes(kwargs))
            written.meta["opaque"] = True
            real_args = map_structure(args, tracer.value_of)
            real_kwargs = map_structure(kwargs, tracer.value_of)
            before = versions(value)
            with tracer.recording.fake_mode:
                if isinstance(target, str):
                    result = getattr(value, target)(*real_args, **real_kwargs)
                else:
                    result = target(value, *real_args, **real_kwargs)
            written.meta["in_place"] = any(now > before.get(key, 0) for key, now in versions(value).items())
            return tracer.track(result, written)

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
        if _holds_values(leaf):
            raise TraceError(
                f"an object of class {type(leaf).__name__} that the forward makes, and fills with what it computes, is "
                "returned or handed on",
                where=user_line(),
                fix="mark the module that makes it as a leaf (`leaves=(…,)`), or schedule its submodules instead",
            )
        if id(leaf) not in self._constants:
            self._constants[id(leaf)] = (leaf, self.tracer.emit(Constant(leaf), ()))
        return self._constants[id(leaf)][1]

    def construct(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Construct ``cls(*args, **kwargs)``, such as ``DynamicCache(…)``, as a node, and watch the object."""
        tracer = self.tracer
        with DisableTorchFunction():
            node = tracer.emit(cls, tracer.as_nodes(args), tracer.as_nodes(kwargs))
            real_args, real_kwargs = (map_structure(part, tracer.value_of) for part in (args, kwargs))
            with tracer.recording.fake_mode:
                value = cls(*real_args, **real_kwargs)
            return self.watch(value, node)


def is_opaque_class(cls: type) -> bool:
    """Check whether constructing ``cls`` is a node of the graph."""
    return any(issubclass(cls, found) for find in _opaque_classes if (found := find()) is not None)


def _holds_values(value: Any, deeper: int = 4) -> bool:
    """Check whether an object contains values of this trace. A graph would reuse them in every call."""
    if isinstance(value, FakeTensor) or scalar_of(value) is not None:
        return True
    if deeper == 0 or isinstance(value, (nn.Module, types.FunctionType, type, torch.Tensor)):
        return False
    parts = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", value)
    items = parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, (list, tuple)) else ()
    return any(_holds_values(item, deeper - 1) for item in list(items))


def untracked(leaf: Any) -> Any:
    """Return the object behind a watched one, or any other ``leaf`` as it is."""
    return object.__getattribute__(leaf, "_watch")[1] if isinstance(leaf, _Watched) else leaf
