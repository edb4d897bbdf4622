"""How :mod:`torch.fx` copies a function with another number of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fused.assumptions import private, unavailable

__all__ = ["with_arguments"]

_NAME = "copies of functions"

with_arguments: Callable[..., Any] = private(_NAME, "torch.fx._symbolic_trace._patch_function", unavailable(_NAME))
