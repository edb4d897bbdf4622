"""What is read from outside: guards, and where objects were found."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.recording.source import user_line
from schedule.capture.recording.structure import leaves
from schedule.capture.tracing.reading.following import Followed
from schedule.capture.tracing.reading.ledger import Guard, Ledger, is_array, is_atom, kind_of, snapshot
from schedule.capture.tracing.reading.origin import is_fixed
from schedule.capture.tracing.reading.sources import (
    SELF,
    Attr,
    Const,
    Query,
    Source,
    described,
    module_path,
    submodule_path,
)
from schedule.util.errors import TraceError


class Reads:
    """What one trace has read so far.

    Attributes:
        tracer: the trace.
        on: whether reads become guards.
    """

    call: Callable[..., Any]
    is_native: Callable[[types.FunctionType], bool]

    def __init__(self, tracer: Followed) -> None:
        self.tracer = tracer
        self.on = True
        self._guards: dict[Any, Guard] = {}
        self._known: dict[int, tuple[Any, Source]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, Source]] = {}
        self._given: dict[int, Any] = {}
        self.know(tracer.module, SELF)

    def ledger(self) -> Ledger:
        """What was read."""
        return Ledger(self._guards.values())

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        """Turn guards on, as for the forward, or off, as for a submodule that stays a call."""
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
        kinds = ("same", "content", "is")
        return any(guard.source == source and guard.kind in kinds for guard in self._guards.values())

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

    def is_outside(self, value: Any) -> bool:
        """Whether the forward did not make ``value``."""
        return self.found_at(value) is not None or self.is_given(value)

    def is_given(self, value: Any) -> bool:
        """Whether ``value`` is a container among the arguments."""
        return id(value) in self._given

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
        elif is_array(value):
            self.guard("content", source, snapshot(value))
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
        known = self._tensors.get(id(tensor))
        if known is None:
            self._tensors[id(tensor)] = (tensor, source)
            self.guard("tensor", source, kind_of(tensor))
            if (place := module_path(source)) is not None:
                self.tracer.found_tensor(tensor, ".".join(filter(None, place)))
        elif known[1] != source:
            self.guard("is", source, known[1])
        return tensor

    def query(self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: Any) -> None:
        """The process was asked something that it may answer otherwise at another call."""
        self.read(answer, Query(function, arguments))

    def read_kind(self, child: nn.Module) -> None:
        """``child`` is called: what it returns has the dtype it had as long as it computes in the one it did."""
        source = self.source_of(child)
        if source is None:
            return
        with DisableTorchFunction():
            floating = ((path, each.dtype) for path, each in child.named_parameters() if each.is_floating_point())
            path, dtype = next(floating, (None, None))
        if path is not None:
            self.guard("computes_in", source, (tuple(path.split(".")), dtype))

    def read_untouched(self, module: nn.Module) -> None:
        """``module``, which is no submodule, is entered: it stays of its class, and no hook on it acts."""
        source = self.source_of(module)
        if source is not None:
            self.guard("untouched", source, type(module))

    def tensor_source(self, value: Any) -> Source | None:
        """Where a tensor was read."""
        found = self._tensors.get(id(value)) if self.on else None
        return None if found is None else found[1]

    def refuse_write(self, owner: Any, does: str) -> None:
        """Raise if ``owner`` is outside: a graph would not do it again."""
        source = self.source_of(owner)
        if source is not None or (self.on and self.is_given(owner)):
            where = "an argument" if source is None else described(source)
            raise self.refused(
                f"the forward {does} a {type(owner).__name__} that it did not make, {where}, which a graph would not "
                "do at each call"
            )
