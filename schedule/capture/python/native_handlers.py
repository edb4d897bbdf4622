"""Handlers of builtins, each with guards on the part that it reads.

Questions about classes come first, such as ``isinstance``; then numbers, attributes, containers, copies and effects.
Functions of Python's numbers without support for torch's symbolic ones (``divmod``, ``round`` to digits, formats)
become nodes: a graph computes at each call what they return.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fused.torch_internals.modes import DisableTorchFunction, count_function_modes
from fused.torch_internals.tensor_kinds import FakeTensor, parse_to
from fused.torch_internals.torch_modules import MODULE_CALLS
from schedule.capture.effects.object_containers import TrackedList
from schedule.capture.effects.opaque import _Watched, called_on
from schedule.capture.effects.result_kinds import PROPERTIES
from schedule.capture.graph.messages import print_arguments, warn_arguments, warn_at
from schedule.capture.graph.scalars import computed, scalar_of
from schedule.capture.guards.origin import is_changeable, is_fixed
from schedule.capture.guards.plain_values import Tracked, is_atom
from schedule.capture.guards.resolution import class_of
from schedule.capture.guards.sources import Attr, Const, DictOf, Item, described
from schedule.capture.python.evaluator import Evaluator
from schedule.capture.python.handler_table import HANDLERS, Handler, handles
from schedule.capture.python.operators import COMPARING
from schedule.capture.python.state_reads import Reads
from schedule.util.copying import copied
from schedule.util.internal_errors import perform, raise_if_own

# -- questions about classes --------------------------------------------------------------------------------


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


# -- Refusal of functions that set the state of torch's random generators -----------------------------------


def _refusing(name: str) -> Handler:
    def refuse(evaluator: Reads, *_: Any, **__: Any) -> NoReturn:
        raise evaluator.refused(
            f"the forward calls {name}, which a graph would not do at each call",
            "seed outside the forward, or draw from a torch.Generator that the module holds",
        )

    return refuse


_NAMES = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


def seeding_handlers() -> dict[Any, Handler]:
    """Return handlers that refuse each seeding function.

    They are looked up anew for each trace, because torch wraps some of these functions when its compiler is imported.
    """
    return {
        getattr(module, name): _refusing(f"{module.__name__}.{name}")
        for module in (torch.random, torch.cuda, torch)
        for name in _NAMES
        if hasattr(module, name)
    }


# -- Functions of Python's numbers without support for torch's symbolic ones --------------------------------


def _shown(ev: Evaluator, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return perform(function, *map(ev.shown, args), **{name: ev.shown(value) for name, value in kwargs.items()})


def _of_numbers(function: Callable[..., Any], parameters: tuple[str, ...], least: int) -> Handler:
    """Return a handler of a function without support for symbolic numbers from ``least`` arguments on."""

    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *(kwargs[name] for name in parameters[len(args) :] if name in kwargs))
        if len(given) >= least and any(scalar_of(each) is not None for each in given):
            return computed(ev.tracer, function, *given)
        return _shown(ev, function, *args, **kwargs)

    return handler


@handles(divmod)
def _divmod(ev: Evaluator, number: Any, by: Any) -> Any:
    if scalar_of(number) is None and scalar_of(by) is None:
        return _shown(ev, divmod, number, by)
    return number // by, number % by


@handles(format)
def _format(ev: Evaluator, value: Any, *specification: Any) -> Any:
    return format(ev.displayed(value), *specification)


HANDLERS[pow] = _of_numbers(pow, ("base", "exp", "mod"), 3)
HANDLERS[round] = _of_numbers(round, ("number", "ndigits"), 2)


# -- Handlers of builtins for attributes --------------------------------------------------------------------


_NOTHING = object()
_QUIET = "remove the message, or keep the module that writes it a leaf (`leaves=(…,)`)"


# -- attributes ---------------------------------------------------------------------------------------------


@handles(getattr)
def _getattr(ev: Evaluator, owner: Any, name: str, default: Any = _NOTHING) -> Any:
    try:
        return ev.attr(owner, name)
    except AttributeError as error:
        raise_if_own(error)
        if default is _NOTHING:
            raise
        return default


@handles(hasattr)
def _hasattr(ev: Evaluator, owner: Any, name: str) -> bool:
    if ev.has_plain(owner, name):
        return True
    try:
        ev.attr(owner, name)
    except AttributeError as error:
        raise_if_own(error)
        return False
    return True


@handles(setattr)
def _setattr(ev: Evaluator, owner: Any, name: str, value: Any) -> None:
    ev.set_attr(owner, name, value)


@handles(object.__setattr__, nn.Module.__setattr__)
def _default_setattr(ev: Evaluator, owner: Any, name: str, value: Any) -> None:
    ev.default_set_attr(owner, name, value)


@handles(delattr, object.__delattr__, nn.Module.__delattr__)
def _delattr(ev: Evaluator, owner: Any, name: str) -> None:
    ev.del_attr(owner, name)


@handles(object.__getattribute__)
def _default_getattr(ev: Evaluator, owner: Any, name: str) -> Any:
    return ev.default_attr(owner, name)


@handles(nn.Module.__getattr__)
def _module_getattr(ev: Evaluator, owner: Any, name: str) -> Any:
    return ev.module_attr(owner, name)


@handles(vars)
def _vars(ev: Evaluator, owner: Any) -> Any:
    return ev.attr(owner, "__dict__")


@handles(dir)
def _dir(ev: Evaluator, owner: Any) -> Any:
    _whole_object(ev, owner)
    return dir(owner)


# -- containers ---------------------------------------------------------------------------------------------


@handles(len)
def _len(ev: Evaluator, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim and count_function_modes():
        return value.shape[0]
    source = ev.source_of(value)
    method = ev.python_method(value, "__len__")
    if method is not None:
        return method()
    if source is not None and (not is_fixed(value) or is_changeable(value)):
        ev.guard("length", source, perform(len, value))
    return perform(len, value)


@handles(range)
def _range(ev: Evaluator, *bounds: Any) -> range:
    """Return a range, guarding only on the number of steps if its end is symbolic."""
    bounds = tuple(ev.index((), each) for each in bounds)
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not isinstance(stop, torch.SymInt) or type(start) is not int or type(step) is not int or step <= 0:
        return perform(range, *bounds)
    rounds = int((stop - start + step - 1) // step)
    return range(start, start + rounds * step, step)


@handles(iter)
def _iter(ev: Evaluator, value: Any, *sentinel: Any) -> Any:
    return perform(iter, ev.bridged(value), *sentinel) if sentinel else perform(iter, ev.iterate(value))


@handles(next)
def _next(ev: Evaluator, value: Any, *default: Any) -> Any:
    ev.refuse_write(value, "takes the next item of")
    return perform(next, value, *default)


def _of_iterables(function: Any) -> Handler:
    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        if "key" in kwargs:
            kwargs["key"] = ev.bridged(kwargs["key"])
        given = [each if _is_number(each) else ev.iterate(each) for each in args]
        if function in COMPARING and kwargs.get("key") is None:
            ev.refuse_compared(*given)
        return perform(function, *given, **kwargs)

    return handler


def _is_number(value: Any) -> bool:
    return is_atom(value) and not isinstance(value, (tuple, frozenset, str, range))


@handles(reversed)
def _reversed(ev: Evaluator, value: Any) -> Any:
    method = ev.python_method(value, "__reversed__")
    if method is not None:
        return method()
    if ev.source_of(value) is None and ev.python_method(value, "__getitem__") is None:
        return perform(reversed, value)
    given = ev.iterate(value)
    return reversed(given if isinstance(given, (list, tuple)) else [*given])


for _function in (list, tuple, set, frozenset, sorted, enumerate, zip, any, all, sum, min, max):
    HANDLERS[_function] = _of_iterables(_function)


@handles(dict)
def _dict(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
    given = [ev.mapping(each) if isinstance(each, dict) else ev.iterate(each) for each in args]
    return perform(dict, *given, **kwargs)


@handles(map)
def _map(ev: Evaluator, function: Any, *iterables: Any) -> Any:
    return perform(map, lambda *items: ev.call(function, *items), *map(ev.iterate, iterables))


@handles(filter)
def _filter(ev: Evaluator, function: Any, iterable: Any) -> Any:
    items = ev.iterate(iterable)
    return filter(None if function is None else (lambda item: ev.truth(ev.call(function, item))), items)


@handles(functools.reduce)
def _reduce(ev: Evaluator, function: Any, iterable: Any, *first: Any) -> Any:
    return perform(functools.reduce, lambda a, b: ev.call(function, a, b), ev.iterate(iterable), *first)


@handles(functools.partial)
def _partial(ev: Evaluator, function: Any, *args: Any, **kwargs: Any) -> Any:
    return perform(functools.partial, function, *args, **kwargs)


@handles(bool)
def _bool(ev: Evaluator, *value: Any) -> bool:
    return bool(perform(bool, *map(ev.truth, value)))


def _of_shown(function: Any) -> Handler:
    return lambda ev, *args, **kwargs: _shown(ev, function, *args, **kwargs)


for _builtin in (int, float, complex, str, repr, hash, abs, bytes, slice):
    HANDLERS[_builtin] = _of_shown(_builtin)


@handles(operator.getitem)
def _getitem(ev: Evaluator, owner: Any, key: Any) -> Any:
    return ev.item(owner, key)


@handles(operator.setitem)
def _setitem(ev: Evaluator, owner: Any, key: Any, value: Any) -> None:
    ev.set_item(owner, key, value)


@handles(TrackedList.extend)
def _extend(ev: Evaluator, items: TrackedList, values: Any) -> None:
    items.extend(ev.iterate(values))


# -- checkpoints --------------------------------------------------------------------------------------------


@handles(checkpoint)
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
    if isinstance(value, _Watched):
        raise ev.refused(f"the forward copies or lists an argument, a {class_of(value).__name__}")
    if source is None or is_fixed(value):
        return
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        raise ev.refused(f"the forward copies or lists {described(source)}, a {type(value).__name__}")
    ev.guard_class(value)
    own = vars(value)
    ev.guard("keys", DictOf(source), tuple(own))
    for name, item in own.items():
        ev.operand(ev.read(item, Item(DictOf(source), name)))


@handles(copy.copy)
def _copy(ev: Evaluator, value: Any) -> Any:
    if isinstance(value, (list, dict, set, tuple)):
        return copy.copy(ev.operand(value))
    if isinstance(value, _Watched):
        return called_on(value, copy.copy)
    _whole_object(ev, value)
    return copy.copy(value)


@handles(copy.deepcopy)
def _deepcopy(ev: Evaluator, value: Any, memo: Any = None) -> Any:
    if isinstance(value, _Watched) and memo is None:
        return called_on(value, copy.deepcopy)
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (list, dict, set, tuple)):
            ev.operand(item)
            pending += item.values() if isinstance(item, dict) else item
        elif not is_atom(item):
            _whole_object(ev, item)
            pending += vars(item).values() if ev.source_of(item) is not None and not is_fixed(item) else ()
    return copied(value, partial(_copied_tensor, ev), memo)


def _copied_tensor(ev: Evaluator, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        raise ev.refused("the forward makes a deep copy of a tensor that requires gradients", "use tensor.clone()")
    cloned: torch.Tensor = ev.call(torch.clone, tensor)
    return cloned


# -- effects ------------------------------------------------------------------------------------------------


@handles(print)
def _print(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    if not ev.on:
        return
    if not print_arguments(args, kwargs):
        raise ev.refused("the forward prints what may change from call to call", _QUIET)
    ev.tracer.emit(print, args, kwargs)


@handles(warnings.warn)
def _warn(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    if not ev.on:
        return
    repeated = warn_arguments(type(ev.tracer.calls).forward.__code__, *args, **kwargs)
    if repeated is None:
        raise ev.refused("the forward warns of what may change from call to call, or for its caller", _QUIET)
    ev.tracer.emit(warn_at, repeated)


@handles(exec, eval, globals, __import__, input, open)
def _refuse(ev: Evaluator, *args: Any, **kwargs: Any) -> None:
    raise ev.refused("the forward runs code or opens files in a way that is not followed (eval, exec, globals, open)")


# -- torch --------------------------------------------------------------------------------------------------


@handles(F.scaled_dot_product_attention)
def _attention(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
    """Guard on a symbolic ``is_causal``, such as ``length > 1 and mask is None``, and convert it to a bool."""
    if isinstance(kwargs.get("is_causal"), torch.SymBool):
        kwargs["is_causal"] = bool(kwargs["is_causal"])
    return F.scaled_dot_product_attention(*args, **kwargs)


@handles(nn.Module.to)
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


@handles(*MODULE_CALLS)
def _call_module(ev: Evaluator, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return ev.tracer.calls.forward(module, args, kwargs)
