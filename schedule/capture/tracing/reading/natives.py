"""Handlers for builtins called with outside values, each with guards on the part it reads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fused.torch_internals.modes import DisableTorchFunction, count_function_modes
from fused.torch_internals.modules import MODULE_CALLS
from fused.torch_internals.tensors import FakeTensor, parse_to
from schedule.capture.tracing.messages import print_arguments, warn_arguments, warn_at
from schedule.capture.tracing.opaque import _Watched
from schedule.capture.tracing.reading.evaluator import Evaluator
from schedule.capture.tracing.reading.following import Handler
from schedule.capture.tracing.reading.operators import COMPARING
from schedule.capture.tracing.reading.origin import is_changeable, is_fixed
from schedule.capture.tracing.reading.plain import is_atom
from schedule.capture.tracing.reading.resolution import class_of
from schedule.capture.tracing.reading.sources import Attr, Const, DictOf, Item, described
from schedule.capture.tracing.scalars import scalar_of

HANDLERS: dict[Any, Handler] = {}
_NOTHING = object()
_QUIET = "remove the message, or keep the module that writes it a leaf (`leaves=(…,)`)"


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


# -- attributes ---------------------------------------------------------------------------------------------


@_handles(getattr)
def _getattr(ev: Evaluator, owner: Any, name: str, default: Any = _NOTHING) -> Any:
    try:
        return ev.attr(owner, name)
    except AttributeError:
        if default is _NOTHING:
            raise
        return default


@_handles(hasattr)
def _hasattr(ev: Evaluator, owner: Any, name: str) -> bool:
    try:
        ev.attr(owner, name)
    except AttributeError:
        return False
    return True


@_handles(setattr)
def _setattr(ev: Evaluator, owner: Any, name: str, value: Any) -> None:
    ev.set_attr(owner, name, value)


@_handles(object.__setattr__, nn.Module.__setattr__)
def _default_setattr(ev: Evaluator, owner: Any, name: str, value: Any) -> None:
    ev.default_set_attr(owner, name, value)


@_handles(delattr, object.__delattr__, nn.Module.__delattr__)
def _delattr(ev: Evaluator, owner: Any, name: str) -> None:
    ev.del_attr(owner, name)


@_handles(object.__getattribute__)
def _default_getattr(ev: Evaluator, owner: Any, name: str) -> Any:
    return ev.default_attr(owner, name)


@_handles(nn.Module.__getattr__)
def _module_getattr(ev: Evaluator, owner: Any, name: str) -> Any:
    return ev.module_attr(owner, name)


@_handles(vars)
def _vars(ev: Evaluator, owner: Any) -> Any:
    return ev.attr(owner, "__dict__")


@_handles(dir)
def _dir(ev: Evaluator, owner: Any) -> Any:
    _whole_object(ev, owner)
    return dir(owner)


# -- kinds --------------------------------------------------------------------------------------------------


def _guard_class(ev: Evaluator, value: Any) -> None:
    source = ev.source_of(value)
    if source is not None and not is_fixed(value):
        ev.guard("class", source, class_of(value))


@_handles(isinstance)
def _isinstance(ev: Evaluator, value: Any, cls: Any) -> bool:
    classes = [*_classes(ev, cls)]
    _guard_class(ev, value)
    if isinstance(value, torch.Tensor) and any(map(_is_tensor_class, classes)):
        return issubclass(_tensor_class(ev, value), tuple(classes))
    scalar = scalar_of(value)
    value = value if scalar is None else scalar.value
    return any(_is_instance(ev, value, each) for each in classes)


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
    found = isinstance(value, cls)
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


@_handles(issubclass)
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
    return issubclass(cls, of)


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


@_handles(type)
def _type(ev: Evaluator, value: Any, *rest: Any, **kwargs: Any) -> Any:
    if rest:
        return type(value, *rest, **kwargs)
    _guard_class(ev, value)
    if isinstance(value, torch.Tensor):
        return _tensor_class(ev, value)
    scalar = scalar_of(value)
    return class_of(value if scalar is None else scalar.value)


@_handles(dataclasses.fields)
def _fields(ev: Evaluator, value: Any) -> Any:
    """Return the fields of a dataclass, each known by its name."""
    cls = value if isinstance(value, type) else class_of(value)
    ev.resolve(cls, "__dataclass_fields__")
    found = dataclasses.fields(cls)
    for field in found if ev.on else ():
        ev.know(field, Const(field, Item(Attr(Const(cls), "__dataclass_fields__"), field.name)))
    return found


@_handles(divmod)
def _divmod(ev: Evaluator, value: Any, by: Any) -> tuple[Any, Any]:
    if scalar_of(value) is None and scalar_of(by) is None:
        return divmod(value, by)
    return value // by, value % by


@_handles(callable)
def _callable(ev: Evaluator, value: Any) -> bool:
    _guard_class(ev, value)
    return callable(value)


@_handles(id)
def _id(ev: Evaluator, value: Any) -> int:
    if isinstance(value, torch.Tensor) or (ev.is_outside(value) and not is_fixed(value)):
        raise ev.refused(f"the forward asks for the id of a {type(value).__name__}")
    return id(value)


# -- containers ---------------------------------------------------------------------------------------------


@_handles(len)
def _len(ev: Evaluator, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and count_function_modes():
        return value.shape[0]
    source = ev.source_of(value)
    method = ev.python_method(value, "__len__")
    if method is not None:
        return method()
    if source is not None and (not is_fixed(value) or is_changeable(value)):
        ev.guard("length", source, len(value))
    return len(value)


@_handles(range)
def _range(ev: Evaluator, *bounds: Any) -> range:
    """Return a range, guarding only on the number of steps if its end is symbolic."""
    bounds = tuple(ev.index((), each) for each in bounds)
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not isinstance(stop, torch.SymInt) or type(start) is not int or type(step) is not int or step <= 0:
        return range(*bounds)
    rounds = int((stop - start + step - 1) // step)
    return range(start, start + rounds * step, step)


@_handles(iter)
def _iter(ev: Evaluator, value: Any, *sentinel: Any) -> Any:
    return iter(ev.bridged(value), *sentinel) if sentinel else iter(ev.iterate(value))


@_handles(next)
def _next(ev: Evaluator, value: Any, *default: Any) -> Any:
    ev.refuse_write(value, "takes the next item of")
    return next(value, *default)


def _of_iterables(function: Any) -> Handler:
    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        if "key" in kwargs:
            kwargs["key"] = ev.bridged(kwargs["key"])
        given = [each if _is_number(each) else ev.iterate(each) for each in args]
        if function in COMPARING and kwargs.get("key") is None:
            ev.refuse_compared(*given)
        return function(*given, **kwargs)

    return handler


def _is_number(value: Any) -> bool:
    return is_atom(value) and not isinstance(value, (tuple, frozenset, str, range))


@_handles(reversed)
def _reversed(ev: Evaluator, value: Any) -> Any:
    method = ev.python_method(value, "__reversed__")
    if method is not None:
        return method()
    if ev.source_of(value) is None and ev.python_method(value, "__getitem__") is None:
        return reversed(value)
    given = ev.iterate(value)
    return reversed(given if isinstance(given, (list, tuple)) else [*given])


for _function in (list, tuple, set, frozenset, sorted, enumerate, zip, any, all, sum, min, max):
    HANDLERS[_function] = _of_iterables(_function)


@_handles(dict)
def _dict(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
    given = [ev.mapping(each) if isinstance(each, dict) else ev.iterate(each) for each in args]
    return dict(*given, **kwargs)


@_handles(map)
def _map(ev: Evaluator, function: Any, *iterables: Any) -> Any:
    return map(lambda *items: ev.call(function, *items), *map(ev.iterate, iterables))


@_handles(filter)
def _filter(ev: Evaluator, function: Any, iterable: Any) -> Any:
    items = ev.iterate(iterable)
    return filter(None if function is None else (lambda item: ev.truth(ev.call(function, item))), items)


@_handles(functools.reduce)
def _reduce(ev: Evaluator, function: Any, iterable: Any, *first: Any) -> Any:
    return functools.reduce(lambda a, b: ev.call(function, a, b), ev.iterate(iterable), *first)


@_handles(functools.partial)
def _partial(ev: Evaluator, function: Any, *args: Any, **kwargs: Any) -> Any:
    return functools.partial(function, *args, **kwargs)


@_handles(bool)
def _bool(ev: Evaluator, *value: Any) -> bool:
    return bool(*map(ev.truth, value))


def _of_shown(function: Any) -> Handler:
    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        return function(*map(ev.shown, args), **kwargs)

    return handler


for _shown in (int, float, complex, str, repr, format, hash, abs, round, divmod, pow, bytes, slice):
    HANDLERS[_shown] = _of_shown(_shown)


@_handles(operator.getitem)
def _getitem(ev: Evaluator, owner: Any, key: Any) -> Any:
    return ev.item(owner, key)


@_handles(operator.setitem)
def _setitem(ev: Evaluator, owner: Any, key: Any, value: Any) -> None:
    ev.set_item(owner, key, value)


# -- checkpoints --------------------------------------------------------------------------------------------


@_handles(checkpoint)
def _checkpoint(ev: Evaluator, function: Any, *args: Any, use_reentrant: bool | None = None, **options: Any) -> Any:
    """Inline a checkpoint if nothing is recomputed, else raise.

    Nothing is recomputed without gradients, or in a reentrant checkpoint without inputs that require gradients.
    """
    taken = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    if taken or (use_reentrant is False and ev.tracer.module.training):
        raise ev.refused(
            "the forward checkpoints a part of itself, which a graph would keep in memory",
            "schedule the modules below, or leave that to `.checkpoint()` of the schedule",
        )
    return ev.native(checkpoint, (function, *args), {"use_reentrant": use_reentrant, **options})


# -- copies -------------------------------------------------------------------------------------------------


def _whole_object(ev: Evaluator, value: Any) -> None:
    """Guard on all attributes of an object from outside."""
    source = ev.source_of(value)
    if source is None or is_fixed(value):
        return
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        raise ev.refused(f"the forward copies or lists {described(source)}, a {type(value).__name__}")
    _guard_class(ev, value)
    own = vars(value)
    ev.guard("keys", DictOf(source), tuple(own))
    for name, item in own.items():
        ev.operand(ev.read(item, Item(DictOf(source), name)))


@_handles(copy.copy)
def _copy(ev: Evaluator, value: Any) -> Any:
    if isinstance(value, (list, dict, set, tuple)):
        return copy.copy(ev.operand(value))
    _whole_object(ev, value)
    return copy.copy(value)


@_handles(copy.deepcopy)
def _deepcopy(ev: Evaluator, value: Any, memo: Any = None) -> Any:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (list, dict, set, tuple)):
            ev.operand(item)
            pending += item.values() if isinstance(item, dict) else item
        elif not is_atom(item):
            _whole_object(ev, item)
            pending += vars(item).values() if ev.source_of(item) is not None and not is_fixed(item) else ()
    return copy.deepcopy(value, memo)


# -- effects ------------------------------------------------------------------------------------------------


@_handles(print)
def _print(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    if not ev.on:
        return
    if not print_arguments(args, kwargs):
        raise ev.refused("the forward prints what may change from call to call", _QUIET)
    ev.tracer.emit(print, args, kwargs)


@_handles(warnings.warn)
def _warn(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    if not ev.on:
        return
    repeated = warn_arguments(*args, **kwargs)
    if repeated is None:
        raise ev.refused("the forward warns of what may change from call to call, or for its caller", _QUIET)
    ev.tracer.emit(warn_at, repeated)


@_handles(exec, eval, globals, __import__, input, open)
def _refuse(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    raise ev.refused("the forward runs code or opens files in a way that is not followed (eval, exec, globals, open)")


# -- torch --------------------------------------------------------------------------------------------------


@_handles(F.scaled_dot_product_attention)
def _attention(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
    """Guard on a symbolic ``is_causal``, such as ``length > 1 and mask is None``, and convert it to a bool."""
    if isinstance(kwargs.get("is_causal"), torch.SymBool):
        kwargs["is_causal"] = bool(kwargs["is_causal"])
    return F.scaled_dot_product_attention(*args, **kwargs)


@_handles(nn.Module.to)
def _to(ev: Evaluator, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Return the module for ``module.to(…)`` if nothing has to be moved, else raise."""
    with DisableTorchFunction():
        device, dtype, *_ = parse_to(*args, **kwargs)
    for tensor in (*module.parameters(), *module.buffers()):
        cast = dtype is not None and tensor.is_floating_point()
        if (cast and tensor.dtype != dtype) or (device is not None and tensor.device != device):
            raise ev.refused(
                f"the forward moves a module to {dtype or device}, which changes its parameters",
                "move it before the model is scheduled",
            )
        if cast:
            ev.tracer.guard_dtype(tensor)
    return module


@_handles(*MODULE_CALLS)
def _call_module(ev: Evaluator, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return ev.tracer.call_forward(module, args, kwargs)
