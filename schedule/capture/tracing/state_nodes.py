"""Nodes for parameters, buffers and other objects, read by a forward from attributes of modules.

Tensors and objects are read at each call along the path that the forward takes to them, through plain objects and
containers too: ``self.rotary.tables[0]``. A graph reads them where the forward does, if other code runs before it uses
them: that code may replace them.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import fx, nn

from schedule.capture.effects.effects import QUIET
from schedule.capture.effects.later_reads import check_same
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.guards.sources import Attr, DictOf, Item, Source, described, module_path, submodule_source
from schedule.capture.python.evaluator import Evaluator
from schedule.capture.recording.structure import TensorSpec
from schedule.capture.recording.user_lines import user_line
from schedule.util.errors import TraceError


class _Tracer(Trace, Protocol):
    evaluator: Evaluator


class StateNodes:
    """Nodes to read state of modules, for one trace.

    Args:
        tracer: the trace.
    """

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer, self._later = tracer, tracer.evaluator.later
        self._sources: dict[int, Source] = {id(tensor): source for source, tensor in _named_tensors(tracer.module)}
        self._same_until: dict[fx.Node, fx.Node | None] = {}

    def object(self, value: Any) -> fx.Node | None:
        """Return a node to read an object found in attributes of modules, else None."""
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
            read = self._tracer.emit(getattr, (base, source.name if isinstance(source, Attr) else "__dict__"))
            read.meta[QUIET] = True
            return read
        if isinstance(source.base, DictOf):
            with self._tracer.evaluator.recording(True):
                self._tracer.evaluator.guard("contains", source.base, source.key)
        return self._tracer.emit(operator.getitem, (base, source.key)) if is_atom(source.key) else None

    def tensor(self, tensor: torch.Tensor) -> fx.Node:
        """Return a node to read ``tensor``, placed at its first read by the forward.

        Raises:
            TraceError: no path through attributes of modules leads to it.
        """
        place, _ = self._later.place(tensor)
        with self._later.writing_behind(place):
            node = self._read_tensor(tensor)
        if node is None:
            raise TraceError(
                f"the forward uses a tensor of shape {tuple(tensor.shape)} that is neither an input, a parameter, "
                "a buffer nor a tensor attribute of this module, or of an object that it holds",
                where=user_line(),
                fix="register it as a buffer, pass it as an argument, or mark the module as a leaf",
            )
        node.meta["source"] = user_line()
        node.meta["spec"] = TensorSpec.of(tensor)
        self._same_until[node] = place
        return node

    def _read_tensor(self, tensor: torch.Tensor) -> fx.Node | None:
        """Return a node to read ``tensor``: along the path of the forward, else by its name in a module, else None."""
        evaluator = self._tracer.evaluator
        source, named = evaluator.read_at(tensor), self._sources.get(id(tensor))
        node = None if source is None else self._read(source)
        if node is None and named is not None:
            if source is not None:
                with evaluator.recording(True):
                    evaluator.guard("is", source, named)
            return self._read(named)
        if node is not None and source is not None:
            self._sources[id(tensor)] = source
        return node

    def holds(self, tensor: torch.Tensor) -> bool:
        """Check whether ``tensor`` is a parameter, buffer or tensor attribute, or one read from an object."""
        return id(tensor) in self._sources

    def check_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Write a check for a tensor read again after other code has run: it is still the one at ``node``."""
        _, last = self._later.place(tensor)
        if self._same_until.get(node, last) is not last:
            self._same_until[node] = last
            with self._later.writing_behind(last):
                now = self._read_tensor(tensor)
                self._tracer.emit(check_same, (node, now, described(self._sources[id(tensor)])))


def _named_tensors(module: nn.Module) -> list[tuple[Source, torch.Tensor]]:
    """Return parameters, buffers and plain tensor attributes of all modules, with their sources."""
    found: list[tuple[Source, torch.Tensor]] = []
    for path, child in module.named_modules():
        own = DictOf(submodule_source(path))
        tables = ((Item(own, "_parameters"), child._parameters), (Item(own, "_buffers"), child._buffers))
        for table, values in (*tables, (own, vars(child))):
            found += [(Item(table, name), each) for name, each in values.items() if isinstance(each, torch.Tensor)]
    return found[::-1]  # the first name of a tied tensor wins
