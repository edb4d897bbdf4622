"""Saved contents of objects, arrays, generators and containers, to be compared and restored in place."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import pickle
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, GeneratorType
from typing import Any, Protocol

import torch

from fused.torch_internals.tensor_kinds import FakeTensor
from schedule.capture.snapshots.run_effects import MISSING, Entry
from schedule.util.named_values import named_tensors

# -- Saved contents of single objects -----------------------------------------------------------------------


Step = str | tuple[str, Any]
"""Last step of a path: a string, or a template and its key."""
Part = tuple[Step, Any]
Difference = tuple[str, str]
"""Location in the object, as the end of a path, and description of the difference."""

_NUMBERS = (bool, int, float, complex, str, bytes)


class Piece(Protocol):
    """Contents of an object at some moment."""

    def parts(self) -> Iterable[Part]:
        """Return each saved object with its step of the path."""

    def difference(self) -> Difference | None:
        """Return the first difference between the current and the saved contents, or None."""

    def restore(self) -> str | None:
        """Restore the contents in place, or return the reason for a failure."""


def _same(now: Any, then: Any) -> bool:
    """Check whether an entry is unchanged: the same object, or an equal number or string."""
    if now is then:
        return True
    return type(now) is type(then) and type(then) in _NUMBERS and (now == then or repr(now) == repr(then))


def items(count: int) -> str:
    """Return a change in the number of items for messages, such as ``3 items more``."""
    return f"{abs(count)} item{'s' * (abs(count) != 1)} {'more' if count > 0 else 'fewer'}"


def _short(value: Any) -> str:
    return repr(value)[:40] if type(value) in (*_NUMBERS, type(None)) else f"another {type(value).__name__}"


class SavedDict:
    """The entries of a dict, in order.

    Args:
        live: the dict, of any subclass; methods of the subclass are not called.
        step: format of an entry in a path, with ``{}`` for the key.
    """

    __slots__ = ("base", "live", "saved", "step")

    def __init__(self, live: dict[Any, Any], step: str = "[{!r}]") -> None:
        self.base: Any = OrderedDict if isinstance(live, OrderedDict) else dict
        self.live, self.step = live, step
        self.saved = dict(self.base.items(live)) if live else {}

    def parts(self) -> Iterator[Part]:
        """Yield the values."""
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
        """Return a new, missing or changed entry, or a change in length or order, or None."""
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
        """Return the entries added, removed or changed since."""
        if self._unchanged():
            return []
        live = dict(self.base.items(self.live))
        keys = [key for key in {**self.saved, **live} if live.get(key, MISSING) is not self.saved.get(key, MISSING)]
        return [Entry(self.live, key, self.saved.get(key, MISSING), live.get(key, MISSING)) for key in keys]

    def restore(self) -> None:
        """Restore the entries in their order."""
        if not self._unchanged():
            self.base.clear(self.live)
            for key, value in self.saved.items():
                self.base.__setitem__(self.live, key, value)


@contextmanager
def entries_as_after(entries: Sequence[Entry]) -> Iterator[None]:
    """Set entries to their values after the run for the block, and restore the dicts on exit.

    Entries set to another value since are skipped.
    """
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
        """Return the items."""
        return ((("[{}]", index), item) for index, item in enumerate(self.saved))

    def difference(self) -> Difference | None:
        """Return the change in length or the first changed item, or None."""
        if len(self.live) != len(self.saved):
            return "", items(len(self.live) - len(self.saved))
        for index, (now, then) in enumerate(zip(self.live, self.saved, strict=True)):
            if not _same(now, then):
                return f"[{index}]", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Restore the items."""
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
        """Return the elements."""
        return (("{…}", element) for element in self.saved)

    def difference(self) -> Difference | None:
        """Return the change in size, or a difference if there are other elements, or None."""
        if len(self.live) != len(self.saved):
            return "", items(len(self.live) - len(self.saved))
        return None if self.live == self.saved else ("", "other items")

    def restore(self) -> None:
        """Restore the elements."""
        set.clear(self.live)
        set.update(self.live, self.saved)


