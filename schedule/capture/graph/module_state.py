"""State of modules around a trace: one trace at a time, attributes restored, other writes refused."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from schedule.capture.guards.plain_values import ATOMS, is_atom, same
from schedule.capture.recording.user_lines import user_line
from schedule.capture.snapshots.run_effects import modes_restored
from schedule.capture.snapshots.snapshot import Snapshot
from schedule.util.errors import TraceError

# -- Lock for one trace at a time ---------------------------------------------------------------------------


TRACING = threading.RLock()
"""Held while a forward is traced, a module adapts, or a graph is compiled. Reentrant."""


# -- Attributes and buffers of modules ----------------------------------------------------------------------


_NOTHING = object()


def _refused(why: str) -> TraceError:
    return TraceError(
        why,
        where=user_line(),
        fix="schedule its submodules instead, or keep state in buffers that are updated in place",
    )


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def attributes(module: nn.Module) -> Attributes:
    """Save the current attributes and buffers of ``module`` and all its submodules."""
    return [(child, dict(vars(child)), dict(child._buffers)) for child in module.modules()]


@contextmanager
def attributes_as(saved: Attributes) -> Iterator[None]:
    """Set attributes to the saved values for the block, and restore the current ones afterwards."""
    now = [(child, dict(vars(child)), dict(child._buffers)) for child, _, _ in saved]
    _put(saved)
    try:
        yield
    finally:
        _put(now)


@contextmanager
def attributes_unchanged(module: nn.Module) -> Iterator[None]:
    """Refuse assignments made by code outside the tracer's view, and restore the attributes.

    Raises:
        TraceError: an attribute of ``module`` or of one of its submodules was assigned.
    """
    saved = attributes(module)
    try:
        yield
        changed = _changed(saved)
    finally:
        _put(saved)
    if changed is not None:
        raise _refused(
            f"the forward assigns attribute {changed[1]!r} of a {changed[0]}, which stays a call of the graph"
        )


def _changed(saved: Attributes) -> tuple[str, str] | None:
    """Return the class name and attribute of the first change since ``saved``, or None."""
    for child, own, buffers in saved:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in {**table, **wanted}:
                now, then = table.get(name, _NOTHING), wanted.get(name, _NOTHING)
                if now is not then and not (is_atom(then) and same(then, now)):
                    return type(child).__name__, name
    return None


def _put(saved: Attributes) -> None:
    for child, own, buffers in saved:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in [name for name in table.keys() if name not in wanted]:  # noqa: SIM118 (TorchScript's tables)
                del table[name]
            for name, value in wanted.items():
                if table.get(name, _NOTHING) is not value:
                    table[name] = value


def is_settings(value: Any) -> bool:
    """Check whether ``value`` is a plain object with settings: a config, a namespace, a dataclass."""
    if isinstance(value, (nn.Module, torch.Tensor, type, enum.Enum, *ATOMS)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not isinstance(value, dict)


# -- Refusal of traces with writes to Python state ----------------------------------------------------------


@contextmanager
def state_unchanged(module: nn.Module, *inputs: Any) -> Iterator[None]:
    """Restore Python state written by a trace in the block, and refuse such a trace.

    Tensor data is not restored: tracing writes to data-free tensors only.

    Args:
        module: the traced module, with its training flags unchanged.
        inputs: the arguments of its forward.

    Raises:
        TraceError: something reachable from ``module``, its forward's code or ``inputs`` was written to.
    """
    before = Snapshot({"self": module, "its arguments": inputs}, data=False)
    try:
        with modes_restored():
            yield
    finally:
        changed = before.difference()
        before.restore()
    if changed is not None:
        raise written(changed)


def written(changed: str) -> TraceError:
    """Return the error for writes to Python state by a forward.

    Args:
        changed: location and description, from :meth:`Snapshot.difference`.
    """
    return TraceError(
        f"the forward writes to Python state, which its graph would not repeat: {changed}",
        fix="keep state in buffers that are updated in place, mark the module that writes as a leaf (`leaves=(…,)`), "
        "or schedule its submodules instead",
    )
