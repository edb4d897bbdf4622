"""What there is to choose from: the knobs of a schedule function, and the values of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from schedule.util.errors import NotApplicable

Knobs = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One of some values; made by :func:`choice`.

    Attributes:
        values: what there is. Numbers that rise or fall are searched as a scale, anything else as names.
        when: knob → value, or list of values, that it must have for this one to matter.
    """

    values: tuple[Any, ...]
    when: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """Whether neighbors are alike."""
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values):
            return False
        return list(self.values) in (sorted(self.values), sorted(self.values, reverse=True))

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self.values)

    def describe(self) -> Any:
        """As JSON: what makes it the same knob in another process."""
        return {"choice": [text_of(value) for value in self.values], **_when(self.when)}


@dataclass(frozen=True)
class Number:
    """A number in a range; made by :func:`number`.

    Attributes:
        low: the smallest.
        high: the largest.
        log: whether twice as much matters as much anywhere in the range.
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
        """How many values there are."""
        return self.high - self.low + 1 if self.whole else math.inf

    def describe(self) -> Any:
        """As JSON: what makes it the same knob in another process."""
        return {"number": [self.low, self.high], "log": self.log, **_when(self.when)}


Knob = Choice | Number
Suggest = Callable[[str, Knob], Any]


def choice(*values: Any, when: Mapping[str, Any] | None = None) -> Choice:
    """A knob that is one of ``values``; a list in a space is short for it.

    Args:
        values: anything. Numbers that rise or fall are searched as a scale, anything else as names.
        when: ``{"checkpointing": "every"}``: only where that knob has this value, or one of a list of values;
            elsewhere this one is None.

    Raises:
        NotApplicable: there are no values, or two are the same.
    """
    if not values:
        raise NotApplicable("a choice has at least one value", fix='choice("default", "memory")')
    if len({text_of(value) for value in values}) < len(values):
        raise NotApplicable(f"two values of choice{values!r} are the same", fix="leave one out")
    return Choice(values, dict(when or {}))


def number(low: int | float, high: int | float, log: bool = False, when: Mapping[str, Any] | None = None) -> Number:
    """A knob that is a number from ``low`` to ``high``; an integer if both are.

    Args:
        low: the smallest.
        high: the largest.
        log: on a logarithmic scale, as for bytes.
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
    """A knob for sharing ``ranks`` out: tuples of ``ways`` numbers whose product divides it.

    ::

        splits(4)     # tensor parallel, pipeline: (1, 1) (1, 2) (1, 4) (2, 1) (2, 2) (4, 1); the rest, data parallel

    Args:
        ranks: how many devices there are.
        ways: how many kinds of parallelism share them.
        when: as for :func:`choice`.
    """
    found: list[tuple[int, ...]] = [()]
    for _ in range(ways):
        found = [(*split, n) for split in found for n in range(1, ranks + 1) if ranks % (math.prod(split) * n) == 0]
    return choice(*found, when=when)


class Space:
    """The knobs, in the order in which they are chosen.

    Args:
        declared: name → a knob, or a list of values.

    Raises:
        NotApplicable: there are none, one is neither, or one depends on a knob that does not come before it.
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
        """A value for each knob, by ``suggest``; None for those that do not matter."""
        drawn: Knobs = {}
        for name, knob in self.knobs.items():
            drawn[name] = suggest(name, knob) if self._matters(knob, drawn) else None
        return drawn

    def _matters(self, knob: Knob, drawn: Knobs) -> bool:
        return all(drawn[other] in _any_of(value) for other, value in knob.when.items())

    @property
    def size(self) -> float:
        """At most so many points; fewer if some knobs matter only sometimes."""
        return math.prod(knob.size for knob in self.knobs.values())

    def points(self) -> Iterator[Knobs]:
        """Every point of a finite space."""
        found: list[Knobs] = [{}]
        for name, knob in self.knobs.items():
            found = [
                {**point, name: value}
                for point in found
                for value in (_values(knob) if self._matters(knob, point) else (None,))
            ]
        yield from found

    def describe(self) -> dict[str, Any]:
        """As JSON: what makes it the same space in another process."""
        return {name: knob.describe() for name, knob in self.knobs.items()}


def _values(knob: Knob) -> tuple[Any, ...]:
    return knob.values if isinstance(knob, Choice) else tuple(range(int(knob.low), int(knob.high) + 1))


def text_of(value: Any) -> str:
    """A value of a knob as text, the same in every process."""
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)


def _any_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _when(when: Mapping[str, Any]) -> dict[str, Any]:
    return {"when": {name: list(map(text_of, _any_of(value))) for name, value in when.items()}} if when else {}
