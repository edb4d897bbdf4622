"""Nodes for parameters, buffers and other objects that a forward reads from attributes of modules.

A graph reads them where the forward does, if other code runs before it uses them: that code may replace them.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import fx, nn

from schedule.capture.recording.source import user_line
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.later_reads import check_same
from schedule.capture.tracing.reading.evaluator import Evaluator
from schedule.capture.tracing.reading.plain import is_atom
from schedule.capture.tracing.reading.sources import Attr, DictOf, Item, Source, described, module_path
from schedule.capture.tracing.trace import Trace
from schedule.util.errors import TraceError


class _Tracer(Trace, Protocol):
    evaluator: Evaluator


class StateNodes:
    """Nodes that read state of modules, for one trace.

    Args:
        tracer: the trace.

    Attributes:
        paths: id of a tensor → its path in the traced module.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer, self._later = tracer, tracer.evaluator.later
        self.paths = {id(tensor): name for name, tensor in _named_tensors(tracer.module)}
        self._same_until: dict[fx.Node, fx.Node | None] = {}

    def object(self, value: Any) -> fx.Node | None:
        """Return a node to read an object that the forward found in attributes of modules, else None."""
        source = None if is_atom(value) or isinstance(value, nn.Module) else self._tracer.evaluator.found_at(value)
        if source is None:
            return None
        first, last = self._later.place(value)
        with self._later.writing_behind(first):
            node = self._read(source)
        if node is not None and first is not last and (now := self._read(source)) is not None:
            self._tracer.emit(check_same, (node, now, described(source)))
        return node

    def _read(self, source: Source) -> fx.Node | None:
        """Return a node to read the value at ``source``, or None if it does not lead through attributes of modules."""
        place = module_path(source)
        if place is not None:
            return self._tracer.graph.get_attr(".".join(filter(None, place)))
        if not isinstance(source, (Attr, DictOf, Item)):
            return None
        base = self._read(source.base)
        if base is None:
            return None
        if not isinstance(source, Item):
            return self._tracer.emit(getattr, (base, source.name if isinstance(source, Attr) else "__dict__"))
        if isinstance(source.base, DictOf):
            with self._tracer.evaluator.recording(True):
                self._tracer.evaluator.guard("contains", source.base, source.key)
        return self._tracer.emit(operator.getitem, (base, source.key))

    def tensor(self, tensor: torch.Tensor) -> fx.Node:
        """Return a node to read ``tensor`` where the forward did so first.

        Raises:
            TraceError: it is not a parameter, buffer or attribute of a module.
        """
        path = self.paths.get(id(tensor))
        if path is None:
            raise TraceError(
                f"the forward uses a tensor of shape {tuple(tensor.shape)} that is neither an input, a parameter, "
                "a buffer nor a tensor attribute of this module",
                where=user_line(),
                fix="register it as a buffer, pass it as an argument, or mark the module as a leaf",
            )
        place, _ = self._later.place(tensor)
        with self._later.writing_behind(place):
            node = self._tracer.graph.get_attr(path)
        node.meta["source"] = user_line()
        node.meta["spec"] = TensorSpec.of(tensor)
        self._same_until[node] = place
        return node

    def check_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Write a check that a tensor read again after other code has run is the one at ``node``."""
        _, last = self._later.place(tensor)
        if self._same_until.get(node, last) is not last:
            self._same_until[node] = last
            path = self.paths[id(tensor)]
            self._tracer.emit(check_same, (node, self._tracer.graph.get_attr(path), f"self.{path}"))


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters, buffers and plain tensor attributes, by dotted path."""
    found: list[tuple[str, torch.Tensor]] = []
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for table in (child._parameters, child._buffers, vars(child)):
            found += [(dot + name, t) for name, t in table.items() if isinstance(t, torch.Tensor)]
    return found[::-1]  # the first name of a tied tensor wins
