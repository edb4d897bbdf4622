"""Runs a forward's instrumented code: follows what it reads from outside, and refuses what it writes there.

A value that was there before the forward ran is *outside*: the module, what it holds, globals, closures, arguments.
Outside values that are compared or branched on become guards as they are read; objects are remembered by where they
were found, so that what is read of them later has a place to be guarded at. What the forward makes itself is its own.
"""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from schedule.errors import TraceError
from schedule.tracing.containers import TrackedDict
from schedule.tracing.opaque import _Watched
from schedule.tracing.reading.assignments import Assignments
from schedule.tracing.reading.calling import Calling
from schedule.tracing.reading.ledger import Guard, Ledger, is_atom, is_plain_content, snapshot
from schedule.tracing.reading.origin import is_fixed, is_native_class
from schedule.tracing.reading.sources import (
    SELF,
    Attr,
    Const,
    DictOf,
    Item,
    Query,
    Source,
    described,
    module_path,
    submodule_path,
)
from schedule.tracing.source import user_line
from schedule.tracing.structure import leaves

if TYPE_CHECKING:
    from schedule.tracing.tracer import ModuleTracer

_TABLES = ("_parameters", "_buffers", "_modules")
_UNGUARDED = {*vars(nn.Module()), "call_super_init", "dump_patches", "_version", "T_destination"} - {"training"}
_BUILTIN_CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
_MISSING = object()


