"""Search space: the knobs of a schedule function, and the values of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from schedule.util.errors import NotApplicable

Knobs = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """Knob with a list of values, made by :func:`choice`.

    Attributes:
        values: all values. Increasing or decreasing numbers are searched as a scale, others as unordered names.
        when: knob → value, or list of values, that it must have for this one to matter.
    """

    values: tuple[Any, ...]
    when: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """Whether neighboring values are similar."""
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values):
            return False
        return list(self.values) in (sorted(self.values), sorted(self.values, reverse=True))

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.values)

    def describe(self) -> Any:
        """Describe the knob as JSON, to compare it with the knob of another process."""
        return {"choice": [text_of(value) for value in self.values], **_when(self.when)}


@dataclass(frozen=True)
class Number:
    """Knob with a number in a range, made by :func:`number`.

    Attributes:
        low: the smallest value.
        high: the largest value.
        log: whether the scale is logarithmic.
        when: knob → value, or list of values, that it must have for this one to matter.
    """

    low: int | float
    high: int | float
    log: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it is an integer."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """Number of values."""
        return self.high - self.low + 1 if self.whole else math.inf

    def describe(self) -> Any:
        """Describe the knob as JSON, to compare it with the knob of another process."""
        return {"number": [self.low, self.high], "log": self.log, **_when(self.when)}


Knob = Choice | Number
Suggest = Callable[[str, Knob], Any]


def choice(*values: Any, when: Mapping[str, Any] | None = None) -> Choice:
    """Return a knob with one of ``values``, in a space also written as a list.

    Args:
        values: anything. Increasing or decreasing numbers are searched as a scale, others as unordered names.
        when: ``{"checkpointing": "every"}``: the knob only matters if that knob has this value, or one of a list of
            values; otherwise this knob is None.

    Raises:
        NotApplicable: there are no values, or two are the same.
    """
    if not values:
        raise NotApplicable("a choice has at least one value", fix='choice("default", "memory")')
    if len({text_of(value) for value in values}) < len(values):
        raise NotApplicable(f"two values of choice{values!r} are the same", fix="leave one out")
    return Choice(values, dict(when or {}))


def number(low: int | float, high: int | float, log: bool = False, when: Mapping[str, Any] | None = None) -> Number:
    """Return a knob with a number from ``low`` to ``high``, an integer if both are.

    Args:
        low: the smallest value.
        high: the largest value.
        log: whether to search on a logarithmic scale, as for bytes.
        when: as for :func:`choice`.

    Raises:
        NotApplicable: ``low`` is above ``high``, or a logarithmic range begins at or below zero.
    """
    if not low <= high:
        raise NotApplicable(f"a number from {low} to {high} does not exist", fix="give the smaller one first")
    if log and low <= 0:
        raise NotApplicable(f"a logarithmic range begins above zero, not at {low}", fix="log=False, or a larger low")
    return Number(low, high, log, dict(when or {}))


def splits(ranks: int, ways: int = 2, when: Mapping[str, Any] | None = None) -> Choice:
    """Return a knob for splitting ``ranks``: all tuples of ``ways`` numbers with a product dividing ``ranks``.

    ::

        splits(4)     # tensor parallel, pipeline: (1, 1) (1, 2) (1, 4) (2, 1) (2, 2) (4, 1); the rest, data parallel

    Args:
        ranks: number of devices.
        ways: number of types of parallelism to split them into.
        when: as for :func:`choice`.
    """
    found: list[tuple[int, ...]] = [()]
    for _ in range(ways):
        found = [(*split, n) for split in found for n in range(1, ranks + 1) if ranks % (math.prod(split) * n) == 0]
    return choice(*found, when=when)


class Space:
    """All knobs, in the order of their choice.

    Args:
        declared: name → a knob, or a list of values.

    Raises:
        NotApplicable: there are no knobs, an entry is neither a knob nor a list, or a knob depends on one that is not
            declared before it.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self.knobs: dict[str, Knob] = {}
        for name, knob in declared.items():
            self.knobs[name] = self._knob(name, knob)
        if not self.knobs:
            raise NotApplicable("there is nothing to tune: the space is empty", fix='space={"every": [0, 2, 1]}')

    def _knob(self, name: str, declared: Any) -> Knob:
        knob = choice(*declared) if isinstance(declared, list | tuple) else declared
        if not isinstance(knob, Choice | Number):
            raise NotApplicable(
                f"the knob {name!r} is {declared!r}", fix="give a list, schedule.choice(…) or schedule.number(…)"
            )
        for other, value in knob.when.items():
            earlier = self.knobs.get(other)
            never = [one for one in _any_of(value) if not isinstance(earlier, Choice) or one not in earlier.values]
            if never:
                raise NotApplicable(
                    f"the knob {name!r} depends on {other} = {never[0]!r}, which is never so when it is chosen",
                    fix=f"declare {other!r} before it, as a choice that has this value",
                )
        return knob

    def draw(self, suggest: Suggest) -> Knobs:
        """Draw a value for each knob by ``suggest``, or None for knobs without effect."""
        drawn: Knobs = {}
        for name, knob in self.knobs.items():
            drawn[name] = suggest(name, knob) if self._matters(knob, drawn) else None
        return drawn

    def _matters(self, knob: Knob, drawn: Knobs) -> bool:
        return all(drawn[other] in _any_of(value) for other, value in knob.when.items())

    @property
    def size(self) -> float:
        """Upper bound on the number of points, exact if every knob always matters."""
        return math.prod(knob.size for knob in self.knobs.values())

    def points(self) -> Iterator[Knobs]:
        """Yield every point of a finite space."""
        found: list[Knobs] = [{}]
        for name, knob in self.knobs.items():
            found = [
                {**point, name: value}
                for point in found
                for value in (_values(knob) if self._matters(knob, point) else (None,))
            ]
        yield from found

    def describe(self) -> dict[str, Any]:
        """Describe the space as JSON, to compare it with the space of another process."""
        return {name: knob.describe() for name, knob in self.knobs.items()}


def _values(knob: Knob) -> tuple[Any, ...]:
    return knob.values if isinstance(knob, Choice) else tuple(range(int(knob.low), int(knob.high) + 1))


def text_of(value: Any) -> str:
    """Format a value of a knob as a string, the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)


def _any_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _when(when: Mapping[str, Any]) -> dict[str, Any]:
    return {"when": {name: list(map(text_of, _any_of(value))) for name, value in when.items()}} if when else {}
