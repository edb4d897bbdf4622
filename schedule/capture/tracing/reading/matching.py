"""Parts of a subject that the patterns of a ``match`` statement look at, each read with its guard."""

from __future__ import annotations

from typing import Any

import torch

from schedule.capture.tracing.reading.calling import Calling
from schedule.capture.tracing.reading.sources import Attr, Const
from schedule.util.internal_errors import as_python_does, raise_if_own

_ABSENT = object()
_WHOLE = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
"""Classes whose one positional pattern is for the object itself (Python's reference, "Class patterns")."""


def _is_sequence(value: Any) -> bool:
    match value:
        case [*_]:
            return True
        case _:
            return False


def _is_mapping(value: Any) -> bool:
    match value:
        case {}:
            return True
        case _:
            return False


class Matching(Calling):
    """Part of the evaluator for patterns. Methods for parts return one for each pattern below, or None."""

    def is_singleton(self, value: Any, constant: bool | None) -> bool:
        """Check whether ``value is constant``; a comparison of sizes, symbolic here, is a bool at each call."""
        known = bool(value) if isinstance(value, torch.SymBool) and constant is not None else value
        return self.is_(known, constant)

    def sequence_parts(self, value: Any, count: int, star: int | None) -> list[Any] | None:
        """Return the items of a sequence of ``count`` items, or of more with a list of those at index ``star``."""
        self.call(type, value)
        if not _is_sequence(value):
            return None
        size = self.call(len, value)
        if size < count or (size > count and star is None):
            return None
        items = list(self.iterate(value))
        if star is None:
            return items
        end = star + len(items) - count
        return [*items[:star], items[star:end], *items[end:]]

    def mapping_parts(self, value: Any, keys: tuple[Any, ...], rest: bool) -> list[Any] | None:
        """Return the values of a mapping at ``keys``, with a dict of its other entries if ``rest``."""
        self.call(type, value)
        if not _is_mapping(value) or (keys and self.call(len, value) < len(keys)):
            return None
        if len({*keys}) < len(keys):
            raise as_python_does(ValueError("mapping pattern checks duplicate key"))
        get = self.attr(value, "get") if keys else None
        parts: list[Any] = []
        for key in keys:
            parts.append(self.call(get, key, _ABSENT))
            if parts[-1] is _ABSENT:
                return None
        if rest:
            given = self.mapping(value) if isinstance(value, dict) else value
            names = (key for key in self.iterate(given) if key not in keys)
            parts.append({key: self.item(given, key) for key in names})
        return parts

    def class_parts(self, value: Any, cls: Any, count: int, names: tuple[str, ...]) -> list[Any] | None:
        """Return the attributes of an instance of ``cls``: ``count`` by position, then those of ``names``."""
        if not isinstance(cls, type):
            raise as_python_does(TypeError("called match pattern must be a class"))
        if not self.call(isinstance, value, cls):
            return None
        whole, positional = self._positional(cls, count) if count else (False, ())
        attributes = (*positional[:count], *names)
        for index, name in enumerate(attributes):
            if name in attributes[:index]:
                raise as_python_does(TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}"))
        try:
            return [*([value] if whole else []), *(self.attr(value, name) for name in attributes)]
        except AttributeError as error:
            raise_if_own(error)
            return None

    def _positional(self, cls: type, count: int) -> tuple[bool, tuple[str, ...]]:
        """Return whether the one positional pattern is for the object itself, else the names of the attributes."""
        if hasattr(cls, "__match_args__"):
            whole, names = False, self.read(cls.__match_args__, Attr(Const(cls), "__match_args__"))
            if not isinstance(names, tuple):
                kind = type(names).__name__
                raise as_python_does(TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {kind})"))
        else:
            self.guard("lacks", Const(cls), "__match_args__")
            whole, names = issubclass(cls, _WHOLE), ()
        allowed = 1 if whole else len(names)
        if count > allowed:
            patterns = f"positional sub-pattern{'' if allowed == 1 else 's'}"
            raise as_python_does(TypeError(f"{cls.__name__}() accepts {allowed} {patterns} ({count} given)"))
        return whole, names
