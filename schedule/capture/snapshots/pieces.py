"""Contents of one object each: saved, compared, and restored in place."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType
from typing import Any, Protocol

from schedule.capture.snapshots.entries import MISSING, Entry

Step = str | tuple[str, Any]
"""The end of a path: as written, or a template and the key that goes into it."""
Part = tuple[Step, Any]
Difference = tuple[str, str]
"""Where in the object, as the end of a path, and what is different there."""

_NUMBERS = (bool, int, float, complex, str, bytes)


class Piece(Protocol):
    """What an object held at some moment."""

    def parts(self) -> Iterable[Part]:
        """Each object that was held, with the step of the path that leads to it."""

    def difference(self) -> Difference | None:
        """The first difference between now and then."""

    def restore(self) -> str | None:
        """Put the contents back in place; why not, where that is impossible."""


def _same(now: Any, then: Any) -> bool:
    """Whether an entry is what it was: the same object, or an equal number or string."""
    if now is then:
        return True
    return type(now) is type(then) and type(then) in _NUMBERS and (now == then or repr(now) == repr(then))


def items(count: int) -> str:
    """How many items there are more, or fewer."""
    return f"{abs(count)} item{'s' * (abs(count) != 1)} {'more' if count > 0 else 'fewer'}"


def _short(value: Any) -> str:
    return repr(value)[:40] if type(value) in (*_NUMBERS, type(None)) else f"another {type(value).__name__}"


class SavedDict:
    """The entries of a dict, in order.

    Args:
        live: the dict, of any subclass; its own methods are not called.
        step: how an entry is written in a path, with ``{}`` for the key.
    """

    __slots__ = ("base", "live", "saved", "step")

    def __init__(self, live: dict[Any, Any], step: str = "[{!r}]") -> None:
        self.base: Any = OrderedDict if isinstance(live, OrderedDict) else dict
        self.live, self.step = live, step
        self.saved = dict(self.base.items(live)) if live else {}

    def parts(self) -> Iterator[Part]:
        """The values."""
        for key, value in self.saved.items():
            yield (self.step, key), value

    def _unchanged(self) -> bool:
        live, saved = self.live, self.saved
        if not live and not saved:
            return True
        return (
            len(live) == len(saved)
            and all(map(operator.is_, self.base.values(live), saved.values()))
            and all(map(operator.is_, self.base.keys(live), saved))
        )

    def difference(self) -> Difference | None:
        """An entry that is new, gone or another."""
        if self._unchanged():
            return None
        live = dict(self.base.items(self.live))
        if self.step == "[{!r}]" and len(live) != len(self.saved):
            return "", items(len(live) - len(self.saved))
        for key in {**self.saved, **live}:
            now, then = live.get(key, MISSING), self.saved.get(key, MISSING)
            if now is MISSING or then is MISSING:
                return self.step.format(key), "gone" if now is MISSING else "new"
            if not _same(now, then):
                return self.step.format(key), f"{_short(now)}, was {_short(then)}"
        return None if self.step != "[{!r}]" or list(live) == list(self.saved) else ("", "another order")

    def changed_entries(self) -> list[Entry]:
        """The entries that are new, gone or others now."""
        if self._unchanged():
            return []
        live = dict(self.base.items(self.live))
        keys = [key for key in {**self.saved, **live} if live.get(key, MISSING) is not self.saved.get(key, MISSING)]
        return [Entry(self.live, key, self.saved.get(key, MISSING), live.get(key, MISSING)) for key in keys]

    def restore(self) -> None:
        """Put the entries back, in their order."""
        if not self._unchanged():
            self.base.clear(self.live)
            for key, value in self.saved.items():
                self.base.__setitem__(self.live, key, value)


@contextmanager
def entries_as_after(entries: Sequence[Entry]) -> Iterator[None]:
    """Set inside what a run had set, where nothing else has been set since."""
    put = [entry for entry in entries if entry.table.get(entry.key, MISSING) is entry.before]
    tables = [SavedDict(table) for table in {id(entry.table): entry.table for entry in put}.values()]
    for entry in put:
        entry.put(entry.after)
    try:
        yield
    finally:
        for table in tables:
            table.restore()


class SavedSequence:
    """The items of a list or a deque."""

    __slots__ = ("live", "saved")

    def __init__(self, live: list[Any] | deque[Any]) -> None:
        self.live, self.saved = live, list(live)

    def parts(self) -> Iterator[Part]:
        """The items."""
        return ((("[{}]", index), item) for index, item in enumerate(self.saved))

    def difference(self) -> Difference | None:
        """How many items there are more or fewer, or one that is another."""
        if len(self.live) != len(self.saved):
            return "", items(len(self.live) - len(self.saved))
        for index, (now, then) in enumerate(zip(self.live, self.saved, strict=True)):
            if not _same(now, then):
                return f"[{index}]", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Put the items back."""
        if isinstance(self.live, list):
            list.__setitem__(self.live, slice(None), self.saved)
        else:
            deque.clear(self.live)
            deque.extend(self.live, self.saved)


