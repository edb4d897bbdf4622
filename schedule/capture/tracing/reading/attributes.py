"""Attribute lookup by Python's rules, each step followed: descriptors, the instance, its class, a module's tables."""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import Any

import torch
from torch import nn

from schedule.capture.recording.structure import original_class
from schedule.capture.tracing.containers import TrackedDict
from schedule.capture.tracing.opaque import _Watched
from schedule.capture.tracing.reading.assignments import Assignments
from schedule.capture.tracing.reading.origin import is_fixed, is_native_class
from schedule.capture.tracing.reading.plain import is_atom
from schedule.capture.tracing.reading.reads import Reads
from schedule.capture.tracing.reading.sources import SELF, Attr, Const, DictOf, Item, Source

TABLES = ("_parameters", "_buffers", "_modules")
BUILTIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_METHODS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)


class AttributeReads(Reads):
    """Part of the evaluator for attribute reads."""

    assignments: Assignments

    @property
    def assigned(self) -> int:
        """Number of attributes assigned so far."""
        return self.assignments.count

    def attr(self, owner: Any, name: str) -> Any:
        """Evaluate ``owner.name``."""
        cls = type(owner)
        if not self.on or _answers_itself(owner, cls):
            value = getattr(owner, name)
            source = self.source_of(owner) if cls in (*BUILTIN_CONTAINERS, types.FunctionType) else None
            return value if source is None or callable(value) else self.read(value, Attr(source, name))
        if cls is types.ModuleType or isinstance(owner, types.ModuleType):
            return self._of_file(owner, name)
        if isinstance(owner, type):
            return self._of_class(owner, name)
        if cls is super:
            return self._of_super(owner, name)
        if is_fixed(owner):
            if not hasattr(owner, name):
                self.guard("lacks", Const(owner), name)
            value = getattr(owner, name)
            return value if callable(value) else self.read(value, Attr(Const(owner), name))
        getter = cls.__getattribute__
        if isinstance(getter, types.FunctionType) and cls is not owner:
            try:
                return self.call(getter, owner, name)
            except AttributeError:
                return self._missing(owner, name)
        try:
            return self.default_attr(owner, name)
        except AttributeError:
            return self._missing(owner, name)

    def _missing(self, owner: Any, name: str) -> Any:
        """Return the result of ``__getattr__``, or raise AttributeError."""
        cls = type(owner)
        getter = getattr(cls, "__getattr__", None)
        if isinstance(getter, types.FunctionType) and getter is not nn.Module.__getattr__:
            source = self.source_of(owner)
            if source is not None:
                self.guard("class_lacks", source, name)
                if _dict_of(owner) is not None:
                    self.guard("lacks_item", DictOf(source), name)
            return self.call(getter, owner, name)
        source = self.source_of(owner)
        if source is not None:
            self.guard("lacks", source, name)
        return getattr(owner, name) if not isinstance(owner, nn.Module) else nn.Module.__getattr__(owner, name)

    def default_attr(self, owner: Any, name: str) -> Any:
        """Look up ``name`` like ``object.__getattribute__``, then in the tables of a module."""
        cls, source = type(owner), self.source_of(owner)
        own = _dict_of(owner)
        holder = next((base for base in cls.__mro__ if name in base.__dict__), None)
        raw = None if holder is None else holder.__dict__[name]
        if holder is not None and _is_data_descriptor(raw):
            return self._described(owner, name, holder, raw, source)
        if isinstance(owner, nn.Module) and source is not None:
            assigned = self.assignments.value(source, name)
            if assigned is not None:
                return assigned[0]
        if own is not None and name in own:
            if name == "training" and source is not None:
                self.guard("same", Item(DictOf(source), name), own[name])
                return own[name]
            return self.read(own[name], None if source is None else Item(DictOf(source), name))
        if holder is not None:
            return self._of_holder(owner, name, holder, raw, source)
        if isinstance(owner, nn.Module) and own is not None:
            return self.module_attr(owner, name)
        raise AttributeError(name)

    def module_attr(self, owner: nn.Module, name: str) -> Any:
        """Return a parameter, buffer or submodule."""
        source, own = self.source_of(owner), owner.__dict__
        for table in TABLES:
            if name in own.get(table, ()):
                return self.read(own[table][name], None if source is None else Item(Item(DictOf(source), table), name))
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")

    def _described(self, owner: Any, name: str, holder: type, raw: Any, source: Source | None) -> Any:
        """Return the value from a data descriptor of the class: a property, a slot."""
        self._guard_class(owner, name, holder, source, own=False, inherited=True)
        if isinstance(raw, property) and isinstance(raw.fget, types.FunctionType):
            return self.call(raw.fget, owner)
        if isinstance(raw, types.MemberDescriptorType):
            return self.read(raw.__get__(owner, type(owner)), None if source is None else Attr(source, name))
        if name == "__dict__" and source is not None:
            self.know(owner.__dict__, DictOf(source))
            return owner.__dict__
        if name == "__class__" and source is not None:
            self.guard("class", source, class_of(owner))
        if isinstance(getattr(type(raw), "__get__", None), types.FunctionType):
            return self._got(raw, name, holder, owner, type(owner))
        value = raw.__get__(owner, type(owner))
        return value if source is None or name == "__class__" else self.read(value, Attr(source, name))

    def _of_holder(self, owner: Any, name: str, holder: type, raw: Any, source: Source | None) -> Any:
        """Return the value from a class attribute: a method, a default."""
        getter = getattr(type(raw), "__get__", None)
        self._guard_class(owner, name, holder, source, own=True, inherited=getter is not None)
        if isinstance(raw, (types.FunctionType, functools._lru_cache_wrapper)):
            return types.MethodType(raw, owner)
        if isinstance(raw, staticmethod):
            return raw.__func__
        if isinstance(raw, classmethod):
            return types.MethodType(raw.__func__, type(owner))
        if getter is None:
            return self.read(raw, Attr(Const(type(owner)), name))
        if isinstance(raw, functools.cached_property):
            value = self.call(raw.func, owner)
            if (source := self.source_of(owner)) is not None:
                self.assignments.assign(owner, source, name, value)
            return value
        if isinstance(getter, types.FunctionType):
            return self._got(raw, name, holder, owner, type(owner))
        return raw.__get__(owner, type(owner))

    def _got(self, raw: Any, name: str, holder: type, owner: Any, cls: type) -> Any:
        """Return the value from a descriptor in the ``__dict__`` of ``holder``, with a ``__get__`` to follow."""
        self.read(raw, Item(Attr(Const(holder), "__dict__"), name))
        return self.call(type(raw).__get__, raw, owner, cls)

    def _guard_class(
        self, owner: Any, name: str, holder: type, source: Source | None, *, own: bool, inherited: bool
    ) -> None:
        """Guard on the class of ``owner``, no instance attribute (``own``), and the class attribute (``inherited``)."""
        cls = type(owner)
        if source is not None:
            if source != SELF:
                self.guard("class", source, class_of(owner))
            if own and _dict_of(owner) is not None:
                self.guard("lacks_item", DictOf(source), name)
        if inherited and not is_native_class(holder):
            self._guard_inherited(cls, name, holder)

    def _guard_inherited(self, cls: type, name: str, holder: type) -> None:
        if self.on and not name.startswith("__"):
            raw, seen = holder.__dict__[name], getattr(cls, name, None)
            if seen is raw:
                self.guard("is", Attr(Const(cls), name), raw)
            else:
                self.guard("is", Item(Attr(Const(holder), "__dict__"), name), raw)

    def _of_class(self, owner: type, name: str) -> Any:
        holder = next((base for base in owner.__mro__ if name in base.__dict__), None)
        if name == "__dict__":
            table = owner.__dict__
            self.know(table, Attr(Const(owner), name))
            return table
        if holder is None:
            return self._of_metaclass(owner, name)
        if is_native_class(holder) or name.startswith("__"):
            return getattr(owner, name)
        raw = holder.__dict__[name]
        if isinstance(getattr(type(raw), "__get__", None), types.FunctionType):
            return self._got(raw, name, holder, None, owner)
        value = getattr(owner, name)
        if value is raw:
            return self.read(value, Attr(Const(owner), name))
        self._guard_inherited(owner, name, holder)
        return value

    def _of_metaclass(self, owner: type, name: str) -> Any:
        raw = next((vars(base)[name] for base in type.mro(type(owner)) if name in vars(base)), None)
        if isinstance(raw, property) and isinstance(raw.fget, types.FunctionType):
            return self.call(raw.fget, owner)
        value = getattr(owner, name)
        return value if callable(value) or is_native_class(type(owner)) else self.read(value, Attr(Const(owner), name))

    def _of_super(self, owner: Any, name: str) -> Any:
        instance, start = owner.__self__, owner.__thisclass__
        cls = owner.__self_class__
        mro = cls.__mro__
        for base in mro[mro.index(start) + 1 :]:
            if name in base.__dict__:
                raw = base.__dict__[name]
                if isinstance(raw, types.FunctionType) and not is_native_class(base) and not name.startswith("__"):
                    self.guard("is", Item(Attr(Const(base), "__dict__"), name), raw)
                if isinstance(raw, types.FunctionType) and not isinstance(instance, type):
                    return types.MethodType(raw, instance)
                if isinstance(raw, property) and isinstance(raw.fget, types.FunctionType):
                    return self.call(raw.fget, instance)
                break
        return getattr(owner, name)

    def _of_file(self, owner: types.ModuleType, name: str) -> Any:
        table = vars(owner)
        if name not in table:
            return self.read(getattr(owner, name), Attr(Const(owner), name))
        return self.read(table[name], Item(DictOf(Const(owner)), name))


def _answers_itself(owner: Any, cls: type) -> bool:
    """Check whether attributes of ``owner`` need no guard: tensors, numbers, watched objects, containers, functions."""
    if isinstance(owner, (torch.Tensor, _Watched, TrackedDict, *_SYMBOLIC)) or is_atom(owner):
        return True
    return cls in BUILTIN_CONTAINERS or cls in _METHODS


def _dict_of(owner: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _is_data_descriptor(raw: Any) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")


def class_of(value: Any) -> type:
    """Return the user's class of ``value``, also for a scheduled module."""
    return original_class(value) if isinstance(value, nn.Module) else type(value)
