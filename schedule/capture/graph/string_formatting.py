"""Sizes and tensors formatted as strings, for messages of checks and logs.

A graph is not bound to a size because an f-string names it: such a string is marked. Where a marked string is used for
more than a message (compared, hashed, looked into, passed to a function that may do so), where the graph holds it, or
where the forward fails with it, the module is traced once more, and then a size in a string is a size that Python has
asked for.
"""

from __future__ import annotations

import builtins
import logging
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, SupportsIndex

from torch import fx

from schedule.capture.recording.structure import leaves, map_structure
from schedule.util.errors import TraceError

_MARK = "\u2060"  # a word joiner: no key, no name and no number contains one

_FOR_MESSAGES = {print, isinstance, type, id, callable, str, repr, format}
"""Builtins that a marked string may be passed to: they use no character of it, or their result is marked too."""
_MODULES_FOR_MESSAGES = (warnings.__name__, logging.__name__)
_STRING_METHODS = {"join", "format", "__add__", "__mod__", "__format__"}
_LIST_METHODS = {"append", "insert", "extend"}


class Scalar(Protocol):
    """Symbolic number. Reading its value adds a guard."""

    value: int | float | bool

    def known(self) -> Any:
        """Return the number itself, for Python to use."""


class MarkedString(str):
    """String with an open size in it. It can be formatted further. Any other use raises."""

    strings: Strings

    def __bool__(self) -> bool:
        return True  # it is not empty

    def __add__(self, other: str) -> str:
        return self.strings.marked(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return self.strings.marked(other + self.plain())

    def __mod__(self, values: Any) -> str:
        return self.strings.marked(self.plain() % values)

    def __mul__(self, times: SupportsIndex) -> str:
        return self.strings.marked(self.plain() * times)

    def plain(self) -> str:
        """Return the string itself."""
        return str.__str__(self)


def _use(name: str) -> Callable[..., NoReturn]:
    def refused(self: MarkedString, *_: Any, **__: Any) -> NoReturn:
        self.strings.use(self)

    refused.__name__ = name
    return refused


_FURTHER = {"__add__", "__radd__", "__mod__", "__mul__", "__rmul__", "__bool__", "__str__", "__repr__", "__format__"}
_OF_OBJECTS = set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
for _name in set(dir(str)) - _FURTHER - _OF_OBJECTS - {"format", "join", "__getnewargs__"}:
    setattr(MarkedString, _name, _use(_name))


class DisplayedNumber:
    """Symbolic number to be formatted, by any format of Python's numbers."""

    def __init__(self, strings: Strings, scalar: Scalar) -> None:
        self.strings, self.scalar = strings, scalar

    def __format__(self, specification: str) -> str:
        return self.strings.of(self.scalar, specification)

    def __repr__(self) -> str:
        return self.strings.of(self.scalar)


class Strings:
    """Formatting of sizes in one trace.

    Attributes:
        exact: whether a size in a string binds the graph to it.
        written: whether a size was formatted without binding the graph.
        used: the first marked string that was used, "" if none was.
    """

    def __init__(self, exact: bool) -> None:
        self.exact, self.written, self.used = exact, False, ""

    def of(self, scalar: Scalar, specification: str = "") -> str:
        """Return ``scalar`` as a string."""
        if self.exact:
            return format(scalar.known(), specification)
        self.written = True
        return format(scalar.value, specification) + _MARK

    def of_tensor(self, number: Any, specification: str = "") -> str:
        """Return a tensor as a string: its number if it holds only one, else a marked string."""
        if number is not None:
            return format(number, specification)
        self.written = True
        return f"tensor(…){_MARK}"

    def marked(self, value: Any) -> Any:
        """Return a string with a mark in it as a :class:`MarkedString`, anything else unchanged."""
        if not self.written or type(value) is not str or _MARK not in value:
            return value
        made = MarkedString(value)
        made.strings = self
        return made

    def handed(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call of native code, with marked strings as plain ones.

        Raises:
            TraceError: ``function`` may do more with a marked string than put it into a message.
        """
        found = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, MarkedString)]
        if not found:
            return args, kwargs
        if not _is_for_messages(function):
            self.use(found[0])
        plain = map_structure((args, kwargs), lambda leaf: leaf.plain() if isinstance(leaf, MarkedString) else leaf)
        return plain

    def use(self, value: str) -> NoReturn:
        """Refuse a use of a marked string, and remember it: the forward may catch the error."""
        self.used = self.used or str.__str__(value)
        raise TraceError(f"the forward uses a string that names a size: {_unmarked(value)!r}")

    def check(self, graph: fx.Graph) -> None:
        """Raise if a marked string was used or is part of the graph.

        Raises:
            TraceError: one was, or is.
        """
        if not self.written:
            return
        if self.used:
            raise TraceError(f"the forward uses a string that names a size: {_unmarked(self.used)!r}")
        for node in graph.nodes:
            for _, leaf in leaves((node.args, dict(node.kwargs))):
                if isinstance(leaf, str) and _MARK in str.__str__(leaf):
                    raise TraceError(f"a text that names a size is part of the graph: {_unmarked(leaf)!r}")


def _unmarked(value: str) -> str:
    return str.replace(str.__str__(value), _MARK, "")


def _is_for_messages(function: Any) -> bool:
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(function, type):
        return function in _FOR_MESSAGES or issubclass(function, BaseException)
    if isinstance(owner, str):
        return name in _STRING_METHODS
    if isinstance(owner, list):
        return name in _LIST_METHODS
    if isinstance(owner, types.ModuleType) and owner is builtins:
        return function in _FOR_MESSAGES
    module = getattr(function, "__module__", None) or ""
    if module.partition(".")[0] == "torch":
        return name.startswith(("_check", "_assert"))
    return module.startswith(_MODULES_FOR_MESSAGES)
