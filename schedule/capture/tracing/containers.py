"""Plain dicts of stateful objects: writes by the forward become nodes of the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.recording.source import user_line
from schedule.capture.tracing.trace import Trace
from schedule.util.errors import TraceError


class TrackedDict(dict[Any, Any]):
    """A dict read from an object such as a cache: ``cache.is_updated[3] = True`` becomes a node of the graph."""

    def __init__(self, tracer: Trace, node: fx.Node, items: dict[Any, Any]) -> None:
        super().__init__(items)
        self._tracer, self.node = tracer, node
        node.meta["object"] = True

    def __setitem__(self, key: Any, value: Any) -> None:
        with DisableTorchFunction():
            self._tracer.emit(operator.setitem, (self.node, key, self._tracer.as_nodes(value)))
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        node = self._tracer.emit(operator.contains, (self.node, key))
        node.meta["opaque"] = True
        self._tracer.guard(node, found)
        return found

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if found is None or isinstance(found, (str, torch.dtype)):
            with DisableTorchFunction():
                self._tracer.guard(self._tracer.emit(operator.getitem, (self.node, key)), found)
        return found

    def _guarded_keys(self) -> tuple[Any, ...]:
        keys = tuple(super().keys())
        with DisableTorchFunction():
            node = self._tracer.emit(tuple, (self.node,))
            node.meta["opaque"] = True
            self._tracer.guard(node, keys)
        return keys

    def __len__(self) -> int:
        return len(self._guarded_keys())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._guarded_keys())

    def keys(self) -> Any:
        """Return the keys, with a guard on them."""
        return dict.fromkeys(self).keys()

    def items(self) -> Any:
        """Return the items, with a guard on the keys."""
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        """Return the values, with a guard on the keys."""
        return {key: self[key] for key in self}.values()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value for ``key`` as ``dict.get`` does, with a guard on whether it is present."""
        if key not in self:
            return default
        return self[key]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            "the forward changes a dict of a stateful object other than by assigning an item",
            where=user_line(),
            fix="schedule its submodules instead",
        )

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse
