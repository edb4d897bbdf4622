"""Sources in code that this package or torch.fx generates, and makes again in another process."""

from __future__ import annotations

import types
from typing import Any

from torch import fx

from schedule.capture.tracing.reading.sources import Const, Query, Source, root


def leads_from_generated(source: Source) -> bool:
    """Check whether ``source`` begins at a generated class, function, or globals."""
    start = root(source)
    return isinstance(start, Const) and (_is_generated(start.value) or _is_found_on_generated(start))


def _is_found_on_generated(const: Const) -> bool:
    start = None if const.found is None else root(const.found)
    return isinstance(start, Query) and any(map(_is_generated, start.arguments))


def _is_generated(value: Any) -> bool:
    if isinstance(value, type):
        return "_schedule_original" in vars(value) or (
            issubclass(value, fx.GraphModule) and value is not fx.GraphModule
        )
    if isinstance(value, dict):
        return "__builtins__" in value and "__name__" not in value
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith("<eval_with_key>")
