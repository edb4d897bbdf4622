"""Handlers of builtins for attributes, containers, copies and effects, each with guards on the part it reads."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused.torch_internals.modes import DisableTorchFunction, count_function_modes
from fused.torch_internals.modules import MODULE_CALLS
from fused.torch_internals.tensors import parse_to
from schedule.capture.tracing.containers import TrackedList
from schedule.capture.tracing.messages import print_arguments, warn_arguments, warn_at
from schedule.capture.tracing.opaque import _Watched, called_on
from schedule.capture.tracing.reading import kinds  # noqa: F401 - it has handlers, too
from schedule.capture.tracing.reading.evaluator import Evaluator
from schedule.capture.tracing.reading.following import Handler
from schedule.capture.tracing.reading.handlers import HANDLERS, handles
from schedule.capture.tracing.reading.operators import COMPARING
from schedule.capture.tracing.reading.origin import is_changeable, is_fixed
from schedule.capture.tracing.reading.plain import is_atom
from schedule.capture.tracing.reading.resolution import class_of
from schedule.capture.tracing.reading.sources import DictOf, Item, described
from schedule.util.copying import copied
from schedule.util.internal_errors import perform, raise_if_own

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
    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        return perform(function, *map(ev.shown, args), **kwargs)

    return handler


for _shown in (int, float, complex, str, repr, hash, abs, bytes, slice):
    HANDLERS[_shown] = _of_shown(_shown)


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
