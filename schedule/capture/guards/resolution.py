"""Lookups of names on classes by Python's method resolution order, and guards on their results.

A class may change after a trace: an attribute is added, replaced or removed, on the class or on one of its bases, or
its bases change. CPython gives a class a new version whenever one of these happens. So a guard compares versions
first, and looks names up again only if a version changed.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fused.assumptions import CLASS_VERSION_OFFSET, holds
from schedule.capture.guards.plain_values import Tracked, is_atom, same
from schedule.capture.recording.interception import unwatched
from schedule.capture.recording.structure import original_class

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


class _Absent:
    """Result of a lookup that finds nothing."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()

BASES = "__mro__"
"""Name in a guard on all bases of a class."""


def class_of(value: Any) -> type:
    """Return the user's class of ``value``, also for a scheduled module."""
    if isinstance(value, Tracked):
        return value.replaces
    return original_class(value) if isinstance(value, nn.Module) else type(value)


def is_mutable(cls: type) -> bool:
    """Check whether Python code can change the attributes of ``cls``."""
    return not cls.__flags__ & _IMMUTABLE


def found_in(cls: type, name: str, after: type | None = None) -> Any:
    """Return the raw attribute ``name`` of ``cls`` or of one of its bases, or ``ABSENT``; no descriptor is called.

    Args:
        cls: the class.
        name: the name.
        after: look only behind this class, as ``super()`` does.
    """
    bases: Sequence[type] = type.mro(cls) if cls is type else cls.__mro__
    if after is not None:
        bases = bases[bases.index(after) + 1 :]
    for base in bases:
        found = vars(base).get(name, ABSENT)
        if found is not ABSENT:
            return unwatched(found) if isinstance(found, types.FunctionType) else found
    return ABSENT


@dataclass(frozen=True, eq=False)
class Resolved:
    """What ``name`` is on a class, the expectation of a guard.

    Attributes:
        name: the name.
        after: the class behind which it was looked up, or None.
        raw: the attribute without calling descriptors, or ``ABSENT``.
    """

    name: str
    after: type | None
    raw: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resolved) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, type | None, int]:
        return self.name, self.after, 0 if self.name == BASES else id(self.raw)

    def holds(self, cls: type) -> bool:
        """Check whether the lookup on ``cls`` gives the same result."""
        if self.name == BASES:
            return bool(cls.__mro__ == self.raw)
        try:
            found = found_in(cls, self.name, self.after)
        except ValueError:  # `after` is no base any more
            return False
        return found is self.raw or (is_atom(self.raw) and same(found, self.raw))


def _version_of(cls: type) -> ctypes.c_uint:
    """Return a view of the version of ``cls``; 0 means none."""
    return ctypes.c_uint.from_address(id(cls) + CLASS_VERSION_OFFSET)


_HAS_VERSIONS = holds("versions of classes")


def resolutions(guards: Iterable[tuple[type, Resolved]]) -> tuple[str, dict[str, Any]]:
    """Return a Python condition for lookups on classes to give what they gave, and the names it uses."""
    by_class: dict[type, list[Resolved]] = {}
    for cls, expected in guards:
        by_class.setdefault(cls, []).append(expected)
    views = [_version_of(cls) for cls in by_class]
    known = [-1] * len(views)  # no version

    def looked_up() -> bool:
        versions = [_looked_at(cls, view) for cls, view in zip(by_class, views, strict=True)]
        if not all(each.holds(cls) for cls, expected in by_class.items() for each in expected):
            return False
        if _HAS_VERSIONS and 0 not in versions:
            known[:] = versions
        return True

    equal = " and ".join(f"_version_{n}.value == _known[{n}]" for n in range(len(views)))
    names = {f"_version_{n}": view for n, view in enumerate(views)} | {"_known": known, "_looked_up": looked_up}
    return f"({equal}) or _looked_up()", names


def _looked_at(cls: type, view: ctypes.c_uint) -> int:
    getattr(cls, "__version_of_class__", None)  # a lookup gives a class a version
    return int(view.value)
