"""Snapshot of everything reachable from some roots.

Scheduling runs the user's forward several times: to record it, to trace it, to compare graphs with it. A forward may
append to a list, count in a buffer, write to its arguments or to a global. A snapshot saves the contents of every
container and object in reach, restores them in place, so that each stays the same object, and reports the first
difference as a readable path.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.snapshots.code_state import (
    classes_named,
    function_in,
    globals_named,
    is_of_library,
    is_passed_by,
    members_named,
    names_in,
    slots_of,
)
from schedule.capture.snapshots.contents import (
    MISSING,
    Part,
    Piece,
    SavedCache,
    SavedCell,
    SavedDict,
    SavedNames,
    SavedSlots,
    Step,
    items,
    saved,
)
from schedule.capture.snapshots.run_effects import CopyOnWrite, Entry, Memory
from schedule.capture.snapshots.saved_tensors import SavedTensor
from schedule.util.errors import NotApplicable

_LEAVES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice, type),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType, types.CodeType),
    }
)
_CONTAINERS = frozenset((dict, OrderedDict, list, set, deque))
SMALL = 2**14
"""A parameter of at most so many numbers is cloned; a larger one is copied before an operation writes to it."""
_TABLES = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """State reachable from ``roots``: modules, containers, plain objects, functions and their globals and closures.

    Types, Python modules, and objects of torch and of this package are not searched. Neither are standard-library
    objects inside other standard-library objects, such as the handlers of a logger.

    Args:
        roots: objects to start from, by the name their paths begin with.
        data: whether to save tensors as well; if False, only the structure is saved.
        known: tensors whose data are restored in another way.
    """

    def __init__(self, roots: Mapping[str, Any], data: bool = True, known: Iterable[torch.Tensor] = ()) -> None:
        self._roots, self._data, self._known = roots, data, tuple(known)
        self._memory: dict[int, Memory] = {}
        self._pieces: list[tuple[Piece, int]] = []
        self._empty: list[tuple[Any, int, Step]] = []
        self._locations: list[tuple[int, Step]] = []
        self._seen: dict[int, Any] = {}
        self._without_data = set(map(id, self._known))
        self._pending: list[tuple[Any, int]] = []
        self._code: set[Any] = set()
        self._of_library: set[int] = set()
        self._add(-1, roots.items())
        with DisableTorchFunction():
            while self._pending:
                self._visit(*self._pending.pop())

    def restore(self) -> None:
        """Restore everything in place.

        Raises:
            NotApplicable: a change cannot be undone; everything else has been restored.
        """
        for container, _, _ in self._empty:
            if container:
                container.clear()
        with DisableTorchFunction():
            refused = [(location, why) for piece, location in self._pieces if (why := piece.restore()) is not None]
        for location, why in refused:
            raise NotApplicable(
                f"the forward changes {self._path(location)} ({why}), which cannot be put back after a run that has to "
                "leave nothing behind",
                fix="do that outside the forward, or keep what it changes in buffers",
            )

    def copy_on_write(self) -> AbstractContextManager[Any]:
        """Save in the block the data of large parameters before an operation writes to them."""
        return CopyOnWrite(self._memory) if self._memory else nullcontext()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Run the block from the saved state, and restore the current state on exit."""
        now = self.again() if self.difference() else self
        try:
            with now.copy_on_write():
                self.restore()
                yield
        finally:
            now.restore()

    def clear_caches(self) -> None:
        """Empty caches of functions that were filled with tensors since."""
        for piece, _ in self._pieces:
            if isinstance(piece, SavedCache):
                piece.restore()

    def again(self) -> Snapshot:
        """Take a new snapshot of the same roots."""
        return Snapshot(self._roots, self._data, self._known)

    def difference(self) -> str | None:
        """Return the first difference from the saved state, such as ``self.log: 3 items more``, or None."""
        for container, location, step in self._empty:
            if container:
                return f"{self._path(location)}{_written(step)}: {items(len(container))}"
        with DisableTorchFunction():
            for piece, location in self._pieces:
                if found := piece.difference():
                    step, what = found
                    return f"{self._path(location)}{step}: {what}"
        return None

    def changed_entries(self) -> list[Entry]:
        """Return the attributes and dict entries added, removed or changed since, except training flags."""
        found: list[Entry] = []
        for live, _, _ in self._empty:
            if isinstance(live, dict):
                found += [Entry(live, key, MISSING, value) for key, value in live.items()]
        for piece, _ in self._pieces:
            if isinstance(piece, SavedDict):
                found += piece.changed_entries()
        return [entry for entry in found if entry.key != "training"]

    def _path(self, location: int) -> str:
        steps = []
        while location >= 0:
            location, step = self._locations[location]
            steps.append(_written(step))
        return "".join(reversed(steps))

    # -- walking ---------------------------------------------------------------------------------------

    def _add(self, location: int, parts: Iterable[Part]) -> None:
        for step, value in parts:
            kind = type(value)
            if kind in _LEAVES or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if kind in _CONTAINERS and not value:  # such as most tables of hooks
                self._empty.append((value, location, step))
            else:
                self._locations.append((location, step))
                self._pending.append((value, len(self._locations) - 1))

    def _keep(self, piece: Piece, location: int) -> None:
        self._pieces.append((piece, location))
        self._add(location, piece.parts())

    def _visit(self, value: Any, location: int) -> None:
        if isinstance(value, nn.Module):
            self._module(value, location)
        elif isinstance(value, torch.Tensor):
            if self._data:
                self._tensor(value, location)
            self._attributes(vars(value), location)
            if slots := slots_of(type(value)):
                self._keep(SavedSlots(value, slots), location)
        elif isinstance(value, types.FunctionType):
            self._function(value, location)
        elif isinstance(value, types.CellType):
            self._keep(SavedCell(value), location)
        elif not isinstance(value, (type, enum.Enum)):
            self._object(value, location)

    def _tensor(self, tensor: torch.Tensor, location: int) -> None:
        if id(tensor) not in self._without_data:
            cloned = tensor.numel() <= SMALL or not isinstance(tensor, nn.Parameter)
            self._keep(SavedTensor(tensor, self._memory, cloned), location)
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None and id(gradient) not in self._seen:
            self._seen[id(gradient)] = gradient
            self._locations.append((location, ".grad"))
            self._keep(SavedTensor(gradient, self._memory, gradient.numel() <= SMALL), len(self._locations) - 1)

    def _attributes(self, own: dict[str, Any], location: int) -> None:
        if own:
            self._keep(SavedDict(own, ".{}"), location)
        else:
            self._empty.append((own, location, ".__dict__"))

    def _module(self, module: nn.Module, location: int) -> None:
        own = vars(module)
        for table in _TABLES:  # first, so that paths read as code does
            entries = own.get(table)
            if entries and isinstance(entries, dict) and id(entries) not in self._seen:
                self._seen[id(entries)] = entries
                self._keep(SavedDict(entries, ".{}"), location)
        self._keep(SavedDict(own, ".{}"), location)
        if slots := slots_of(type(module)):
            self._keep(SavedSlots(module, slots), location)
        self._used_by_method(type(module), ("forward",), location)

    def _object(self, value: Any, location: int) -> None:
        cls: Any = type(value)
        if isinstance(value, (tuple, frozenset)):
            self._add(location, ((("[{}]", index), item) for index, item in enumerate(value)))
        elif isinstance(value, functools.partial):
            self._add(location, ((".func", value.func), (".args", value.args), (".keywords", value.keywords)))
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._add(location, (("", getattr(value, "__func__", None)), (".__self__", value.__self__)))
        elif (piece := saved(value)) is not None:
            if self._locations[location][0] in self._of_library and cls in _CONTAINERS:
                self._of_library.add(location)
            self._keep(piece, location)
        within = self._locations[location][0] in self._of_library
        if is_passed_by(cls) or (within and is_of_library(cls)):
            return
        if is_of_library(cls):
            self._of_library.add(location)
        own = getattr(value, "__dict__", None)
        if type(own) is dict:
            self._attributes(own, location)
        if slots := slots_of(cls):
            self._keep(SavedSlots(value, slots), location)

    # -- code ------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, location: int) -> None:
        names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        name = function.__qualname__
        self._add(-1, ((f"{name}: {variable}", cell) for variable, cell in names))
        self._add(-1, ((f"{name}: a default", value) for value in function.__defaults__ or ()))
        self._add(-1, ((f"{name}: {key}", value) for key, value in (function.__kwdefaults__ or {}).items()))
        self._attributes(vars(function), location)
        for cls in classes_named(function):
            self._used_by_method(cls, names_in(function.__code__), location)
        used = dict(globals_named(function))
        values = [key for key, value in used.items() if not isinstance(value, types.FunctionType)]
        self._add(-1, ((f"{function.__module__}.{key}", value) for key, value in used.items() if key not in values))
        if values:
            self._keep(SavedNames(function.__globals__, values, function.__module__), -1)

    def _used_by_method(self, cls: type, names: tuple[str, ...], location: int) -> None:
        """Add the state used by methods of ``cls`` with these names, and by methods named in their code."""
        pending = [(cls, names)]
        while pending:
            cls, names = pending.pop()
            for base, name, member in members_named(cls, tuple(n for n in names if (cls, n) not in self._code)):
                function = function_in(member)
                if function is not None:
                    self._add(-1, ((function.__qualname__, function),))
                    pending.append((cls, names_in(function.__code__)))
                elif type(member) in _LEAVES or not callable(member):
                    self._keep(SavedNames(base, (name,), base.__qualname__), -1)
            self._code |= {(cls, name) for name in names}


def _written(step: Step) -> str:
    return step if isinstance(step, str) else step[0].format(step[1])


@contextmanager
def restored(roots: Mapping[str, Any]) -> Iterator[Snapshot]:
    """Restore everything reachable from ``roots`` on exit, also after an exception.

    Yields:
        The saved state.

    Raises:
        NotApplicable: a change cannot be undone.
    """
    snapshot = Snapshot(roots)

    def leave(raised: type[BaseException] | None, *_: Any) -> None:
        with nullcontext() if raised is None else suppress(NotApplicable):  # the error inside says more
            snapshot.restore()

    with ExitStack() as stack:
        stack.push(leave)
        stack.enter_context(snapshot.copy_on_write())
        yield snapshot
