"""Handlers of builtins that ask which class a value has, such as ``isinstance``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from fused.torch_internals.tensors import FakeTensor
from schedule.capture.tracing.opaque import _Watched
from schedule.capture.tracing.parts import Tracked
from schedule.capture.tracing.reading.evaluator import Evaluator
from schedule.capture.tracing.reading.handlers import handles
from schedule.capture.tracing.reading.origin import is_fixed
from schedule.capture.tracing.reading.resolution import class_of
from schedule.capture.tracing.reading.sources import Attr, Const, Item
from schedule.capture.tracing.result_kinds import PROPERTIES
from schedule.capture.tracing.scalars import scalar_of
from schedule.util.internal_errors import perform

_OF_KIND = type(torch.FloatTensor)
"""Class of those for tensors of one dtype on one type of device."""


@handles(isinstance)
def _isinstance(ev: Evaluator, value: Any, cls: Any) -> bool:
    classes = [*_classes(ev, cls)]
    ev.guard_class(value)
    if isinstance(value, torch.Tensor):
        ev.tracer.ask(value, *(PROPERTIES if any(isinstance(each, _OF_KIND) for each in classes) else ()))
    if isinstance(value, torch.Tensor) and any(map(_is_tensor_class, classes)):
        return perform(issubclass, _tensor_class(ev, value), tuple(classes))
    value = _number(ev, value)
    return any(_is_instance(ev, value, each) for each in classes)


def _number(ev: Evaluator, value: Any) -> Any:
    """Return the recorded number for one of the graph, with a guard on its class if other code returned it."""
    scalar = scalar_of(value)
    if scalar is None:
        return value
    ev.tracer.ask(value)
    return scalar.value


def _classes(ev: Evaluator, cls: Any) -> Iterator[Any]:
    """Yield the classes in the second argument of ``isinstance``."""
    if isinstance(cls, (tuple, types.UnionType)):
        for each in cls.__args__ if isinstance(cls, types.UnionType) else ev.iterate(cls):
            yield from _classes(ev, each)
    else:
        yield cls


def _is_instance(ev: Evaluator, value: Any, cls: type) -> bool:
    """Return ``isinstance(value, cls)``: follow the metaclass, guard on the bases, or ask again at each call."""
    check = ev.resolve(type(cls), "__instancecheck__") if ev.on else None
    if isinstance(check, types.FunctionType) and not ev.is_native(check):
        return bool(ev.call(check, cls, value))
    found: bool = perform(isinstance, value, cls)
    if not isinstance(check, types.FunctionType):  # by the bases of its class
        ev.guard_bases(type(value).__bases__[-1] if isinstance(value, _Watched) else class_of(value))
    elif (source := ev.source_of(value)) is not None:
        ev.guard("instance" if found else "no_instance", source, cls)
    elif not isinstance(value, torch.Tensor):
        _ask_subclass(ev, type(value), cls)
    return found


def _ask_subclass(ev: Evaluator, cls: type, of: type) -> None:
    with suppress(TypeError):  # a protocol with data, which its objects answer
        ev.query(issubclass, (cls, of), issubclass(cls, of))


@handles(issubclass)
def _issubclass(ev: Evaluator, cls: type, of: Any) -> bool:
    return any(_is_subclass(ev, cls, each) for each in _classes(ev, of))


def _is_subclass(ev: Evaluator, cls: type, of: type) -> bool:
    check = ev.resolve(type(of), "__subclasscheck__") if ev.on else None
    if isinstance(check, types.FunctionType) and not ev.is_native(check):
        return bool(ev.call(check, of, cls))
    if isinstance(check, types.FunctionType):
        _ask_subclass(ev, cls, of)
    else:
        ev.guard_bases(cls)
    return bool(perform(issubclass, cls, of))


def _is_tensor_class(cls: Any) -> bool:
    """Check whether some tensors are instances of ``cls`` and others are not, by their class.

    ``FakeTensor`` is answered as it is: libraries ask whether a trace is going on, and avoid questions about data then.
    """
    return isinstance(cls, type) and issubclass(cls, torch.Tensor) and cls not in (torch.Tensor, FakeTensor)


def _tensor_class(ev: Evaluator, value: torch.Tensor) -> type:
    """Return the class of ``value``, with a guard on it if it is an argument."""
    node = ev.tracer.node_of(value) if ev.on and ev.tensor_source(value) is None else None
    if isinstance(node, fx.Node) and node.op == "placeholder":
        ev.tracer.guard(ev.tracer.emit(is_exactly_tensor, (node,)), True)
    return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor


def is_exactly_tensor(value: torch.Tensor) -> bool:
    """Check whether the class of ``value`` is ``torch.Tensor`` and no subclass."""
    return type(value) is torch.Tensor


@handles(type)
def _type(ev: Evaluator, value: Any, *rest: Any, **kwargs: Any) -> Any:
    if rest:
        return perform(type, value, *rest, **kwargs)
    ev.guard_class(value)
    if isinstance(value, torch.Tensor):
        ev.tracer.ask(value)
        return _tensor_class(ev, value)
    return (
        value.replaces if isinstance(value, Tracked) else type(_number(ev, value))
    )  # of a scheduled module, the class that it runs as


@handles(dataclasses.fields)
def _fields(ev: Evaluator, value: Any) -> Any:
    """Return the fields of a dataclass, each known by its name."""
    cls = value if isinstance(value, type) else class_of(value)
    ev.resolve(cls, "__dataclass_fields__")
    found = perform(dataclasses.fields, cls)
    for field in found if ev.on else ():
        ev.know(field, Const(field, Item(Attr(Const(cls), "__dataclass_fields__"), field.name)))
    return found


@handles(divmod)
def _divmod(ev: Evaluator, value: Any, by: Any) -> tuple[Any, Any]:
    if scalar_of(value) is None and scalar_of(by) is None:
        return perform(divmod, value, by)
    return value // by, value % by


@handles(callable)
def _callable(ev: Evaluator, value: Any) -> bool:
    ev.guard_class(value)
    ev.resolve(class_of(value), "__call__")
    return callable(value)


@handles(id)
def _id(ev: Evaluator, value: Any) -> int:
    if isinstance(value, torch.Tensor) or (ev.is_outside(value) and not is_fixed(value)):
        raise ev.refused(f"the forward asks for the id of a {type(value).__name__}")
    return id(value)
