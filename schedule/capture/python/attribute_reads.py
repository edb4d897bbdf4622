"""Attribute lookup by Python's rules, each step followed: descriptors, the instance, its class, a module's tables."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.effects.opaque import _Watched
from schedule.capture.effects.result_kinds import is_result
from schedule.capture.effects.torch_calls import asked_by
from schedule.capture.graph.scalars import attribute_of_number, scalar_of
from schedule.capture.guards.origin import is_fixed
from schedule.capture.guards.plain_values import EXACT, Tracked, is_atom
from schedule.capture.guards.resolution import ABSENT, class_of, found_in, is_mutable
from schedule.capture.guards.sources import Attr, Const, DictOf, Item, Source
from schedule.capture.python.assignments import Assignments
from schedule.capture.python.instrument import is_instrumented
from schedule.capture.python.state_reads import Reads
from schedule.util.internal_errors import as_python_does, perform, raise_if_own

TABLES = ("_parameters", "_buffers", "_modules")
BUILTIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
_TRACKED = (_Watched, Tracked, torch.SymInt, torch.SymFloat, torch.SymBool)
_CODE = (types.FunctionType, type, types.ModuleType)


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
        if self.on and isinstance(owner, _Watched):
            return self._of_watched(owner, name)
        if self.on and scalar_of(owner) is not None:
            self.tracer.ask(owner)  # something else in a later call may have other attributes
            return attribute_of_number(owner, name)
        if not self.on or isinstance(owner, _TRACKED):
            return perform(getattr, owner, name)
        if isinstance(owner, torch.Tensor):
            return self._of_tensor(owner, name)
        if isinstance(owner, types.ModuleType):
            return self._of_file(owner, name)
        if isinstance(owner, type):
            return self._of_class(owner, name)
        if cls is super:
            return self._of_super(owner, name)
        if cls is types.MethodType and name not in ("__self__", "__func__"):
            bound = hasattr(types.MethodType, name)
            return perform(getattr, owner, name) if bound else self.attr(owner.__func__, name)
        if (not is_mutable(cls) and _dict_of(owner) is None) or (is_fixed(owner) and not isinstance(owner, _CODE)):
            return self._of_native(owner, name)
        getter = self.resolve(class_of(owner), "__getattribute__")
        try:
            if isinstance(getter, types.FunctionType):
                return self.call(getter, owner, name)
            return self.default_attr(owner, name)
        except AttributeError as error:
            raise_if_own(error)
            return self._missing(owner, name)

    def has_plain(self, owner: Any, name: str) -> bool:
        """Check whether a module holds a number, string or None as ``name``, guarding its presence, not its value."""
        if not self.on or not isinstance(owner, nn.Module):
            return False
        source, own = self.origin_of(owner), _dict_of(owner)
        if source is None or own is None or name not in own or not is_atom(own[name]):
            return False
        if isinstance(self.resolve(class_of(owner), "__getattribute__"), types.FunctionType):
            return False
        if _is_data_descriptor(self.resolve_of(owner, name)):
            return False
        self.guard("contains", DictOf(source), name)
        return True

    def _of_watched(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object among the arguments, with a guard if there is none."""
        if name == "__dict__":
            raise self.refused("the forward reads all attributes of an argument")
        try:
            return perform(getattr, owner, name)
        except AttributeError as error:
            raise_if_own(error)
            self.tracer.opaque.lacks(owner, name)
            raise

    def _of_native(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object written in C, or of a class of Python's library."""
        source = self.origin_of(owner)
        if source is not None and not hasattr(owner, name):
            self.guard("lacks", source, name)
        value = perform(getattr, owner, name)
        is_method = callable(value) and getattr(value, "__self__", None) is owner
        return value if source is None or is_method else self.read(value, Attr(source, name))

    def origin_of(self, owner: Any) -> Source | None:
        """Return the source of an outside object, also of one that stays the same, such as a function."""
        source = self.source_of(owner)
        if source is None and self.on and isinstance(owner, enum.Enum):
            return Const(owner)  # a member stays the same, but not the content of its value
        if source is None and self.on and is_fixed(owner) and not is_atom(owner):
            made_here = isinstance(owner, types.FunctionType) and is_instrumented(owner)
            return None if made_here else Const(owner)
        return source

    def _missing(self, owner: Any, name: str) -> Any:
        """Return the result of ``__getattr__``, or raise AttributeError."""
        getter = self.resolve(class_of(owner), "__getattr__")
        if isinstance(getter, types.FunctionType) and getter is not nn.Module.__getattr__:
            return self.call(getter, owner, name)
        if isinstance(owner, nn.Module):
            if (source := self.source_of(owner)) is not None:
                self.guard("lacks", source, name)
            return perform(nn.Module.__getattr__, owner, name)
        if self.on and not hasattr(owner, name):
            self.tracer.guard_lacks(owner, name)
        return perform(object.__getattribute__, owner, name)

    def default_attr(self, owner: Any, name: str) -> Any:
        """Look up ``name`` like ``object.__getattribute__``, then in the tables of a module."""
        source, own = self.origin_of(owner), _dict_of(owner)
        raw = self.resolve_of(owner, name)
        if raw is not ABSENT and _is_data_descriptor(raw):
            return self._described(owner, name, raw, source)
        if isinstance(owner, nn.Module) and source is not None:
            assigned = self.assignments.value(source, name)
            if assigned is not None:
                return assigned[0]
        if own is not None and name in own:
            if name == "training" and source is not None:
                self.guard("same", Item(DictOf(source), name), own[name])
                return own[name]
            return self.read(own[name], None if source is None else Item(DictOf(source), name))
        if own is not None and source is not None:
            self.guard("lacks_item", DictOf(source), name)
        if raw is not ABSENT:
            return self._bind(raw, owner, class_of(owner), name)
        if isinstance(owner, nn.Module) and own is not None:
            return self.module_attr(owner, name)
        raise as_python_does(_no_attribute(owner, name))

    def module_attr(self, owner: nn.Module, name: str) -> Any:
        """Return a parameter, buffer or submodule."""
        source, own = self.source_of(owner), owner.__dict__
        for table in TABLES:
            if name in own.get(table, ()):
                return self.read(own[table][name], None if source is None else Item(Item(DictOf(source), table), name))
        raise as_python_does(_no_attribute(owner, name))

    def _described(self, owner: Any, name: str, raw: Any, source: Source | None) -> Any:
        """Return the value from a data descriptor of the class: a property, a slot."""
        cls = class_of(owner)
        if isinstance(owner, enum.Enum) and getattr(getattr(raw, "fget", None), "__module__", "") == "enum":
            return self.read(perform(getattr, owner, name), None if source is None else Attr(source, name))
        if type(raw) is property or self._is_followed_descriptor(raw):
            return self._bind(raw, owner, cls, name)
        if name == "__dict__" and source is not None:
            self.know(owner.__dict__, DictOf(source))
            return owner.__dict__
        if name == "__class__":
            return type(owner)  # of a scheduled module, the class that it runs as
        value = perform(raw.__get__, owner, type(owner))
        return value if source is None else self.read(value, Attr(source, name))

    def _is_followed_descriptor(self, raw: Any) -> bool:
        return isinstance(self.resolve(type(raw), "__get__"), types.FunctionType)

    def _bind(self, raw: Any, owner: Any, cls: type, name: str) -> Any:
        """Return what a raw attribute of ``cls`` gives for ``owner``, an instance, or None for the class itself.

        The raw attribute is guarded already.
        """
        kind = type(raw)
        if kind in (types.FunctionType, functools._lru_cache_wrapper):
            return raw if owner is None else types.MethodType(raw, owner)
        if kind is staticmethod:
            return raw.__func__
        if kind is classmethod:
            return types.MethodType(raw.__func__, cls)
        if kind is property and owner is not None:
            if raw.fget is None:
                raise as_python_does(AttributeError(f"property {name!r} of {cls.__name__!r} object has no getter"))
            return self.call(raw.fget, owner)
        if kind is functools.cached_property and owner is not None:
            value = self.call(raw.func, owner)
            if (source := self.source_of(owner)) is not None:
                self.assignments.assign(owner, source, name, value)
            return value
        if kind is property or kind is functools.cached_property:
            return raw
        if kind is types.WrapperDescriptorType and owner is not None:
            return types.MethodType(raw, owner)
        getter = self.resolve(kind, "__get__")
        if getter is ABSENT:
            if type(raw) in EXACT:
                return raw
            return self.read(raw, Item(Attr(Const(_holder(cls, name, raw)), "__dict__"), name))
        if isinstance(getter, types.FunctionType):
            self.know(raw, Const(raw))
            return self.call(getter, raw, owner, cls)
        return perform(raw.__get__, owner, cls)

    def _of_class(self, owner: type, name: str) -> Any:
        """Return an attribute of a class: of its metaclass if it is a data descriptor there, of its bases, or else."""
        of_meta = self.resolve(type(owner), name)
        if of_meta is not ABSENT and _is_data_descriptor(of_meta):
            if type(of_meta) is property or self._is_followed_descriptor(of_meta):
                return self._bind(of_meta, owner, type(owner), name)
            value = perform(getattr, owner, name)
            if name == "__dict__":
                self.know(value, Attr(Const(owner), name))
                return value
            return self.read(value, Attr(Const(owner), name))
        raw = self.resolve(owner, name)
        if raw is not ABSENT:
            return self._bind(raw, None, owner, name)
        if of_meta is not ABSENT:
            return self._bind(of_meta, owner, type(owner), name)
        getter = self.resolve(type(owner), "__getattr__")
        if isinstance(getter, types.FunctionType):
            return self.call(getter, owner, name)
        value = perform(getattr, owner, name)
        return self.read(value, Attr(Const(owner), name))

    def _of_super(self, owner: Any, name: str) -> Any:
        """Return an attribute found behind a class in the order of the bases of another."""
        instance, start, cls = owner.__self__, owner.__thisclass__, owner.__self_class__
        if name in ("__class__", "__self__", "__thisclass__", "__self_class__"):
            return perform(getattr, owner, name)
        raw = self.resolve(cls, name, start)
        if raw is ABSENT:
            return perform(getattr, owner, name)
        return self._bind(raw, None if instance is cls else instance, cls, name)

    def _of_file(self, owner: types.ModuleType, name: str) -> Any:
        """Return a global of a Python module, or the result of the module's ``__getattr__``."""
        table = vars(owner)
        if name in table:
            return self.read(table[name], Item(DictOf(Const(owner)), name))
        getter = table.get("__getattr__")
        if isinstance(getter, types.FunctionType) and not self.is_native(getter):
            self.guard("lacks_item", DictOf(Const(owner)), name)
            return self.call(self.read(getter, Item(DictOf(Const(owner)), "__getattr__")), name)
        if not hasattr(owner, name):
            self.guard("lacks", Const(owner), name)
        return self.read(perform(getattr, owner, name), Attr(Const(owner), name))

    def _of_tensor(self, owner: torch.Tensor, name: str) -> Any:
        """Return an attribute of a tensor: torch's, or one that Python code set on it."""
        raw = self.resolve(torch.Tensor, name)
        if raw is not ABSENT and _is_data_descriptor(raw) and found_in(type(owner), name) is not raw:
            self.tracer.ask(owner, *asked_by(raw.__get__))  # a property of data-free tensors: the trace is not told
        own = _dict_of(owner) or {}
        if raw is not ABSENT and (name not in own or _is_data_descriptor(raw)):
            return perform(getattr, owner, name)
        source = self.tensor_source(owner)
        if source is not None:
            if name in own:
                return self.read(own[name], Item(DictOf(source), name))
            self.guard("lacks_item", DictOf(source), name)
        else:
            node = self.tracer.node_of(owner)
            if isinstance(node, fx.Node) and (node.op == "placeholder" or is_result(node)):
                self.tracer.guard(self.tracer.emit(has_own_attribute, (node, name)), False)
        return perform(getattr, owner, name)


def _no_attribute(owner: Any, name: str) -> AttributeError:
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)


def _dict_of(owner: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def has_own_attribute(value: torch.Tensor, name: str) -> bool:
    """Check for an attribute of a tensor, unknown to torch, set by Python code.

    Not by ``__dict__``, which `torch.compile` cannot read of a tensor.
    """
    return hasattr(value, name)


def _holder(cls: type, name: str, raw: Any) -> type:
    return next(base for base in cls.__mro__ if vars(base).get(name) is raw)


def _is_data_descriptor(raw: Any) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")
