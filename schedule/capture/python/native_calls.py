"""Calls of code that is not followed: of Python, of torch, of this package.

transformers' mask functions, called with all indices at once instead of one by one.

The result is the same (transformers makes most masks in this way, see ``sdpa_mask``). Code under ``torch.vmap`` cannot
be followed.

Methods that ``dataclasses`` generates, whose code has no source to follow.

Methods of lists, dicts and sets from outside: each reads a part, or is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from fused.assumptions import holds
from schedule.capture.effects.effects import drawn_by, drawn_number
from schedule.capture.graph.scalars import symbolic
from schedule.capture.guards.origin import is_changeable, is_fixed, is_native, module_of
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.guards.resolution import ABSENT
from schedule.capture.guards.sources import Source, described
from schedule.capture.python.instrument import is_instrumented
from schedule.capture.python.item_reads import ItemReads
from schedule.capture.python.native_queries import (
    SYMBOLIC,
    computes,
    described_call,
    is_query,
    is_traced,
    name_of,
    only_checks,
)
from schedule.capture.python.operators import COMPARING, Operand, converts, has_operators
from schedule.capture.recording.structure import leaves
from schedule.util.copying import copied
from schedule.util.errors import TraceError
from schedule.util.internal_errors import perform

# -- transformers' mask functions ---------------------------------------------------------------------------


def expanded(function: types.FunctionType, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the mask function over all indices if ``function`` is transformers' ``torch.vmap`` version, else None."""
    theirs = _masking()
    if theirs is None or function is not theirs._vmap_expansion_sdpa:
        return None
    (of_one,) = args
    return lambda *indices: of_one(*theirs._non_vmap_expansion_sdpa(*indices)).expand(*map(_length, indices))


def is_indexing(value: Any) -> bool:
    """Check whether ``value`` is transformers' context manager for indexing under ``torch.vmap``."""
    theirs = _masking()
    return theirs is not None and isinstance(value, theirs.TransformGetItemToIndex)


def _masking() -> Any:
    """Return transformers' module of mask functions if it is loaded and as assumed, else None."""
    loaded = sys.modules.get("transformers.masking_utils")
    return loaded if loaded is not None and holds("masks of transformers") else None


def _length(indices: Any) -> Any:
    return indices.shape[0] if isinstance(indices, torch.Tensor) else len(indices)


# -- Methods that ``dataclasses`` generates -----------------------------------------------------------------


class _Evaluator(Protocol):
    def attr(self, owner: Any, name: str) -> Any: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any: ...
    def eq(self, a: Any, b: Any) -> Any: ...
    def resolve(self, cls: type, name: str) -> Any: ...
    def set_attr(self, owner: Any, name: str, value: Any) -> None: ...
    def truth(self, value: Any) -> Any: ...


def fields_of(function: types.FunctionType, instance: Any) -> dict[str, Any] | None:
    """Return the fields that a generated method of ``instance`` is about, or None for any other function."""
    bases = type(instance).__mro__
    holder = next((base for base in bases if vars(base).get(function.__name__) is function), None)
    fields = None if holder is None else vars(holder).get("__dataclass_fields__")
    return fields if function.__code__.co_filename.startswith("<") else None


def equal(evaluator: _Evaluator, fields: dict[str, Any], one: Any, other: Any) -> Any:
    """Compare two objects field by field, as the generated ``__eq__`` does."""
    if type(one) is not type(other):
        return NotImplemented
    names = (name for name, field in fields.items() if field.compare and field._field_type.name == "_FIELD")
    return all(evaluator.truth(evaluator.eq(evaluator.attr(one, n), evaluator.attr(other, n))) for n in names)


