"""Saved contents of arrays, random generators, iterators and caches, and of any container by its type."""

from __future__ import annotations

import copy
import functools
import gc
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

from fused.torch_internals.tensors import FakeTensor
from schedule.capture.snapshots.pieces import Difference, Part, Piece, SavedDict, SavedSequence, SavedSet
from schedule.util.named_values import named_tensors

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
