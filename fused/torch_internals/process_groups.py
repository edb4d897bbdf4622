"""Process groups by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fused.assumptions import private, unavailable

__all__ = ["group_size_by_name", "process_group_by_name"]

_NAME = "tables of process groups"
_MODULE = "torch.distributed.distributed_c10d"

group_size_by_name: Callable[..., int] = private(_NAME, f"{_MODULE}._get_group_size_by_name", unavailable(_NAME))
process_group_by_name: Callable[..., Any] = private(_NAME, f"{_MODULE}._resolve_process_group", unavailable(_NAME))
