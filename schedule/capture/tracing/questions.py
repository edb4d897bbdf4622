"""Questions about objects of one trace: nodes whose answers are guarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from schedule.capture.tracing.effects import ASSUMED, IS_PLAIN, QUIET
from schedule.capture.tracing.trace import Trace


def ask(
    trace: Trace, question: Callable[..., Any], operands: tuple[Any, ...], answer: Any, quiet: bool = False
) -> fx.Node:
    """Write a question about an object with a guard on its answer.

    Args:
        trace: the trace.
        question: the function to call, such as ``len``.
        operands: its arguments.
        answer: what it returned.
        quiet: whether it runs no code of the user.
    """
    asked = trace.emit(question, operands)
    asked.meta["opaque"] = True
    if quiet:
        asked.meta[QUIET] = True
    trace.guard(asked, answer)
    return asked


def assume(trace: Trace, question: Callable[..., bool], operands: tuple[Any, ...]) -> None:
    """Guard on a question that is answered by yes, and that the forward may not ask itself."""
    ask(trace, question, operands, True, quiet=True).meta[ASSUMED] = True


def ask_keys(trace: Trace, node: fx.Node, container: Any) -> None:
    """Guard on the length of a list or tuple at ``node``, or on the keys of a dict there, and before on its class."""
    if type(container) in IS_PLAIN:
        assume(trace, IS_PLAIN[type(container)], (node,))
    question, answer = (tuple, tuple(container)) if isinstance(container, dict) else (len, len(container))
    ask(trace, question, (node,), answer, quiet=type(container) in IS_PLAIN)