class SavedSet:
    """The elements of a set."""

    __slots__ = ("live", "saved")

    def __init__(self, live: set[Any]) -> None:
        self.live, self.saved = live, set(live)

    def parts(self) -> Iterator[Part]:
        """The elements."""
        return (("{…}", element) for element in self.saved)

    def difference(self) -> Difference | None:
        """How many elements there are more or fewer, or that there are others."""
        if len(self.live) != len(self.saved):
            return "", items(len(self.live) - len(self.saved))
        return None if self.live == self.saved else ("", "other items")

    def restore(self) -> None:
        """Put the elements back."""
        set.clear(self.live)
        set.update(self.live, self.saved)


class SavedSlots:
    """What the ``__slots__`` of an object hold."""

    __slots__ = ("live", "saved")

    def __init__(self, live: Any, slots: Iterable[tuple[str, Any]]) -> None:
        self.live, self.saved = live, [(name, slot, self._get(live, slot)) for name, slot in slots]

    @staticmethod
    def _get(live: Any, slot: Any) -> Any:
        try:
            return slot.__get__(live)
        except AttributeError:
            return MISSING

    def parts(self) -> Iterator[Part]:
        """The values of those that are set."""
        return ((f".{name}", value) for name, _, value in self.saved if value is not MISSING)

    def difference(self) -> Difference | None:
        """A slot that holds another value."""
        for name, slot, then in self.saved:
            now = self._get(self.live, slot)
            if not _same(now, then):
                return f".{name}", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Set each to what it held, or to nothing."""
        for _, slot, then in self.saved:
            now = self._get(self.live, slot)
            if now is not then:
                slot.__delete__(self.live) if then is MISSING else slot.__set__(self.live, then)


class SavedCell:
    """The variable of an enclosing function, which ``nonlocal`` may rebind."""

    __slots__ = ("live", "saved")

    def __init__(self, live: CellType) -> None:
        self.live, self.saved = live, self._get(live)

    @staticmethod
    def _get(cell: CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return MISSING

    def parts(self) -> Iterator[Part]:
        """The value, if there is one."""
        return iter(()) if self.saved is MISSING else iter([("", self.saved)])

    def difference(self) -> Difference | None:
        """Whether it is bound to another value."""
        now = self._get(self.live)
        return None if _same(now, self.saved) else ("", f"{_short(now)}, was {_short(self.saved)}")

    def restore(self) -> None:
        """Bind it as it was."""
        if self.saved is MISSING:
            del self.live.cell_contents
        else:
            self.live.cell_contents = self.saved


class SavedNames:
    """Some names of a namespace: globals of a file, or attributes of a class.

    Args:
        owner: a dict of globals, or a class.
        names: those that a forward names.
        title: what paths begin with.
    """

    __slots__ = ("live", "owner", "saved", "title")

    def __init__(self, owner: dict[str, Any] | type, names: Iterable[str], title: str) -> None:
        self.owner, self.title = owner, title
        self.live: Any = vars(owner) if isinstance(owner, type) else owner
        self.saved = {name: self.live.get(name, MISSING) for name in names}

    def parts(self) -> Iterator[Part]:
        """The values."""
        return ((f"{self.title}.{name}", value) for name, value in self.saved.items() if value is not MISSING)

    def difference(self) -> Difference | None:
        """A name that stands for another value."""
        for name, then in self.saved.items():
            now = self.live.get(name, MISSING)
            if not _same(now, then):
                return f"{self.title}.{name}", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Let each name stand for what it did."""
        for name, then in self.saved.items():
            if self.live.get(name, MISSING) is not then:
                self._set(name, then)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.owner, type):
            type.__delattr__(self.owner, name) if value is MISSING else type.__setattr__(self.owner, name, value)
        elif value is MISSING:
            del self.owner[name]
        else:
            self.owner[name] = value