class SavedSlots:
    """Values of the ``__slots__`` of an object."""

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
        """Return the values of assigned slots."""
        return ((f".{name}", value) for name, _, value in self.saved if value is not MISSING)

    def difference(self) -> Difference | None:
        """Return the first slot with another value, or None."""
        for name, slot, then in self.saved:
            now = self._get(self.live, slot)
            if not _same(now, then):
                return f".{name}", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Set each slot to its saved value, or delete it."""
        for _, slot, then in self.saved:
            now = self._get(self.live, slot)
            if now is not then:
                slot.__delete__(self.live) if then is MISSING else slot.__set__(self.live, then)


class SavedCell:
    """Variable of an enclosing function, possibly rebound by ``nonlocal``."""

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
        """Return the value, if there is one."""
        return iter(()) if self.saved is MISSING else iter([("", self.saved)])

    def difference(self) -> Difference | None:
        """Return a difference if the variable is bound to another value, or None."""
        now = self._get(self.live)
        return None if _same(now, self.saved) else ("", f"{_short(now)}, was {_short(self.saved)}")

    def restore(self) -> None:
        """Bind the variable to its saved value, or unbind it."""
        if self.saved is MISSING:
            del self.live.cell_contents
        else:
            self.live.cell_contents = self.saved


class SavedNames:
    """Some names of a namespace: globals of a file, or attributes of a class.

    Args:
        owner: a dict of globals, or a class.
        names: the names used by a forward.
        title: the first part of paths.
    """

    __slots__ = ("live", "owner", "saved", "title")

    def __init__(self, owner: dict[str, Any] | type, names: Iterable[str], title: str) -> None:
        self.owner, self.title = owner, title
        self.live: Any = vars(owner) if isinstance(owner, type) else owner
        self.saved = {name: self.live.get(name, MISSING) for name in names}

    def parts(self) -> Iterator[Part]:
        """Return the values."""
        return ((f"{self.title}.{name}", value) for name, value in self.saved.items() if value is not MISSING)

    def difference(self) -> Difference | None:
        """Return the first name bound to another value, or None."""
        for name, then in self.saved.items():
            now = self.live.get(name, MISSING)
            if not _same(now, then):
                return f"{self.title}.{name}", f"{_short(now)}, was {_short(then)}"
        return None

    def restore(self) -> None:
        """Bind each name to its saved value, or remove it."""
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


# -- Saved contents of arrays -------------------------------------------------------------------------------


_ITERATORS = ("builtins", "itertools", "_collections")


class SavedArray:
    """The numbers in a numpy array, a ``bytearray`` or an ``array.array``."""

    __slots__ = ("live", "saved")

    def __init__(self, live: Any) -> None:
        self.live, self.saved = live, copy.copy(live)

    def parts(self) -> Iterable[Part]:
        """Return no parts."""
        return ()

    def difference(self) -> Difference | None:
        """Return a difference if the values have changed, or None."""
        if isinstance(self.live, (bytearray, array)):
            same = self.live == self.saved
        else:
            same = self.live.shape == self.saved.shape and self.live.tobytes() == self.saved.tobytes()
        return None if same else ("", "other values")

    def restore(self) -> str | None:
        """Restore the values, or return the reason for a failure."""
        if self.difference() is None:
            return None
        if not isinstance(self.live, (bytearray, array)) and self.live.shape != self.saved.shape:
            return "an array of another shape"
        self.live[slice(None) if isinstance(self.live, (bytearray, array)) else ...] = self.saved
        return None


class SavedRandom:
    """State of a random generator object."""

    __slots__ = ("live", "saved")

    def __init__(self, live: Any) -> None:
        self.live, self.saved = live, self._get(live)

    @staticmethod
    def _get(live: Any) -> Any:
        if isinstance(live, random.Random):
            return live.getstate()
        if hasattr(live, "bit_generator"):
            return live.bit_generator.state
        return live.get_state()

    def parts(self) -> Iterable[Part]:
        """Return no parts."""
        return ()

    def difference(self) -> Difference | None:
        """Return a difference if numbers were drawn, or None."""
        now = self._get(self.live)
        if isinstance(now, torch.Tensor):
            same = torch.equal(now, self.saved)
        else:
            same = pickle.dumps(now) == pickle.dumps(self.saved)
        return None if same else ("", "numbers were drawn")

    def restore(self) -> None:
        """Restore the state, to draw the same numbers again."""
        if isinstance(self.live, random.Random):
            self.live.setstate(self.saved)
        elif hasattr(self.live, "bit_generator"):
            self.live.bit_generator.state = self.saved
        else:
            self.live.set_state(self.saved)


class SavedIterator:
    """Position of an iterator or generator, for comparison only."""

    __slots__ = ("live", "saved")

    def __init__(self, live: Any) -> None:
        self.live, self.saved = live, self._get(live)

    @staticmethod
    def _get(live: Any) -> Any:
        frame = getattr(live, "gi_frame", None)
        if frame is None:
            return repr(live), operator.length_hint(live, -1)
        return frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()}

    def parts(self) -> Iterable[Part]:
        """Return no parts."""
        return ()

    def difference(self) -> Difference | None:
        """Return a difference if items were taken, or None."""
        return None if self._get(self.live) == self.saved else ("", "items were taken")

    def restore(self) -> str | None:
        """Return an error if items were taken, as an iterator cannot go back."""
        return None if self.difference() is None else "items were taken from an iterator"


class SavedCache:
    """The results kept by ``functools.lru_cache``, which cannot be put back one by one.

    Whether a result is in the cache makes no difference to who calls the function, except for a tensor: it may have no
    data, or no gradient.
    """

    __slots__ = ("live", "saved")

    def __init__(self, live: Any) -> None:
        self.live, self.saved = live, live.cache_info()

    def parts(self) -> Iterable[Part]:
        """Return no parts."""
        return ()

    def difference(self) -> Difference | None:
        """Return None."""
        return None

    def restore(self) -> None:
        """Empty the cache if it was empty and tensors were added, or if it has tensors without data."""
        if self.live.cache_info().misses == self.saved.misses:
            return
        kind = FakeTensor if self.saved.currsize else torch.Tensor
        if any(isinstance(kept, kind) for kept in named_tensors(gc.get_referents(self.live)).values()):
            self.live.cache_clear()


def saved(value: Any) -> Piece | None:
    """Save the contents of a container, array, random generator or iterator, or return None for any other object."""
    if isinstance(value, functools._lru_cache_wrapper):
        return SavedCache(value)
    if isinstance(value, dict):
        return SavedDict(value)
    if isinstance(value, (list, deque)):
        return SavedSequence(value)
    if isinstance(value, set):
        return SavedSet(value)
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, (bytearray, array)) or (numpy is not None and isinstance(value, numpy.ndarray)):
        return SavedArray(value)
    if isinstance(value, (random.Random, torch.Generator)):
        return SavedRandom(value)
    if numpy is not None and isinstance(value, (numpy.random.RandomState, numpy.random.Generator)):
        return SavedRandom(value)
    if isinstance(value, GeneratorType) or (isinstance(value, Iterator) and type(value).__module__ in _ITERATORS):
        return SavedIterator(value)
    return None
