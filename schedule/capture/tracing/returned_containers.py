"""Lists, dicts and dataclasses that a submodule returns, and that it may keep, so that other code changes them.

The trace has the items of when the call returned. Where the forward reads such a container after other code has run,
the graph checks that it still has them::

    forward:  r = self.child(x);  y = self.other(x);                                      return y + r[0]
    graph:    r = self.child(x);  y = self.other(x);  check_returned(r, [r[0]], "child");  return y + r[0]
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.tracing.effects import graph_check
from schedule.capture.tracing.handed_containers import contents, is_same, refuse_changed
from schedule.capture.tracing.trace import Trace


def watch_returned(tracer: Trace, value: Any, node: fx.Node) -> list[Any]:
    """Write a check where the forward reads a container in ``value``, the result of ``node``, after other code.

    Returns:
        The lists and dicts, which the forward must not change, because a graph would not.
    """
    checked, expected = tracer.last_call, contents(value)

    def read_again() -> None:
        nonlocal checked
        call = tracer.last_call
        if call is not checked and is_same(contents(value), expected):  # else the forward has changed it
            checked = call
            with DisableTorchFunction():
                tracer.emit(check_returned, (node, tracer.as_nodes(expected), str(node.target)))

    containers = tracer.containers.returned(value, read_again)
    return [each for each in containers if type(each) in (list, dict)]


@graph_check
def check_returned(value: Any, expected: Any, call: str) -> None:
    """Raise unless the containers in ``value``, returned by a call, hold what they did then (graph target).

    Raises:
        ScheduleError: code that the graph called since has changed them.
    """
    told = f"a list or dict that {call} returned was changed by code that the forward called since"
    refuse_changed(contents(value), contents(expected), f"{told}; it was not in the recorded call")
