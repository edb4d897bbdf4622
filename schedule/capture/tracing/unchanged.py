"""Refusal of traces with writes to Python state, because the graph would not repeat them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from schedule.capture.snapshots import Snapshot, modes_restored
from schedule.util.errors import TraceError


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
