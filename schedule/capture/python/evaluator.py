"""Evaluator of a forward's instrumented code: follows reads from outside, and refuses writes there.

A value is *outside* if it existed before the forward ran: the module, its contents, globals, closures, arguments.
Outside values that are compared or branched on become guards as they are read. Objects are remembered with their
source, so that later reads of their contents can be guarded. Values made by the forward itself are not guarded.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from schedule.capture.guards.plain_values import is_atom
from schedule.capture.guards.resolution import ABSENT
from schedule.capture.guards.sources import Attr, Const, Item
from schedule.capture.python.assignments import Assignments
from schedule.capture.python.calling import Calling
from schedule.capture.python.handler_table import Followed, Handler
from schedule.capture.python.operators import plain
from schedule.capture.python.protected import Protected
from schedule.capture.recording.structure import original_class
from schedule.util.internal_errors import as_python_does, own_errors, perform, raise_if_own


class Evaluator(Calling):
    """Operations called by instrumented code, for one trace."""

    def __init__(self, tracer: Followed, handlers: Mapping[Any, Handler]) -> None:
        super().__init__(tracer, handlers)
        self.assignments = Assignments(self)

    def here(self, function: types.FunctionType) -> TraceHooks:
        """Return the ``__here__`` object for the instrumented code of ``function``."""
        return TraceHooks(self, function)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the traced forward, following its code unless it is native, such as this package's own."""
        cls = original_class(self.tracer.module)
        self.resolve(cls, "forward")
        if isinstance(forward, types.FunctionType) and not self.is_native(forward):
            result = self.call(forward, *args, **kwargs)
        else:
            result = perform(forward, *args, **kwargs)
        if self.failed is not None:
            raise self.failed
        return result

    def protected(self) -> Protected:
        """Return the context of the body of a ``try`` statement with handlers."""
        return Protected(self)

    # -- names --------------------------------------------------------------------------------------------------

    def global_name(self, function: types.FunctionType, name: str) -> Any:
        """Look up a name in a function's globals, then among the builtins."""
        table = function.__globals__
        if name in table:
            return self.read(table[name], Item(Const(table), name))
        self.guard("lacks_item", Const(table), name)
        return self._builtin(function, name)

    def _builtin(self, function: types.FunctionType, name: str) -> Any:
        """Look up a name among the builtins of a function."""
        found: dict[str, Any] = cast(Any, function).__builtins__
        if name not in found:
            self.guard("lacks_item", Const(found), name)
            raise as_python_does(NameError(f"name {name!r} is not defined", name=name))
        return self.read(found[name], Item(Const(found), name))

    def imported(self, function: types.FunctionType, file: str, level: int, names: tuple[str, ...]) -> Any:
        """Import ``file``, and return it or, unless ``names`` are imported from it, the package at its start.

        Raises:
            TraceError: a module is found elsewhere than among those loaded.
        """
        table = function.__globals__
        package = (table.get("__package__") or "").split(".")
        full = ".".join([*package[: len(package) + 1 - level], *filter(None, [file])]) if level else file
        parts = full.split(".")
        try:
            found = perform(self._builtin(function, "__import__"), file, table, None, names, level)
        finally:
            for count in range(len(parts)):
                self._read_module(".".join(parts[: count + 1]))
        if self.on and found is not sys.modules.get(full if names else parts[0]):
            raise self.refused(f"the forward imports {full}, which is not among the loaded modules")
        return found

    def import_from(self, module: Any, name: str) -> Any:
        """Return ``name`` from an imported module: an attribute, or a module below that is no attribute yet."""
        try:
            return self.attr(module, name)
        except AttributeError as error:
            raise_if_own(error)
        if (source := self.source_of(module)) is not None:
            self.guard("lacks", source, name)
        own = getattr(module, "__name__", "<unknown module name>")
        found = self._read_module(f"{own}.{name}")
        if found is None:
            file = getattr(module, "__file__", None)
            where = f"{own!r} ({file or 'unknown location'})"
            raise as_python_does(ImportError(f"cannot import name {name!r} from {where}", name=own, path=file))
        return found

    def _read_module(self, name: str) -> Any:
        """Return a loaded module or None, with a guard on it; as a constant, it is saved with the guard."""
        source = Item(Const(sys.modules), name)
        if name not in sys.modules:
            return self.guard("lacks_item", source.base, name)
        found: Any = sys.modules[name]
        if not isinstance(found, types.ModuleType):
            return self.read(found, source)
        self.guard("is", source, Const(found))
        self.know(found, Const(found))
        return found

    def cell_value(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """Return the value of a variable of the enclosing function."""
        cells = Attr(self.source_of(function) or Const(function), "__closure__")
        return self.read(value, Attr(Item(cells, function.__code__.co_freevars.index(name)), "cell_contents"))

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
            self.refuse_write(owner, f"sets attribute {name!r} of")
            perform(setattr, owner, name, value)
        elif setter is not ABSENT:
            self.refuse_write(owner, f"sets attribute {name!r}, a {type(raw).__name__}, of")
        else:
            self.assignments.assign(owner, source, name, value)

    def del_attr(self, owner: Any, name: str) -> None:
        """Execute ``del owner.name``."""
        self.refuse_write(owner, f"deletes attribute {name!r} of")
        perform(delattr, owner, name)

    def set_item(self, owner: Any, key: Any, value: Any) -> None:
        """Execute ``owner[key] = value``."""
        key = self.index(owner, key) if isinstance(owner, torch.Tensor) else key
        source = self.source_of(owner)
        if self.on and not self.may_write(owner):
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
            value = self.iterate(value) if isinstance(owner, list) and isinstance(key, slice) else value
            perform(operator.setitem, owner, key, value)

    def del_item(self, owner: Any, key: Any) -> None:
        """Execute ``del owner[key]``."""
        self.refuse_write(owner, "deletes an item of")
        perform(operator.delitem, owner, key)

    def write_name(self, function: types.FunctionType, name: str, value: Any) -> Any:
        """Return ``value`` to be bound to a global or to a variable of an enclosing function, or refuse it."""
        if self.on:
            raise self.refused(f"the forward assigns {name!r}, a variable outside of {function.__qualname__}")
        return value

    def augmented(self, name: str, target: Any, value: Any) -> Any:
        """Compute ``target += value`` or a similar operation, and return the new ``target``."""
        if isinstance(target, (list, set, dict, deque)):
            self.refuse_write(target, "changes, in place,")
        return plain(perform(getattr(operator, name), self.operand(target), self.operand(value)))


class TraceHooks:
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
        return perform(super, cls, instance)

    def name(self, name: str) -> Any:
        """Return the value of a global or builtin."""
        return self._evaluator.global_name(self._function, name)

    def note_global(self, name: str) -> None:
        """Guard on a global or builtin read somewhere in the function, beside a local of the same name."""
        with contextlib.suppress(NameError), own_errors():
            self._evaluator.global_name(self._function, name)

    def cell(self, name: str, value: Any) -> Any:
        """Return the value of a variable of the enclosing function."""
        return self._evaluator.cell_value(self._function, name, value)

    def note_cell(self, name: str) -> None:
        """Guard on a variable of the enclosing function, beside a local of the same name."""
        cell = (self._function.__closure__ or ())[self._function.__code__.co_freevars.index(name)]
        self._evaluator.cell_value(self._function, name, perform(getattr, cell, "cell_contents"))

    def write_name(self, name: str, value: Any) -> Any:
        """Return ``value`` to be bound to a global or to a variable of the enclosing function, or refuse it."""
        return self._evaluator.write_name(self._function, name, value)

    def imported(self, file: str, level: int, names: tuple[str, ...]) -> Any:
        """Return the module for ``import file`` or ``from file import names``."""
        return self._evaluator.imported(self._function, file, level, names)


_OPERATIONS = (
    "attr", "item", "call", "truth", "operand", "inverted", "displayed", "formatted", "key", "iterate", "mapping",
    "context", "protected", "augmented", "is_", "is_not", "eq", "ne", "in_", "not_in",
    "set_attr", "set_item", "del_attr", "del_item",
    "import_from",
)  # fmt: skip
