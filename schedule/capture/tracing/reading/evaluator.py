"""Evaluator of a forward's instrumented code: follows reads from outside, and refuses writes there.

A value is *outside* if it existed before the forward ran: the module, its contents, globals, closures, arguments.
Outside values that are compared or branched on become guards as they are read. Objects are remembered with their
source, so that later reads of their contents can be guarded. Values made by the forward itself are not guarded.
"""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from schedule.capture.recording.structure import original_class
from schedule.capture.tracing.reading.assignments import Assignments
from schedule.capture.tracing.reading.calling import Calling
from schedule.capture.tracing.reading.following import Followed, Handler
from schedule.capture.tracing.reading.operators import plain
from schedule.capture.tracing.reading.plain import is_atom
from schedule.capture.tracing.reading.resolution import ABSENT
from schedule.capture.tracing.reading.sources import Attr, Const, DictOf, Item


class Evaluator(Calling):
    """Operations called by instrumented code, for one trace."""

    def __init__(self, tracer: Followed, handlers: Mapping[Any, Handler]) -> None:
        super().__init__(tracer, handlers)
        self.assignments = Assignments(self)

    def here(self, function: types.FunctionType) -> Here:
        """Return the ``__here__`` object for the instrumented code of ``function``."""
        return Here(self, function)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the traced forward, following its code unless it is native, such as this package's own."""
        cls = original_class(self.tracer.module)
        if cls.forward is forward:
            self.guard("is", Attr(Const(cls), "forward"), forward)
        if isinstance(forward, types.FunctionType) and not self.is_native(forward):
            return self.call(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    # -- names --------------------------------------------------------------------------------------------------

    def global_name(self, function: types.FunctionType, name: str) -> Any:
        """Look up a name in a function's globals, then among the builtins."""
        table = function.__globals__
        if name in table:
            return self.read(table[name], Item(Const(table), name))
        self.guard("lacks_item", Const(table), name)
        namespace = table.get("__builtins__", builtins)
        found = vars(namespace) if isinstance(namespace, types.ModuleType) else namespace
        if name not in found:
            raise NameError(f"name {name!r} is not defined", name=name)
        return found[name]

    def cell_value(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """Return the value of a variable of the enclosing function."""
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        return self.read(value, Attr(Const(cell), "cell_contents"))

    # -- writes -------------------------------------------------------------------------------------------------

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Execute ``owner.name = value``."""
        setter = self.resolve_of(owner, "__setattr__") if self.on else None
        if isinstance(setter, types.FunctionType) and not self.is_native(setter):
            self.call(setter, owner, name, value)
        else:
            self.default_set_attr(owner, name, value)

    def default_set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute like ``object.__setattr__`` or ``nn.Module.__setattr__``: data descriptors come first."""
        source = self.source_of(owner)
        raw = self.resolve_of(owner, name) if self.on else ABSENT
        setter = ABSENT if raw is ABSENT else self.resolve(type(raw), "__set__")
        if type(raw) is property and isinstance(raw.fset, types.FunctionType):
            self.call(raw.fset, owner, value)
        elif isinstance(setter, types.FunctionType):
            self.know(raw, Const(raw))
            self.call(setter, raw, owner, value)
        elif source is None:
            setattr(owner, name, value)
        elif setter is not ABSENT:
            self.refuse_write(owner, f"sets attribute {name!r}, a {type(raw).__name__}, of")
        else:
            self.assignments.assign(owner, source, name, value)

    def del_attr(self, owner: Any, name: str) -> None:
        """Execute ``del owner.name``."""
        self.refuse_write(owner, f"deletes attribute {name!r} of")
        delattr(owner, name)

    def set_item(self, owner: Any, key: Any, value: Any) -> None:
        """Execute ``owner[key] = value``."""
        key = self.index(owner, key) if isinstance(owner, torch.Tensor) else key
        source = self.source_of(owner)
        if self.on and self.is_given(owner):
            self.refuse_write(owner, "sets an item of")
        if source is not None and not isinstance(owner, torch.Tensor):
            if isinstance(owner, dict) and key in owner and owner[key] is value and is_atom(value):
                self.guard("same", Item(source, self._key(key)), value)
                return
            self.refuse_write(owner, f"sets an item {key!r} of" if is_atom(key) else "sets an item of")
        method = self.python_method(owner, "__setitem__")
        if method is not None:
            method(key, value)
        else:
            owner[key] = self.iterate(value) if isinstance(owner, list) and isinstance(key, slice) else value

    def del_item(self, owner: Any, key: Any) -> None:
        """Execute ``del owner[key]``."""
        self.refuse_write(owner, "deletes an item of")
        del owner[key]

    def write_name(self, function: types.FunctionType, name: str) -> None:
        """Refuse the assignment of a global or of a variable of an enclosing function."""
        if self.on:
            raise self.refused(f"the forward assigns {name!r}, a variable outside of {function.__qualname__}")

    def augmented(self, name: str, target: Any, value: Any) -> Any:
        """Compute ``target += value`` or a similar operation, and return the new ``target``."""
        if isinstance(target, (list, set, dict, deque)):
            self.refuse_write(target, "changes, in place,")
        return plain(getattr(operator, name)(self.operand(target), self.operand(value)))


class Here:
    """Methods called by the instrumented code of one function: the evaluator's, and lookups of the function's names."""

    def __init__(self, evaluator: Evaluator, function: types.FunctionType) -> None:
        for name in _OPERATIONS:
            setattr(self, name, getattr(evaluator, name))
        self._evaluator, self._function = evaluator, function

    def slice(self, *bounds: Any) -> Any:
        """``start:stop:step``."""
        return slice(*(self._evaluator.index((), each) for each in bounds))

    @staticmethod
    def super(cls: type, instance: Any) -> Any:
        """Return ``super(cls, instance)``."""
        return super(cls, instance)

    def name(self, name: str) -> Any:
        """Return the value of a global or builtin."""
        return self._evaluator.global_name(self._function, name)

    def note_global(self, name: str) -> None:
        """Guard on a global read somewhere in the function, beside a local of the same name."""
        if name in self._function.__globals__:
            self._evaluator.global_name(self._function, name)

    def cell(self, name: str, value: Any) -> Any:
        """Return the value of a variable of the enclosing function."""
        return self._evaluator.cell_value(self._function, name, value)

    def note_cell(self, name: str) -> None:
        """Guard on a variable of the enclosing function, beside a local of the same name."""
        cell = (self._function.__closure__ or ())[self._function.__code__.co_freevars.index(name)]
        self._evaluator.cell_value(self._function, name, cell.cell_contents)

    def write_name(self, name: str) -> None:
        """Refuse the assignment of a global or of a variable of the enclosing function."""
        self._evaluator.write_name(self._function, name)

    def imported(self, file: str, level: int, name: str, value: Any) -> Any:
        """Return the result of ``from file import name``, read from the module if it is found there."""
        package = self._function.__globals__.get("__package__") or ""
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        full = file if not level else f"{base}.{file}".rstrip(".")
        module = sys.modules.get(full)
        if module is None or name not in vars(module):
            return value
        return self._evaluator.read(value, Item(DictOf(Const(module)), name))


_OPERATIONS = (
    "attr", "item", "call", "truth", "operand", "shown", "formatted", "key", "iterate", "mapping", "context",
    "augmented", "is_", "is_not", "eq", "ne", "in_", "not_in", "set_attr", "set_item", "del_attr", "del_item",
)  # fmt: skip
