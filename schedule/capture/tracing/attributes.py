"""The attributes and buffers of modules: put back after a trace, and found changed by what was not followed."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.recording.source import user_line
from schedule.capture.tracing.reading.ledger import ATOMS, is_atom, same
from schedule.util.errors import TraceError

_NOTHING = object()


def assigns_attributes(graph: fx.Graph) -> bool:
    """Whether the graph assigns attributes of modules."""
    tables = (str(node.target).rpartition(".")[2] for node in graph.nodes if node.op == "get_attr")
    return any(table in ("__dict__", "_buffers") for table in tables)


def _refused(why: str) -> TraceError:
    return TraceError(
        why,
        where=user_line(),
        fix="schedule its submodules instead, or keep state in buffers that are updated in place",
    )


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def attributes(module: nn.Module) -> Attributes:
    """What the attributes and buffers of ``module``, and of all inside, are now."""
    return [(child, dict(vars(child)), dict(child._buffers)) for child in module.modules()]


@contextmanager
def attributes_as(kept: Attributes) -> Iterator[None]:
    """Within, attributes are what they were then; afterwards what they are now, whatever is assigned."""
    now = [(child, dict(vars(child)), dict(child._buffers)) for child, _, _ in kept]
    _put(kept)
    try:
        yield
    finally:
        _put(now)


@contextmanager
def attributes_unchanged(module: nn.Module) -> Iterator[None]:
    """Within, nothing is assigned but where assignments are watched; what is, is put back.

    Raises:
        TraceError: an attribute of ``module``, or of what is in it, was assigned.
    """
    kept = attributes(module)
    try:
        yield
        changed = _changed(kept)
    finally:
        _put(kept)
    if changed is not None:
        raise _refused(
            f"the forward assigns attribute {changed[1]!r} of a {changed[0]}, which stays a call of the graph"
        )


def _changed(kept: Attributes) -> tuple[str, str] | None:
    """The class and the attribute of the first module that is not as it was then."""
    for child, own, buffers in kept:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in {**table, **wanted}:
                now, then = table.get(name, _NOTHING), wanted.get(name, _NOTHING)
                if now is not then and not (is_atom(then) and same(then, now)):
                    return type(child).__name__, name
    return None


def _put(kept: Attributes) -> None:
    for child, own, buffers in kept:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in [name for name in table if name not in wanted]:
                del table[name]
            for name, value in wanted.items():
                if table.get(name, _NOTHING) is not value:
                    table[name] = value


def is_settings(value: Any) -> bool:
    """Whether ``value`` is a plain object that holds settings: a config, a namespace, a dataclass."""
    if isinstance(value, (nn.Module, torch.Tensor, type, enum.Enum, *ATOMS)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not isinstance(value, dict)
