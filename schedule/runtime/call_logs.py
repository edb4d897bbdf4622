"""Logs of graphs: traced or refused, their guards, and the guards that a call fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from schedule.capture import Specialization
from schedule.util.errors import TraceError
from schedule.util.internal_errors import InternalError
from schedule.util.logs import is_on, log, of_mode


def log_trace(path: str, training: bool | None, found: Specialization | TraceError | InternalError) -> None:
    """Log a graph, or why there is none; ``training`` is None if that holds for both modes."""
    label, facts = of_mode(path, training), {"module": path, "training": training}
    if isinstance(found, (TraceError, InternalError)):
        reason = found.why.splitlines()[0]
        told = f"{label}: not traced: {reason} ({found.where})"
        log("trace", told, {"reason": reason, "where": found.where, **facts})
        return
    log("trace", f"{label}: {len(found.graph.nodes)} nodes", {"nodes": len(found.graph.nodes), **facts})
    if is_on("trace", details=True):
        log("trace", f"{label}:\n{found.graph}", {"graph": str(found.graph), **facts}, details=True)


def log_guards(path: str, specializations: Sequence[Specialization]) -> None:
    """Log the guards on Python state of each graph of a module."""
    if not is_on("guards", details=True):
        return
    for number, made in enumerate(specializations):
        for guard in made.guard_set:
            _log_guard(path, number, str(guard), details=True)


def log_missed(path: str, specializations: Sequence[Specialization], module: nn.Module) -> None:
    """Log the first guard on Python state that a call of ``module`` fails, for each of its graphs."""
    if torch.compiler.is_compiling() or not is_on("guards"):
        return
    for number, made in enumerate(specializations):
        guard = made.guard_set.missed(module)
        _log_guard(path, number, "an argument, a mode or a hook" if guard is None else str(guard), details=False)


def _log_guard(path: str, number: int, guard: str, details: bool) -> None:
    told = f"{path or 'the root module'}: graph {number}: {guard}"
    log("guards", told, {"module": path, "graph": number, "guard": guard}, details)
