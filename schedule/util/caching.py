"""Results that are kept for each class, as long as the class lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def cached_by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Cache the results of a function of a class, without keeping the class alive."""
    known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(cls: type) -> T:
        if cls not in known:
            known[cls] = function(cls)
        return known[cls]

    return cached
