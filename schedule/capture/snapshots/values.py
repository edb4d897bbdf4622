"""Contents of arrays, random generators and iterators, and of any container by its kind."""

from __future__ import annotations

import copy
import operator
import pickle
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

import torch

from schedule.capture.snapshots.pieces import Difference, Part, Piece, SavedDict, SavedSequence, SavedSet

_ITERATORS = ("builtins", "itertools", "_collections")


class SavedArray:
    """The numbers in a numpy array, a ``bytearray`` or an ``array.array``."""

    __slots__ = ("live", "saved")

    def __init__(self, live: Any) -> None:
        self.live, self.saved = live, copy.copy(live)

    def parts(self) -> Iterable[Part]:
        """Nothing."""
        return ()

    def difference(self) -> Difference | None:
        """Whether it holds other numbers."""
        if isinstance(self.live, (bytearray, array)):
            same = self.live == self.saved
        else:
            same = self.live.shape == self.saved.shape and self.live.tobytes() == self.saved.tobytes()
        return None if same else ("", "other values")

    def restore(self) -> str | None:
        """Write the numbers back."""
        if self.difference() is None:
            return None
        if not isinstance(self.live, (bytearray, array)) and self.live.shape != self.saved.shape:
            return "an array of another shape"
        self.live[slice(None) if isinstance(self.live, (bytearray, array)) else ...] = self.saved
        return None


class SavedRandom:
    """The state of a random generator that somebody holds."""

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
        """Nothing."""
        return ()

    def difference(self) -> Difference | None:
        """Whether numbers were drawn."""
        now = self._get(self.live)
        if isinstance(now, torch.Tensor):
            same = torch.equal(now, self.saved)
        else:
            same = pickle.dumps(now) == pickle.dumps(self.saved)
        return None if same else ("", "numbers were drawn")

    def restore(self) -> None:
        """Let it draw the same numbers again."""
        if isinstance(self.live, random.Random):
            self.live.setstate(self.saved)
        elif hasattr(self.live, "bit_generator"):
            self.live.bit_generator.state = self.saved
        else:
            self.live.set_state(self.saved)


class SavedIterator:
    """How far an iterator or generator has come; it cannot go back."""

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
        """Nothing."""
        return ()

    def difference(self) -> Difference | None:
        """Whether items were taken."""
        return None if self._get(self.live) == self.saved else ("", "items were taken")

    def restore(self) -> str | None:
        """Only tell whether items were taken."""
        return None if self.difference() is None else "items were taken from an iterator"


def saved(value: Any) -> Piece | None:
    """The contents of a container, array, random generator or iterator; None for any other object."""
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