def initialize(
    evaluator: _Evaluator, function: types.FunctionType, fields: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Set the fields of a new object, and call its ``__post_init__``, as the generated constructor does.

    Args:
        evaluator: calls factories and ``__post_init__``.
        function: the constructor.
        fields: its fields.
        args: the object and its positional arguments.
        kwargs: its keyword arguments.
    """
    instance = args[0]
    bound = inspect.signature(function).bind(*args, **kwargs)
    given, passed_on = bound.arguments, []
    frozen = type(instance).__dataclass_params__.frozen
    for name, field in fields.items():
        kind = field._field_type.name
        if kind == "_FIELD_CLASSVAR" or (not field.init and field.default_factory is dataclasses.MISSING):
            continue
        if name in given:
            value = given[name]
        elif field.default_factory is not dataclasses.MISSING:
            value = evaluator.call(field.default_factory)
        else:
            value = field.default
        if kind == "_FIELD_INITVAR":
            passed_on.append(value)
        elif frozen:
            object.__setattr__(instance, name, value)
        else:
            evaluator.set_attr(instance, name, value)
    after = evaluator.resolve(type(instance), "__post_init__")
    if after is not ABSENT:
        evaluator.call(after, instance, *passed_on)


# -- Methods of lists, dicts and sets from outside ----------------------------------------------------------


_READ_ONLY = {"get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference"}
_READ_ONLY |= {"issubset", "issuperset", "isdisjoint", "symmetric_difference"}
_READ_ONLY |= {"__len__", "__getitem__", "__contains__", "__iter__", "__eq__", "__ne__", "__or__", "__add__"}


def container_method(ev: ItemReads, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a container from outside: guard on the part it reads, or raise if it changes the container."""
    source = ev.source_of(owner)
    if name not in _READ_ONLY:
        if name == "setdefault" and args[0] in owner:
            return ev.item(owner, args[0])
        ev.refuse_write(owner, f"calls {name}() of")
    if source is None:  # an argument: its items are part of the signature
        return perform(getattr(owner, name), *args, **kwargs)
    if name == "__len__":
        ev.guard("length", source, len(owner))
        return len(owner)
    if isinstance(owner, (dict, types.MappingProxyType)):
        if name in ("get", "__getitem__", "__contains__"):
            return _of_dict(ev, source, owner, name, *args)
        if name == "__iter__":
            return iter(ev.keys(owner, source))
        entries = {key: ev.entry(owner, key, source) for key in ev.keys(owner, source)}
        return perform(getattr(entries, name), *args, **kwargs)
    if name == "copy" and isinstance(owner, list):
        return list(ev.items(owner, source))
    return perform(getattr(ev.operand(owner), name), *map(ev.operand, args), **kwargs)


def _of_dict(ev: ItemReads, source: Source, owner: Any, name: str, key: Any, default: Any = None) -> Any:
    found = key in owner
    if name == "__contains__":
        ev.guard("contains" if found else "lacks_item", source, key)
        return found
    if name == "get" and not found:
        ev.guard("lacks_item", source, key)
        return default
    return ev.entry(owner, key, source)


# -- Calls of code that is not followed ---------------------------------------------------------------------


_WITHOUT_READING = ("inspect", "typing", "warnings", "logging", "weakref", "types", "abc")


class NativeCalls(ItemReads):
    """Part of the evaluator for calls of code that is not followed."""

    _native: dict[types.CodeType, bool]
    pass_block: Callable[[Any, tuple[Any, ...]], Any]
    refuse_inspected: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

    def is_native(self, function: types.FunctionType) -> bool:
        """Check whether ``function`` runs as it is."""
        if function.__closure__:
            return is_native(function)
        code = function.__code__
        if code not in self._native:
            self._native[code] = is_native(function)
        return self._native[code]

    def native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function without following its code.

        Raises:
            TraceError: it is passed an object from outside and may read any part of it; or it may have an effect; or
                it draws random numbers outside of torch; or its result changes from call to call.
        """
        if not self.on:
            if function is copy.deepcopy:  # it would read the memory of tensors without data
                return copied(args[0], lambda tensor: tensor.detach().clone(), *args[1:], **kwargs)
            return perform(function, *args, **kwargs)
        self.tracer.containers.read_all((args, kwargs))
        module = module_of(function)
        owner = getattr(function, "__self__", None)
        root = module.partition(".")[0]
        if name_of(function) in ("__enter__", "__exit__"):
            return self.pass_block(function, args)
        if root == "inspect":
            self.refuse_inspected(function, args, kwargs)
        if not kwargs and (drawn := drawn_by(function, args)):
            value = drawn_number(*drawn)
            return symbolic(self.tracer, self.tracer.emit_scalar(drawn_number, drawn, value), value)
        if root == "random" or module.startswith("numpy.random") or isinstance(owner, random.Random):
            raise self.refused(
                "the forward draws a random number outside torch, which a graph would repeat for ever",
                "draw it with torch, or keep the module that draws it a leaf (`leaves=(…,)`)",
            )
        if isinstance(owner, str) and function.__name__ == "format":
            args = tuple(map(self.displayed, args))
            kwargs = {key: self.displayed(each) for key, each in kwargs.items()}
        if isinstance(owner, (str, bytes)):  # join, which goes through an iterator of the forward's own to its end
            args = tuple(tuple(each) if self._is_own_iterator(each) else each for each in args)
        if root not in _WITHOUT_READING:
            args = tuple(self._handed(each, function) for each in args)
            kwargs = {key: self._handed(each, function) for key, each in kwargs.items()}
            if isinstance(getattr(function, "__self__", None), (dict, set, frozenset)) or function in COMPARING:
                self.refuse_compared(args, kwargs)
        given = (self._bound(function), *args, *kwargs.values())
        if is_traced(function, module, given):
            return self._asking(given, self._traced(function, module, args, kwargs))
        if computes(function, module, args, given[0]):
            return self._asking(given, perform(function, *args, **kwargs))
        if not is_query(function, module, given):
            raise self._refused_effect(function, module)
        return self._answer(function, module, args, kwargs)

    def _asking(self, given: tuple[Any, ...], result: Any) -> Any:
        """Note that ``result``, if it is a constant, may depend on the class of the numbers given."""
        if is_atom(result):
            for _, leaf in leaves(given):
                if isinstance(leaf, SYMBOLIC):
                    self.tracer.ask(leaf)
        return result

    def _traced(self, function: Any, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch that the trace writes; refuse it if it does something else."""
        before = len(self.tracer.graph.nodes)
        result = perform(function, *args, **kwargs)
        if result is None and len(self.tracer.graph.nodes) == before and not only_checks(function, module):
            raise self._refused_effect(function, module)
        if is_atom(result) and self._is_plain((self._bound(function), *args, *kwargs.values())):
            return self._guarded(function, args, kwargs, result)
        return result

    def _refused_effect(self, function: Any, module: str) -> TraceError:
        return self.refused(
            f"the forward calls {described_call(function, module)}, which may change something outside of it that a "
            "graph would not change at each call"
        )

    def _answer(self, function: Any, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the answer to a query, with a guard on it.

        Raises:
            TraceError: the answer cannot be compared, or is another one each time.
        """
        result, name = perform(function, *args, **kwargs), name_of(function)
        plain, is_torch = self._is_plain((*args, *kwargs.values())), module.partition(".")[0] == "torch"
        if self.tracer.regions.decides(name):
            return result
        if is_torch and not (plain and is_atom(result)):  # an object of torch, such as a stream
            of_object = plain and any(map(_has_settings, (self._bound(function), *args, *kwargs.values())))
            return self._guarded(function, args, kwargs, result) if of_object else result
        if function is sys.exc_info and result[1] is not None:  # an exception handled by the forward
            return result
        again = function(*args, **kwargs) if plain else None
        if plain and (again is result or (is_atom(result) and again == result)):
            return self._guarded(function, args, kwargs, result)
        raise self.refused(
            f"the forward asks {described_call(function, module)}(), which may give another answer at each call"
        )

    def _guarded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        self.query(functools.partial(function, **kwargs) if kwargs else function, args, result)
        return result

    def _is_own_iterator(self, value: Any) -> bool:
        return isinstance(value, Iterator) and self.source_of(value) is None

    @staticmethod
    def _is_plain(values: tuple[Any, ...]) -> bool:
        """Check whether ``values`` can be passed again at each call; sizes of this call cannot."""
        symbolic = any(isinstance(leaf, SYMBOLIC) for _, leaf in leaves(values))
        return not symbolic and all(is_atom(each) or is_fixed(each) for each in values)

    @staticmethod
    def _bound(function: Any) -> Any:
        """Return the object that ``function`` is a method of, or that it is."""
        return function if is_changeable(function) else getattr(function, "__self__", None)

    def _handed(self, value: Any, function: Any) -> Any:
        """Prepare an argument for unfollowed code: read containers, wrap callables, refuse other outside objects."""
        source = self.source_of(value)
        if has_operators(type(value)) and converts(function):
            return Operand(self, value)
        if callable(value) and not isinstance(value, type) and (source is None or not has_operators(type(value))):
            return self.bridged(value)
        if source is None or is_fixed(value) or is_atom(value) or isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, dict, set, frozenset, tuple, deque, types.MappingProxyType)):
            return self.operand(value)
        name = getattr(function, "__qualname__", type(function).__name__)
        raise self.refused(
            f"the forward hands {described(source)}, a {type(value).__name__}, to {name}, which may read all of it"
        )

    def refuse_compared(self, *given: Any) -> None:
        """Raise for a user's object from outside in a container whose items native code compares."""
        for value in given:
            if isinstance(value, dict):
                self.refuse_compared(*value, *value.values())
            elif isinstance(value, (list, tuple, set, frozenset, deque)):
                self.refuse_compared(*value)
            else:
                self.refuse_key(value)

    def bridged(self, value: Any) -> Any:
        """Return a callable for unfollowed code to call ``value`` with its code followed."""
        function = getattr(value, "__func__", value)
        kind = type(function)
        if kind is types.FunctionType and (is_instrumented(function) or self.is_native(function)):
            return value
        if not (kind in (types.FunctionType, functools.partial) or isinstance(function, nn.Module)) or not self.on:
            return value

        def followed(*args: Any, **kwargs: Any) -> Any:
            return self.call(value, *args, **kwargs)

        return functools.update_wrapper(followed, function, updated=()) if kind is types.FunctionType else followed

    def _is_state(self, value: Any) -> bool:
        return any(
            self.source_of(leaf) is not None and not (is_fixed(leaf) or is_atom(leaf) or isinstance(leaf, torch.Tensor))
            for _, leaf in leaves(value)
        )

    def _reads_state(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Check whether a native function is passed outside objects, so its code must be followed too."""
        if not self.on or (function.__module__ or "").partition(".")[0] in _WITHOUT_READING:
            return False
        given = [each for each in (*args, *kwargs.values()) if not callable(each) and self._is_state(each)]
        return any(not isinstance(each, (list, dict, set, frozenset, tuple, deque)) for each in given)


def _has_settings(value: Any) -> bool:
    """Check whether ``value`` is an object that may have settings of its own, unlike functions and classes."""
    fixed = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    return not (is_atom(value) or isinstance(value, fixed))