class Evaluator(Calling):
    """The operations that instrumented code calls, for one trace.

    Args:
        tracer: the trace.
    """

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__(tracer)
        self.on = True
        self.assignments = Assignments(self)
        self._guards: dict[Any, Guard] = {}
        self._known: dict[int, tuple[Any, Source]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, Source]] = {}
        self._given: dict[int, Any] = {}
        self.know(tracer.module, SELF)

    # -- the ledger ---------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        """What was read."""
        return Ledger(self._guards.values())

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        """Within, reads become guards, as those of the forward do; or not, as those of a submodule that stays a call."""
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def guard(self, kind: str, source: Source, expected: Any = None) -> None:
        """From here on the graph holds only where this is so."""
        if self.on:
            key = (kind, source, expected if isinstance(expected, (Source, str, int)) else id(expected))
            self._guards.setdefault(key, Guard(kind, source, expected))

    def know(self, value: Any, source: Source) -> None:
        """``value`` is outside, at ``source``."""
        self._known.setdefault(id(value), (value, source))

    def source_of(self, value: Any) -> Source | None:
        """Where an outside object was found; None for what the forward made, and while nothing is recorded."""
        found = self._known.get(id(value)) if self.on else None
        return None if found is None else found[1]

    def path_of(self, child: nn.Module) -> str | None:
        """The path by which the forward found ``child``."""
        source = self.source_of(child)
        return None if source is None else submodule_path(source)

    def found_at(self, value: Any) -> Source | None:
        """Where an object from outside was found, also while nothing is recorded."""
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Whether the kind of ``tensor`` is guarded already."""
        return id(tensor) in self._tensors

    def was_compared(self, source: Source) -> bool:
        """Whether the value at ``source`` is guarded, not just its kind."""
        return any(guard.source == source and guard.kind in ("same", "content", "is") for guard in self._guards.values())

    def know_arguments(self, arguments: Any) -> None:
        """Remember what the forward is given: containers may be read, not changed."""
        for _, leaf in leaves(arguments):
            if isinstance(leaf, nn.Module):
                self.know(leaf, Const(leaf))
        pending = [arguments]
        while pending:
            value = pending.pop()
            if isinstance(value, (tuple, list, dict)) and not isinstance(value, torch.Size):
                self._given[id(value)] = value
                pending += value.values() if isinstance(value, dict) else value

    def is_given(self, value: Any) -> bool:
        """Whether ``value`` is a container among the arguments."""
        return id(value) in self._given

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that is traced; one of this package's own is not followed."""
        if isinstance(forward, types.FunctionType) and not self.is_native(forward):
            return self.call(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    def refused(self, why: str, fix: str = "") -> TraceError:
        """The error for what cannot be guarded or done again by a graph."""
        return TraceError(
            why,
            where=user_line(),
            fix=fix or "keep the module that does so a leaf (`leaves=(…,)`), or schedule its submodules instead",
        )

    def read(self, value: Any, source: Source | None) -> Any:
        """``value`` is read at ``source``, an outside place: guard it, or remember where it was found."""
        if source is None or not self.on:
            return value
        if isinstance(value, torch.Tensor):
            return self._read_tensor(value, source)
        if is_atom(value):
            self.guard("same", source, value)
        elif isinstance(value, types.MethodType):
            self.guard("calls", source, value.__func__)
            self.read(value.__self__, Attr(source, "__self__"))
        elif is_fixed(value):
            self.guard("is", source, value)
            self.know(value, Const(value))
        elif (known := self.source_of(value)) is None:
            self.know(value, source)
        elif known != source:
            self.guard("is", source, known)
        return value

    def _read_tensor(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            kind = (tensor.dim(), tensor.dtype)
        known = self._tensors.get(id(tensor))
        if known is None:
            self._tensors[id(tensor)] = (tensor, source)
            self.guard("tensor", source, kind)
            if (place := module_path(source)) is not None:
                self.tracer.found_tensor(tensor, ".".join(filter(None, place)))
        elif known[1] != source:
            self.guard("is", source, known[1])
        return tensor

    def query(self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: Any) -> None:
        """The process was asked something that it may answer otherwise at another call."""
        self.read(answer, Query(function, arguments))

    # -- names --------------------------------------------------------------------------------------------------

    def global_name(self, function: types.FunctionType, name: str) -> Any:
        """A name looked up in a function's globals, then among the builtins."""
        table = function.__globals__
        if name in table:
            return self.read(table[name], Item(Const(table), name))
        self.guard("lacks_item", Const(table), name)
        held = table.get("__builtins__", builtins)
        found = vars(held) if isinstance(held, types.ModuleType) else held
        if name not in found:
            raise NameError(f"name {name!r} is not defined", name=name)
        return found[name]

    def cell_value(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """What a variable of the enclosing function holds."""
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        return self.read(value, Attr(Const(cell), "cell_contents"))

    # -- attributes ---------------------------------------------------------------------------------------------

    def attr(self, owner: Any, name: str) -> Any:
        """``owner.name``."""
        cls = type(owner)
        if not self.on or _answers_itself(owner, cls):
            return getattr(owner, name)
        if cls is types.ModuleType or isinstance(owner, types.ModuleType):
            return self._of_file(owner, name)
        if isinstance(owner, type):
            return self._of_class(owner, name)
        if cls is super:
            return self._of_super(owner, name)
        if is_fixed(owner):
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
        """The answer of ``__getattr__``; raises AttributeError where there is none."""
        cls = type(owner)
        getter = getattr(cls, "__getattr__", None)
        if isinstance(getter, types.FunctionType) and getter is not nn.Module.__getattr__:
            source = self.source_of(owner)
            if source is not None and hasattr(owner, "__dict__"):
                self.guard("lacks_item", DictOf(source), name)
            return self.call(getter, owner, name)
        source = self.source_of(owner)
        if source is not None:
            self.guard("lacks", source, name)
        return getattr(owner, name) if not isinstance(owner, nn.Module) else nn.Module.__getattr__(owner, name)

    def default_attr(self, owner: Any, name: str) -> Any:
        """``object.__getattribute__(owner, name)``, and the tables of a module."""
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
        """A parameter, buffer or submodule."""
        source, own = self.source_of(owner), owner.__dict__
        for table in _TABLES:
            if name in own.get(table, ()):
                return self.read(own[table][name], None if source is None else Item(Item(DictOf(source), table), name))
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")

    def _described(self, owner: Any, name: str, holder: type, raw: Any, source: Source | None) -> Any:
        """What a data descriptor of the class answers: a property, a slot."""
        self._guard_class(owner, name, holder, source, own=False, held=True)
        if isinstance(raw, property) and isinstance(raw.fget, types.FunctionType):
            return self.call(raw.fget, owner)
        if isinstance(raw, types.MemberDescriptorType):
            return self.read(raw.__get__(owner, type(owner)), None if source is None else Attr(source, name))
        if name == "__dict__" and source is not None:
            self.know(owner.__dict__, DictOf(source))
            return owner.__dict__
        if name == "__class__" and source is not None:
            self.guard("class", source, _class_of(owner))
        getter = getattr(type(raw), "__get__", None)
        if isinstance(getter, types.FunctionType):
            return self.call(getter, raw, owner, type(owner))
        return raw.__get__(owner, type(owner))

    def _of_holder(self, owner: Any, name: str, holder: type, raw: Any, source: Source | None) -> Any:
        """What the class has for all its objects: a method, a default."""
        getter = getattr(type(raw), "__get__", None)
        self._guard_class(owner, name, holder, source, own=True, held=getter is not None)
        if isinstance(raw, (types.FunctionType, types.BuiltinFunctionType)) or type(raw).__name__ == "_lru_cache_wrapper":
            return types.MethodType(raw, owner) if not isinstance(raw, types.BuiltinFunctionType) else raw
        if isinstance(raw, staticmethod):
            return raw.__func__
        if isinstance(raw, classmethod):
            return types.MethodType(raw.__func__, type(owner))
        if getter is None:
            return self.read(raw, Attr(Const(type(owner)), name))
        if hasattr(raw, "func") and type(raw).__name__ == "cached_property":
            return self.call(raw.func, owner)
        if isinstance(getter, types.FunctionType):
            return self.call(getter, raw, owner, type(owner))
        return raw.__get__(owner, type(owner))

    def _guard_class(
        self, owner: Any, name: str, holder: type, source: Source | None, *, own: bool, held: bool
    ) -> None:
        """The class of ``owner`` stays what it is; the object gets nothing of its own; the class keeps what it has."""
        cls = type(owner)
        if source is not None:
            if source != SELF:
                self.guard("class", source, _class_of(owner))
            if own and _dict_of(owner) is not None:
                self.guard("lacks_item", DictOf(source), name)
        if held and not is_native_class(holder):
            self._guard_held(cls, name, holder)

    def _guard_held(self, cls: type, name: str, holder: type) -> None:
        if self.on and not name.startswith("__"):
            raw, seen = holder.__dict__[name], getattr(cls, name, None)
            if seen is raw:
                self.guard("is", Attr(Const(cls), name), raw)
            else:
                self.guard("is", Item(Attr(Const(holder), "__dict__"), name), raw)

    def _of_class(self, owner: type, name: str) -> Any:
        holder = next((base for base in owner.__mro__ if name in base.__dict__), None)
        if holder is None or is_native_class(holder) or name.startswith("__"):
            return getattr(owner, name)
        value, raw = getattr(owner, name), holder.__dict__[name]
        if value is raw:
            return self.read(value, Attr(Const(owner), name))
        self._guard_held(owner, name, holder)
        return value

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
            return getattr(owner, name)
        return self.read(table[name], Item(DictOf(Const(owner)), name))

    # -- items, truth, comparison -------------------------------------------------------------------------------

    def item(self, owner: Any, key: Any) -> Any:
        """``owner[key]``."""
        source = self.source_of(owner)
        method = self._python_method(owner, "__getitem__")
        if method is not None:
            return method(key)
        if source is None or not isinstance(owner, _BUILTIN_CONTAINERS):
            if source is not None and not is_fixed(owner):
                raise self.refused(f"the forward looks into a {type(owner).__name__}, {described(source)}")
            return owner[key]
        if isinstance(key, slice):
            return list(self.iterate(owner))[key] if isinstance(owner, list) else tuple(self.iterate(owner))[key]
        if isinstance(owner, (dict, types.MappingProxyType)):
            return self.entry(owner, key, source)
        if isinstance(key, torch.SymInt):
            key = int(key)
        value = owner[key]
        if isinstance(key, int) and key < 0:
            self.guard("length", source, len(owner))
            key += len(owner)
        return self.read(value, Item(source, key))

    def entry(self, owner: Any, key: Any, source: Source) -> Any:
        """An entry of a dict from outside."""
        if key in owner:
            return self.read(owner[key], Item(source, self._key(key)))
        self.guard("lacks_item", source, self._key(key))
        if type(owner).__missing__ is not None if hasattr(type(owner), "__missing__") else False:
            raise self.refused(f"the forward asks {described(source)} for an item that it would make")
        return owner[key]

    def _key(self, key: Any) -> Any:
        if not (is_atom(key) or is_fixed(key)):
            raise self.refused(f"the forward looks an item up by a {type(key).__name__}")
        return key

    def iterate(self, value: Any) -> Any:
        """What a loop over ``value`` goes through; itself where that is the forward's own."""
        source = self.source_of(value)
        if isinstance(value, (torch.Tensor, str)) or (type(value) in (list, tuple, range) and source is None):
            return value
        method = self._python_method(value, "__iter__")
        if method is not None:
            return method()
        if source is not None and isinstance(value, (dict, types.MappingProxyType)):
            return self.keys(value, source)
        if source is not None and isinstance(value, (set, frozenset)):
            return [*self._whole(value, source)]
        if source is not None and isinstance(value, (list, tuple, deque)):
            return self.items(value, source)
        if source is not None and hasattr(type(value), "__next__"):
            raise self.refused(f"the forward takes the next item of an iterator that it did not make, {described(source)}")
        return value

    def keys(self, value: Any, source: Source) -> list[Any]:
        """The keys of a dict from outside."""
        keys = tuple(value)
        self.guard("keys", source, keys)
        for key in keys:
            if not is_atom(key) and not is_fixed(key):
                self.know(key, Const(key))
        return list(keys)

    def items(self, value: Any, source: Source) -> list[Any]:
        """The items of a list or tuple from outside."""
        self.guard("length", source, len(value))
        return [self.read(each, Item(source, index)) for index, each in enumerate(value)]

    def mapping(self, value: Any) -> Any:
        """What ``**value`` hands on."""
        source = self.source_of(value)
        if source is None or not isinstance(value, dict):
            return value
        return {key: self.entry(value, key, source) for key in self.iterate(value)}

    def _whole(self, value: Any, source: Source) -> Any:
        """A container that is read as a whole, such as one that is compared."""
        if is_plain_content(value, 1 << 16):
            self.guard("content", source, snapshot(value))
            return value
        if isinstance(value, (dict, types.MappingProxyType)):
            return {key: self.operand(self.entry(value, key, source)) for key in self.iterate(value)}
        if isinstance(value, (list, tuple, deque)):
            return type(value)([self.operand(each) for each in self.iterate(value)])
        raise self.refused(f"the forward reads a {type(value).__name__}, {described(source)}, whose items cannot be compared")

    def operand(self, value: Any) -> Any:
        """``value`` is computed with: all of it is read."""
        source = self.source_of(value)
        if source is None or is_fixed(value):
            return value
        if isinstance(value, _BUILTIN_CONTAINERS):
            return self._whole(value, source)
        return value

    def shown(self, value: Any) -> Any:
        """``value`` is written as text."""
        source = self.source_of(value)
        if source is not None and isinstance(value, _BUILTIN_CONTAINERS) and is_plain_content(value):
            self.guard("content", source, snapshot(value))
        return value

    def truth(self, value: Any) -> Any:
        """``value`` is tested; itself."""
        source = self.source_of(value)
        if source is None or isinstance(value, torch.Tensor) or is_fixed(value):
            return value
        for name in ("__bool__", "__len__"):
            if (method := self._python_method(value, name)) is not None:
                method()
                return value
        if isinstance(value, _BUILTIN_CONTAINERS):
            self.guard("true" if value else "false", source)
        else:
            self.guard("present", source)
        return value

    def _identical(self, a: Any, b: Any) -> None:
        """Two objects are compared by identity."""
        one, other = self.source_of(a), self.source_of(b)
        one = one if one is not None else self._tensor_source(a)
        other = other if other is not None else self._tensor_source(b)
        if one is not None and other is not None:
            if one != other:
                self.guard("is" if a is b else "distinct", one, other)
        elif one is not None and (b is None or is_atom(b)):
            self.guard("present", one)
        elif other is not None and (a is None or is_atom(a)):
            self.guard("present", other)

    def _tensor_source(self, value: Any) -> Source | None:
        found = self._tensors.get(id(value)) if self.on else None
        return None if found is None else found[1]

    def is_(self, a: Any, b: Any) -> bool:
        """``a is b``."""
        self._identical(a, b)
        return a is b

    def is_not(self, a: Any, b: Any) -> bool:
        """``a is not b``."""
        self._identical(a, b)
        return a is not b

    def _equated(self, a: Any, b: Any) -> tuple[Any, Any]:
        method = self._python_method(a, "__eq__") if self.source_of(a) is not None else None
        if method is not None:
            return method(b), True
        if not isinstance(a, _BUILTIN_CONTAINERS) and not isinstance(b, _BUILTIN_CONTAINERS):
            self._identical(a, b)
        return self.operand(a), self.operand(b)

    def eq(self, a: Any, b: Any) -> Any:
        """``a == b``."""
        a, b = self._equated(a, b)
        return a == b

    def ne(self, a: Any, b: Any) -> Any:
        """``a != b``."""
        a, b = self._equated(a, b)
        return a != b

    def in_(self, a: Any, b: Any) -> bool:
        """``a in b``."""
        source, method = self.source_of(b), self._python_method(b, "__contains__")
        if method is not None:
            return bool(method(a))
        if source is not None and isinstance(b, (dict, types.MappingProxyType)):
            found = a in b
            self.guard("contains" if found else "lacks_item", source, self._key(a))
            return found
        if source is not None and isinstance(b, _BUILTIN_CONTAINERS):
            return a in self._whole(b, source)
        return a in (self.iterate(b) if self._python_method(b, "__iter__") is not None else b)

    def not_in(self, a: Any, b: Any) -> bool:
        """``a not in b``."""
        return not self.in_(a, b)

    def _python_method(self, value: Any, name: str) -> Callable[..., Any] | None:
        """A special method that the class of ``value`` writes in Python, to be followed; None if it has none."""
        cls = type(value)
        if not self.on or isinstance(value, (torch.Tensor, type, _Watched, TrackedDict)):
            return None
        holder = next((base for base in cls.__mro__ if name in base.__dict__), None)
        raw = None if holder is None else holder.__dict__[name]
        if not isinstance(raw, types.FunctionType) or self.is_native(raw):
            return None
        source = self.source_of(value)
        if source is not None and source != SELF:
            self.guard("class", source, _class_of(value))
        return lambda *args: self.call(raw, value, *args)

    # -- writes -------------------------------------------------------------------------------------------------

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name = value``."""
        source = self.source_of(owner)
        if source is None:
            setter = type(owner).__setattr__
            if self.on and isinstance(setter, types.FunctionType) and not self.is_native(setter):
                self.call(setter, owner, name, value)
            else:
                setattr(owner, name, value)
            return
        self.assignments.assign(owner, source, name, value)

    def del_attr(self, owner: Any, name: str) -> None:
        """``del owner.name``."""
        self.refuse_write(owner, f"deletes attribute {name!r} of")
        delattr(owner, name)

    def set_item(self, owner: Any, key: Any, value: Any) -> None:
        """``owner[key] = value``."""
        source = self.source_of(owner)
        if self.on and self.is_given(owner):
            self.refuse_write(owner, "sets an item of")
        if source is not None and not isinstance(owner, torch.Tensor):
            if isinstance(owner, dict) and key in owner and owner[key] is value and is_atom(value):
                self.guard("same", Item(source, self._key(key)), value)
                return
            self.refuse_write(owner, f"sets an item {key!r} of" if is_atom(key) else "sets an item of")
        method = self._python_method(owner, "__setitem__")
        if method is not None:
            method(key, value)
        else:
            owner[key] = value

    def del_item(self, owner: Any, key: Any) -> None:
        """``del owner[key]``."""
        self.refuse_write(owner, "deletes an item of")
        del owner[key]

    def refuse_write(self, owner: Any, does: str) -> None:
        """Raise if ``owner`` is outside: a graph would not do it again."""
        source = self.source_of(owner)
        if source is not None or (self.on and self.is_given(owner)):
            where = "an argument" if source is None else described(source)
            raise self.refused(
                f"the forward {does} a {type(owner).__name__} that it did not make, {where}, which a graph "
                "would not do at each call"
            )

    def write_name(self, function: types.FunctionType, name: str) -> None:
        """A global, or a variable of an enclosing function, is assigned."""
        if self.on:
            raise self.refused(f"the forward assigns {name!r}, a variable outside of {function.__qualname__}")

    def augmented(self, name: str, target: Any, value: Any) -> Any:
        """``target += value`` and the like; what ``target`` is afterwards."""
        if isinstance(target, (list, set, dict, deque)):
            self.refuse_write(target, "changes, in place,")
        return getattr(operator, name)(self.operand(target), self.operand(value))


def _answers_itself(owner: Any, cls: type) -> bool:
    """Whether no attribute of ``owner`` is state of Python: tensors, numbers, watched objects."""
    if isinstance(owner, (torch.Tensor, _Watched, TrackedDict)):
        return True
    return is_atom(owner) or (isinstance(owner, (torch.SymInt, torch.SymFloat, torch.SymBool, *_BUILTIN_CONTAINERS)) and (
        cls in _BUILTIN_CONTAINERS
    )) or is_callable_kind(cls)


def is_callable_kind(cls: type) -> bool:
    """Whether objects of ``cls`` are functions or methods of Python's own."""
    return cls in (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)


def _dict_of(owner: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _is_data_descriptor(raw: Any) -> bool:
    return hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")


def _class_of(value: Any) -> type:
    cls = type(value)
    return getattr(cls, "_schedule_original", cls)


class Here:
    """What instrumented code of one function calls: the evaluator, and names of that function."""

    def __init__(self, evaluator: Evaluator, function: types.FunctionType) -> None:
        for name in _OPERATIONS:
            setattr(self, name, getattr(evaluator, name))
        self._evaluator, self._function = evaluator, function

    slice = staticmethod(slice)

    @staticmethod
    def super(cls: type, instance: Any) -> Any:
        """``super()``."""
        return super(cls, instance)

    def name(self, name: str) -> Any:
        """A global or builtin."""
        return self._evaluator.global_name(self._function, name)

    def note_global(self, name: str) -> None:
        """A global that is read somewhere in the function, beside a local of the same name."""
        if name in self._function.__globals__:
            self._evaluator.global_name(self._function, name)

    def cell(self, name: str, value: Any) -> Any:
        """A variable of the enclosing function."""
        return self._evaluator.cell_value(self._function, name, value)

    def note_cell(self, name: str) -> None:
        """A variable of the enclosing function, beside a local of the same name."""
        cell = (self._function.__closure__ or ())[self._function.__code__.co_freevars.index(name)]
        self._evaluator.cell_value(self._function, name, cell.cell_contents)

    def write_name(self, name: str) -> None:
        """A global, or a variable of the enclosing function, is assigned."""
        self._evaluator.write_name(self._function, name)

    def imported(self, file: str, level: int, name: str, value: Any) -> Any:
        """What ``from file import name`` gave."""
        package = self._function.__globals__.get("__package__") or ""
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        full = file if not level else f"{base}.{file}".rstrip(".")
        module = sys.modules.get(full)
        if module is None or name not in vars(module):
            return value
        return self._evaluator.read(value, Item(DictOf(Const(module)), name))


_OPERATIONS = (
    "attr", "item", "call", "truth", "operand", "shown", "iterate", "mapping", "context", "augmented",
    "is_", "is_not", "eq", "ne", "in_", "not_in", "set_attr", "set_item", "del_attr", "del_item",
)  # fmt: skip
