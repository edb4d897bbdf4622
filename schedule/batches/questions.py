"""Errors that ask for example inputs if none can be made."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedule.util.errors import NotApplicable
from schedule.util.own_code import is_outside

MAX_NAMED = 4  # parts


def question(model: nn.Module, needed: Sequence[str], why: str) -> NotApplicable:
    """Return the error that asks for the arguments of ``model``, at least for ``needed``."""
    wanted = ", ".join(f"{name}=…" for name in needed) or "…"
    return NotApplicable(
        f"what is {type(model).__name__} called with? An example could not be made: {why}",
        asked="make example inputs",
        where=f"{type(model).__name__}.forward({_arguments(model)})",
        fix=f"pass a batch: batch=dict({wanted})",
    )


def no_forward(model: nn.Module) -> NotApplicable:
    """Return the error that asks for a part of ``model``, because it cannot be called itself."""
    parts = [name for name, part in model.named_children() if type(part).forward is not nn.Module.forward]
    named = ", ".join(f"model.{name}" for name in parts[:MAX_NAMED]) + (", …" if len(parts) > MAX_NAMED else "")
    return NotApplicable(
        f"{type(model).__name__} has no forward of its own: it holds parts and generates with them",
        asked="make example inputs",
        where=type(model).__name__,
        fix=f"schedule its parts one by one: {named}" if named else "schedule a module that has a forward",
    )


def because(error: Exception, batch: Mapping[str, Any]) -> str:
    """Describe the ``error`` of the model for ``batch``."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    tried = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items() if isinstance(value, torch.Tensor))
    return f"the model refused {tried}: {type(error).__name__}: {first[:200]}{_location(error)}"


def nothing_says(names: Iterable[str]) -> str:
    """Describe that ``names`` are not known."""
    unknown = ", ".join(names) or "its arguments"
    return f"the config does not say what {unknown} should be"


def _location(error: Exception) -> str:
    """Return the innermost line of the model's own code."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame, line) for frame, line in frames if not is_outside(frame.f_globals.get("__name__"))]
    return f" ({Path(lines[-1][0].f_code.co_filename).name}:{lines[-1][1]})" if lines else ""


def _arguments(model: nn.Module) -> str:
    """Return the names of the arguments, with optional ones marked."""
    parameters = inspect.signature(model.forward).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}=…" for p in parameters if p.kind not in _VARIADIC)


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
