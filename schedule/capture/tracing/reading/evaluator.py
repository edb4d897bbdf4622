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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from schedule.capture.recording.structure import original_class
from schedule.capture.tracing.reading.assignments import Assignments
from schedule.capture.tracing.reading.calling import Calling
from schedule.capture.tracing.reading.following import Followed, Handler
from schedule.capture.tracing.reading.ledger import is_atom
from schedule.capture.tracing.reading.sources import Attr, Const, DictOf, Item


class Evaluator(Calling):
    """The operations that instrumented code calls, for one trace."""

    def __init__(self, tracer: Followed, handlers: Mapping[Any, Handler]) -> None:
        super().__init__(tracer, handlers)
        self.assignments = Assignments(self)

    def here(self, function: types.FunctionType) -> Here:
        """What the instrumented code of ``function`` calls."""
        return Here(self, function)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that is traced; one of this package's own is not followed."""
        cls = original_class(self.tracer.module)
        if cls.forward is forward:
            self.guard("is", Attr(Const(cls), "forward"), forward)
        if isinstance(forward, types.FunctionType) and not self.is_native(forward):
            return self.call(forward, *args, **kwargs)
        return forward(*args, **kwargs)

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
        method = self.python_method(owner, "__setitem__")
        if method is not None:
            method(key, value)
        else:
            owner[key] = value

    def del_item(self, owner: Any, key: Any) -> None:
        """``del owner[key]``."""
        self.refuse_write(owner, "deletes an item of")
        del owner[key]

    def write_name(self, function: types.FunctionType, name: str) -> None:
        """A global, or a variable of an enclosing function, is assigned."""
        if self.on:
            raise self.refused(f"the forward assigns {name!r}, a variable outside of {function.__qualname__}")

    def augmented(self, name: str, target: Any, value: Any) -> Any:
        """``target += value`` and the like; what ``target`` is afterwards."""
        if isinstance(target, (list, set, dict, deque)):
            self.refuse_write(target, "changes, in place,")
        return getattr(operator, name)(self.operand(target), self.operand(value))


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
    "attr", "item", "call", "truth", "operand", "shown", "formatted", "iterate", "mapping", "context", "augmented",
    "is_", "is_not", "eq", "ne", "in_", "not_in", "set_attr", "set_item", "del_attr", "del_item",
)  # fmt: skip
