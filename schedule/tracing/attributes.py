"""Which plain settings a forward read from its module and the module's config.

A graph made while ``self.config.output_attentions`` was False holds only as long as it is: every number, string,
flag or None read from a module or from a settings object of it becomes a guard.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from schedule.errors import TraceError
from schedule.tracing.source import user_line

Setting = tuple[str, str | None, str]  # path of the module, its attribute holding the settings object, name
PLAIN = (bool, int, float, str, type(None), torch.dtype)
_REFUSALS = (TypeError, ValueError, AttributeError, RuntimeError)  # of classes that want no subclass
_UNWATCHED = {"training", "_is_full_backward_hook", "call_super_init", "dump_patches", "_version"}


class SettingsReads:
    """Collects the settings that are read while it watches.

    Attributes:
        values: value of each setting that was read.
    """

    def __init__(self) -> None:
        self.values: dict[Setting, Any] = {}

    @contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Within, reads of plain attributes of ``modules``, and of their settings objects, are collected."""
        swapped: list[tuple[Any, type]] = []
        seen: set[int] = set()
        try:
            for path, module in modules.items():
                self._swap(module, (path, None), swapped, seen)
                for name, value in vars(module).items():
                    if is_settings(value):
                        self._swap(value, (path, name), swapped, seen)
            yield
        finally:
            for watched, cls in reversed(swapped):
                object.__setattr__(watched, "__class__", cls)

    def _swap(self, target: Any, place: tuple[str, str | None], swapped: list[Any], seen: set[int]) -> None:
        if id(target) in seen:
            return
        seen.add(id(target))
        cls = type(target)
        try:
            object.__setattr__(target, "__class__", self._watched_class(cls, target, place))
        except _REFUSALS:
            return
        swapped.append((target, cls))

    def _watched_class(self, cls: Any, watched: Any, place: tuple[str, str | None]) -> type:
        values = self.values

        def __getattribute__(target: Any, name: str) -> Any:
            value = cls.__getattribute__(target, name)
            plain = target is watched and is_plain(value) and name not in _UNWATCHED
            if plain and name in object.__getattribute__(target, "__dict__"):
                values.setdefault((*place, name), value)
            return value

        def __setattr__(target: Any, name: str, value: Any) -> None:
            current = vars(target).get(name, values)
            if target is not watched or current is value:  # a copy, or nothing new
                cls.__setattr__(target, name, value)
                return
            if is_plain(current) and _equal(current, value):  # it stays what it is, where it is what it was
                values.setdefault((*place, name), current)
                return
            raise TraceError(
                f"the forward assigns attribute {name!r} of a {cls.__name__}",
                where=user_line(),
                fix="schedule its submodules instead, or keep state in buffers that are updated in place",
            )

        def __reduce_ex__(target: Any, protocol: Any) -> Any:
            reduced: Any = object.__reduce_ex__(target, 2)
            rebuild, (_, *rest), *state = reduced
            return (rebuild, (cls, *rest), *state)  # copies made by the forward are of the user's class

        members = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__reduce_ex__": __reduce_ex__}
        watched_class = type(cls.__name__, (cls,), members)
        watched_class.__module__, watched_class.__qualname__ = cls.__module__, cls.__qualname__
        return watched_class


def _equal(current: Any, value: Any) -> bool:
    """Whether a plain value is assigned once more; that a size is equal becomes a guard of the trace."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return type(current) is kinds.get(type(value), type(value)) and bool(value == current)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a number, string, flag, dtype, None, or a member of an enum."""
    return type(value) in PLAIN or isinstance(value, enum.Enum)


def is_settings(value: Any) -> bool:
    """Whether ``value`` is a plain object that holds settings: a config, a namespace, a dataclass."""
    if isinstance(value, (nn.Module, torch.Tensor, type, enum.Enum, *PLAIN)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not isinstance(value, dict)
