"""Refuse a trace whose forward wrote to Python state: the graph would not repeat that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from schedule.capture.snapshots import Snapshot, modes_restored
from schedule.util.errors import TraceError


@contextmanager
def state_unchanged(module: nn.Module, *inputs: Any) -> Iterator[None]:
    """Restore what a trace writes to Python state inside, and refuse the trace for it.

    Tensors' data are left alone: tracing writes to data-free tensors only.

    Args:
        module: what is traced, on its own training flags.
        inputs: the arguments that its forward gets.

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
    """The error for a forward that writes to Python state.

    Args:
        changed: where and what, as :meth:`Snapshot.difference` tells it.
    """
    return TraceError(
        f"the forward writes to Python state, which its graph would not repeat: {changed}",
        fix="keep state in buffers that are updated in place, mark the module that writes as a leaf (`leaves=(…,)`), "
        "or schedule its submodules instead",
    )
