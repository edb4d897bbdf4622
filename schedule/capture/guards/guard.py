"""Guards: each is one condition on the value at one source.

The value is the same object, equals a value of the same type, has the same keys, or is the object at another source (a
tie).
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schedule.capture.guards.plain_values import is_atom
from schedule.capture.guards.resolution import BASES, Resolved, found_in
from schedule.capture.guards.sources import (
    Attr,
    Const,
    DictOf,
    Item,
    Self,
    Source,
    described,
    has_name,
    leads_from_generated,
    root,
    value_at,
)

_OF_OBJECTS = ("is", "class", "none", "distinct", "instance", "no_instance", "calls")


@dataclass(frozen=True)
class Guard:
    """One condition on the value at ``source``.

    Attributes:
        kind: a key of :data:`guard_code.CONDITIONS`.
        source: the source of the value.
        expected: the value or source to compare with.
    """

    kind: str
    source: Source
    expected: Any = None

    @property
    def is_shared(self) -> bool:
        """Whether many modules have the same guard: one from a constant, with a function or class expected."""
        kinds = (types.FunctionType, types.BuiltinFunctionType, type)
        return self.kind == "resolves" or (isinstance(root(self.source), Const) and isinstance(self.expected, kinds))

    @property
    def places(self) -> Iterator[tuple[Any, Any]]:
        """The objects on the way to a value outside of the module, each with the name or key that is looked up."""
        source = self.source
        if self.kind == "resolves":
            yield from ((base, self.expected.name) for base in source.value.__mro__)  # type: ignore[union-attr]
        elif self.kind not in _OF_OBJECTS:
            yield value_at(source), None
        while isinstance(source, (DictOf, Item, Attr)):
            owner = source.base.base if isinstance(source.base, DictOf) else source.base
            if not isinstance(source, DictOf):
                yield value_at(owner), source.name if isinstance(source, Attr) else source.key
            source = source.base

    def __str__(self) -> str:
        return f"{described(self.source)} {self.kind} {self.expected!r}"

    def __reduce__(self) -> Any:
        """Pickle a guard on code, or on which object it is, as one on what the other process loads."""
        if self.kind == "resolves":
            expected = self.expected
            if expected.name != BASES and not is_atom(expected.raw):
                return _resolved_again, (self.source, expected.name, expected.after)
            return _resolved, (self.source, expected.name, expected.after, expected.raw)
        is_object = not (isinstance(self.expected, Source) or is_atom(self.expected) or has_name(self.expected))
        if self.kind in ("is", "calls") and is_object:
            if isinstance(root(self.source), Self):
                raise pickle.PicklingError("an object that no name leads to")
            return _guard_again, (self.kind, self.source)
        return Guard, (self.kind, self.source, self.expected)


def _resolved(source: Const, name: str, after: type | None, raw: Any) -> Guard:
    return Guard("resolves", source, Resolved(name, after, raw))


def _resolved_again(source: Const, name: str, after: type | None) -> Guard:
    return _resolved(source, name, after, found_in(source.value, name, after))


def _guard_again(kind: str, source: Source) -> Guard:
    value = value_at(source)
    return Guard(kind, source, value.__func__ if kind == "calls" else value)


def is_on_generated_code(guard: Guard) -> bool:
    """Check whether ``guard`` is on a class, code or globals that this package or fx makes again with the graph."""
    return any(leads_from_generated(each) for each in (guard.source, guard.expected) if isinstance(each, Source))


def is_portable(guard: Guard) -> bool:
    """Check whether ``guard`` can be pickled, so that another process can check it."""
    try:
        pickle.dumps(guard)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True
