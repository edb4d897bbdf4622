"""Values read from outside the forward: their guards and sources."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects.later_reads import LaterReads
from schedule.capture.guards.guard import Guard
from schedule.capture.guards.guard_code import kind_of
from schedule.capture.guards.guard_set import GuardSet
from schedule.capture.guards.origin import bound_to, is_fixed
from schedule.capture.guards.plain_values import (
    EXACT,
    has_decimals,
    holds_objects,
    is_array,
    is_atom,
    is_record,
    parts,
    snapshot,
)
from schedule.capture.guards.resolution import BASES, Resolved, class_of, found_in, is_mutable
from schedule.capture.guards.sources import SELF, Attr, Const, Query, Source, asks_torch, described, submodule_path
from schedule.capture.python.handler_table import Followed
from schedule.capture.recording.user_lines import user_line
from schedule.util.errors import ScheduleError, TraceError

_COMPARING = ("same", "content", "is")  # kinds of guards on a value, not just on its kind


class Reads:
    """Values read by one trace so far.

    Attributes:
        tracer: the trace.
        on: whether reads become guards.
        failed: an error of this package that code of the user has caught, to be raised at the end.
        later: the guards on values read after other code has run.
    """

    call: Callable[..., Any]
    is_native: Callable[[types.FunctionType], bool]

    def __init__(self, tracer: Followed) -> None:
        self.tracer = tracer
        self.on = True
        self.failed: ScheduleError | None = None
        self.later = LaterReads(tracer.graph)
        self._guards: dict[Any, Guard] = {}
        self._known: dict[int, tuple[Any, Source]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, Source]] = {}
        self._given: dict[int, Any] = {}
        self._returned: dict[int, Any] = {}
        self.know(tracer.module, SELF)

    def guard_set(self) -> GuardSet:
        """Return the guards recorded so far."""
        return GuardSet(self._guards.values())

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        """Turn guards on or off for the block.

        They are on for the forward, and off for a submodule recorded as a call.
        """
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def guard(self, kind: str, source: Source, expected: Any = None) -> None:
        """Add a guard on the value at ``source``, unless recording is off."""
        if self.on:
            if self.tracer.regions.flag_blocks and kind == "same" and asks_torch(source):
                raise self.refused("the forward asks for a flag of torch inside a block that sets such flags")
            if has_decimals(expected):
                raise self.refused("the forward computes with decimals, whose results depend on a context")
            key = (kind, source, expected if isinstance(expected, (Source, str, int, Resolved)) else id(expected))
            self.later.add(key, self._guards.setdefault(key, Guard(kind, source, expected)))

    def resolve(self, cls: type, name: str, after: type | None = None) -> Any:
        """Look ``name`` up on ``cls`` without calling descriptors, with a guard on the result.

        Args:
            cls: the class.
            name: the name.
            after: look only behind this class, as ``super()`` does.

        Returns:
            The raw attribute, or ``ABSENT``.
        """
        raw = found_in(cls, name, after)
        found = Query(found_in, (cls, name, after))
        if isinstance(raw, types.FunctionType):
            self.know(raw, Const(raw, found))
        elif isinstance(raw, (staticmethod, classmethod)):
            self.know(raw.__func__, Const(raw.__func__, Attr(found, "__func__")))
        elif type(raw) is property and raw.fget is not None:
            self.know(raw.fget, Const(raw.fget, Attr(found, "fget")))
        if self.on and is_mutable(cls):
            self.guard("resolves", Const(cls), Resolved(name, after, raw))
        return raw

    def resolve_of(self, value: Any, name: str) -> Any:
        """Look ``name`` up on the class of ``value``, with guards on both."""
        cls, source = class_of(value), self.source_of(value)
        if source is not None and source != SELF and not is_fixed(value):
            self.guard("class", source, cls)
        return self.resolve(cls, name)

    def guard_class(self, value: Any) -> None:
        """Guard on the class of an object from outside."""
        source = self.source_of(value)
        if source is not None and not is_fixed(value):
            self.guard("class", source, class_of(value))

    def guard_bases(self, cls: type) -> None:
        """Guard on the bases of ``cls``."""
        if is_mutable(cls):
            self.guard("resolves", Const(cls), Resolved(BASES, None, cls.__mro__))

    def know(self, value: Any, source: Source) -> None:
        """Remember ``value`` as an outside object at ``source``."""
        self._known.setdefault(id(value), (value, source))

    def source_of(self, value: Any) -> Source | None:
        """Return the source of an outside object, or None for the forward's own objects and while recording is off."""
        if not self.on:
            return None
        self.tracer.containers.read(value)
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def path_of(self, child: nn.Module) -> str | None:
        """Return the path of ``child`` as found by the forward, or None."""
        source = self.source_of(child)
        return None if source is None else submodule_path(source)

    def found_at(self, value: Any) -> Source | None:
        """Return the source of an outside object, or None, also while recording is off."""
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def has_read(self, tensor: torch.Tensor) -> bool:
        """Check whether the dtype and shape or rank of ``tensor`` are guarded already."""
        return id(tensor) in self._tensors

    def was_compared(self, source: Source) -> bool:
        """Check whether the value at ``source`` is guarded, not just its kind."""
        return any(guard.source == source and guard.kind in _COMPARING for guard in self._guards.values())

    def forget(self, source: Source) -> None:
        """Drop the guards on a value, because the graph assigns it before any read."""
        for key, guard in list(self._guards.items()):
            if guard.source == source and guard.kind in _COMPARING:
                del self._guards[key]

    def know_arguments(self, arguments: Any, constants: Iterable[Any]) -> None:
        """Remember the arguments whose identity is a condition, and containers and dataclasses, to refuse writes.

        Args:
            arguments: the arguments, tracked.
            constants: those among them that are not inputs of the graph, such as functions and modules.
        """
        for constant in constants:
            if not is_atom(constant) or hasattr(constant, "__dict__"):
                self.read(constant, Const(constant))
                self.know(constant, Const(constant))
        pending = [arguments]
        while pending:
            value = pending.pop()
            if (isinstance(value, (tuple, list, dict)) and not isinstance(value, torch.Size)) or is_record(value):
                for each in (value, getattr(value, "__dict__", value)):
                    self._given[id(each)] = each
                pending += parts(value)

    def know_returned(self, container: Any) -> None:
        """Remember a list or dict that a submodule returned, to refuse writes."""
        self._returned[id(container)] = container

    def is_outside(self, value: Any) -> bool:
        """Check whether ``value`` was not made by the forward."""
        return self.found_at(value) is not None or self.is_given(value)

    def is_given(self, value: Any) -> bool:
        """Check whether ``value`` is a container or dataclass among the arguments."""
        return id(value) in self._given

    def may_write(self, value: Any) -> bool:
        """Check whether ``value`` is neither a container among the arguments nor one that a submodule returned."""
        return id(value) not in self._given and id(value) not in self._returned

    def refused(self, why: str, fix: str = "") -> TraceError:
        """Return the error for something a graph cannot guard on or repeat."""
        return TraceError(
            why,
            where=user_line(),
            fix=fix or "keep the module that does so a leaf (`leaves=(…,)`), or schedule its submodules instead",
        )

    def read(self, value: Any, source: Source | None) -> Any:
        """Return ``value``, read from outside at ``source``, after guarding on it or remembering its source."""
        if source is None or not self.on:
            return value
        if isinstance(value, torch.Tensor):
            return self._read_tensor(value, source)
        if not is_atom(value):
            self.later.note(value)
        if holds_objects(value):
            raise self.refused(f"the forward reads an array of Python objects, {described(source)}")
        if isinstance(value, enum.Enum):
            self.guard("is", source, value)
            self.know(value, Const(value))
        elif is_atom(value):
            self.guard("same", source, value)
            if type(value) not in EXACT:
                self.know(value, source)
        elif is_array(value):
            self.guard("content", source, snapshot(value))
        elif isinstance(value, types.MethodType):
            self.guard("calls", source, value.__func__)
            self.read(value.__self__, Attr(source, "__self__"))
        elif is_fixed(value):
            self.guard("is", source, value)
            self.know(value, Const(value, source))
            if (owner := bound_to(value)) is not None:
                self.read(owner, Attr(Const(value, source), "__self__"))
        elif (known := self.source_of(value)) is None:
            self.know(value, source)
        elif known != source:
            self.guard("is", source, known)
        return value

    def _read_tensor(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        self.later.note(tensor)
        known = self._tensors.get(id(tensor))
        if known is None or known[1] == source:
            self.guard("tensor", source, kind_of(tensor))
        if known is None:
            self._tensors[id(tensor)] = (tensor, source)
        elif known[1] != source:
            self.guard("is", source, known[1])
        return tensor

    def query(self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: Any) -> None:
        """Guard on ``answer``, the result of a query to the process, since it may change between calls."""
        self.read(answer, Query(function, arguments))

    def read_kind(self, child: nn.Module) -> None:
        """Guard on the dtype of the first floating-point parameter of ``child``, called by the forward.

        The dtype of its output is the same as long as it computes in this dtype.
        """
        source = self.source_of(child)
        if source is None:
            return
        with DisableTorchFunction():
            floating = ((path, each.dtype) for path, each in child.named_parameters() if each.is_floating_point())
            path, dtype = next(floating, (None, None))
        if path is not None:
            self.guard("computes_in", source, (tuple(path.split(".")), dtype))

    def read_untouched(self, module: nn.Module) -> None:
        """Guard on the class, hooks and forward of ``module``, inlined but not a submodule of the traced module."""
        source = self.source_of(module)
        if source is not None:
            self.guard("untouched", source, type(module))

    def tensor_source(self, value: Any) -> Source | None:
        """Return the source of a tensor already read, or None for others and while recording is off."""
        return self.read_at(value) if self.on else None

    def read_at(self, tensor: Any) -> Source | None:
        """Return the source of a tensor already read, or None, also while recording is off."""
        found = self._tensors.get(id(tensor))
        return None if found is None else found[1]

    def refuse_write(self, owner: Any, does: str) -> None:
        """Raise if ``owner`` is outside, since a graph would not repeat the write."""
        source = self.source_of(owner)
        if source is not None or (self.on and not self.may_write(owner)):
            where = "an argument or the result of a submodule" if source is None else described(source)
            raise self.refused(
                f"the forward {does} a {type(owner).__name__} that it did not make, {where}, which a graph would not "
                "do at each call"
            )
