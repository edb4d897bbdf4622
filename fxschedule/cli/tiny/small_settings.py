"""Reduction of the settings of a constructor, such as those of diffusers, to those of a tiny model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fxschedule.cli.tiny.small_configs import shrink

MAX_UNCHANGED = 2

Settings = dict[str, Any]


def reduced(settings: Mapping[str, Any]) -> Iterator[Settings]:
    """Yield copies of ``settings`` with smaller sizes, the smallest first: all reduced, then all but one, but two.

    Tuples with one entry for each stage, which are several of the same length, keep their first and last entry. Sizes
    are reduced by their names as :func:`shrink` does, which keeps most relations between them. For other relations,
    some sizes have to stay as they are.
    """
    changes = _changes(settings)
    for count in range(MAX_UNCHANGED + 1):
        for unchanged in itertools.combinations(changes, count):
            yield {**settings, **{name: value for name, value in changes.items() if name not in unchanged}}


def _changes(settings: Mapping[str, Any]) -> Settings:
    lengths = Counter(len(value) for value in settings.values() if isinstance(value, tuple))
    ends = {
        name: [value[0], value[-1]] if len(value) > 2 and lengths[len(value)] > 1 else list(value)
        for name, value in settings.items()
        if isinstance(value, tuple)
    }
    small = shrink({**settings, **ends})
    found = {name: tuple(small[name]) if name in ends else small[name] for name in settings}
    return {name: value for name, value in found.items() if settings[name] not in (None, value)}
