"""Versions of dicts, kept by the interpreter or by torch: another one whenever an entry has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fused.assumptions import holds, private, unavailable

__all__ = ["HAS_DICT_VERSIONS", "dict_version"]

_NAME = "versions of dicts"

HAS_DICT_VERSIONS = holds(_NAME)
"""Whether :func:`dict_version` tells of every change in this interpreter."""
dict_version: Callable[[dict[Any, Any]], int] = private(
    _NAME, "torch._C._dynamo.guards.dict_version", unavailable(_NAME)
)
