"""``match`` statements with every kind of pattern, and subjects for them."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Setting:
    def __init__(self, mode: str = "x", k: float = 1.5) -> None:
        self.mode, self.k = mode, k


@dataclass
class Point:
    x: float
    y: float
    tags: list[str] = field(default_factory=list)


@dataclass
class Point3(Point):
    z: float = 0.0


class Pair(NamedTuple):
    first: int
    second: int


class Keyed:
    """Positional patterns by a name that a test changes."""

    __match_args__: tuple[str, ...] = ("one",)

    def __init__(self) -> None:
        self.one, self.two = 2.0, 3.0


class Odd:
    """Attributes that are computed."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def is_odd(self) -> bool:
        return self.number % 2 == 1

    @property
    def failing(self) -> int:
        raise AttributeError("no")


class Row(Sequence[Any]):
    """A sequence of the user's."""

    def __init__(self, *content: Any) -> None:
        self.content = list(content)

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, index: Any) -> Any:
        return self.content[index]


class Table(Mapping[str, Any]):
    """A mapping of the user's."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)


class Names:
    A = "x"
    ONE = 1


def by_class(m: Any) -> Any:
    match m.subject:
        case Setting(mode="x"):
            return 2
        case _:
            return 7


def by_captured_attribute(m: Any) -> Any:
    match m.subject:
        case Setting(k=k):
            return k
    return 7


def by_value(m: Any) -> Any:
    match m.subject:
        case Names.A:
            return 2
        case _:
            return 7


def by_none(m: Any) -> Any:
    match m.subject:
        case None:
            return 2
        case _:
            return 7


def by_truth(m: Any) -> Any:
    match m.subject:
        case True:
            return 2
        case False:
            return 3
        case 1:
            return 4
        case _:
            return 7


def by_point(m: Any) -> Any:
    match m.subject:
        case Point3(x, y, z=z) if z:
            return x + y + z
        case Point(x, y, ["scaled", *_] | ("scaled", _)):
            return x * y
        case Point(0.0 | 1.0 as x, y=y):
            return 10 + x + y
        case Point(x=x):
            return x
        case Keyed(one):
            return one
        case Odd(is_odd=True, number=n):
            return n + 0.5
        case Odd(failing=_) | Odd(missing=_):
            return -1
        case Odd():
            return 6
    return 7


def by_sequence(m: Any) -> Any:
    match m.subject:
        case []:
            return 2
        case [1]:
            return 3
        case [a, 2 | 3 as b]:
            return a + b
        case ["mean", [scale, *others]]:
            return scale + len(others)
        case [first, *middle, -1]:
            return first + sum(middle) + 0.25
        case Pair(a, b):
            return a - b
        case (a, _, *_) if isinstance(a, int) and a > 3:
            return a
        case [*all_of_it]:
            return len(all_of_it) + 0.125
        case str() | bytes():
            return 4
    return 7


def by_mapping(m: Any) -> Any:
    match m.subject:
        case {"type": "scale", "by": float(k) | int(k)}:
            return k
        case {"type": Names.A, **rest} if len(rest) == 2:
            return sum(rest.values())
        case {"deep": {"er": [k, *_]}}:
            return k
        case {Names.A: k}:
            return k
        case {}:
            return 5
    return 7


def by_builtin_class(m: Any) -> Any:
    match m.subject:
        case bool(b):
            return 2 if b else 3
        case int(n) | float(n) if n > 2:
            return n
        case int() | float():
            return 4
        case str(text):
            return len(text)
        case Color.RED:
            return 5
        case Color():
            return 6
        case nn.ReLU(inplace=flag):
            return 8 if flag else 9
        case nn.Module():
            return 10
        case dict(d):
            return len(d) + 11
        case list() | tuple() as items:
            return len(items) + 12
    return 7


def by_captures_of_guards(m: Any) -> Any:
    """Names stay bound where a guard fails, and where a pattern fails they are not."""
    found = a = None
    match m.subject:
        case [a, 1, 2]:
            return 2
        case [found, *_] if found is None:
            return 3
        case _:
            pass
    return (found + 2 if isinstance(found, (int, float)) else 1) + (0 if a is None else 100)


def by_local_values(m: Any) -> Any:
    """A subject that the forward makes, of parts that it does not."""
    total = 0
    for each in m.subject if isinstance(m.subject, list) else [m.subject]:
        match each, len(m.items):
            case (Setting(k=k), 2):
                total += k
            case (int(n), size) if size:
                total += n * size
            case _:
                total += 1
    return total


SUBJECTS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "1": lambda: 1,
    "1.0": lambda: 1.0,
    "4": lambda: 4,
    "2.5": lambda: 2.5,
    "x": lambda: "x",
    "text": lambda: "text",
    "bytes": lambda: b"text",
    "red": lambda: Color.RED,
    "blue": lambda: Color.BLUE,
    "setting": Setting,
    "other setting": lambda: Setting("y", 3.0),
    "point": lambda: Point(2.0, 3.0),
    "scaled point": lambda: Point(2.0, 3.0, ["scaled", "again"]),
    "point at 1": lambda: Point(1.0, 3.0),
    "point of three": lambda: Point3(2.0, 3.0, [], 4.0),
    "flat point of three": lambda: Point3(2.0, 3.0),
    "keyed": Keyed,
    "odd": lambda: Odd(3),
    "even": lambda: Odd(4),
    "[]": lambda: [],
    "()": lambda: (),
    "[1]": lambda: [1],
    "[4, 2]": lambda: [4, 2],
    "(4, 3)": lambda: (4, 3),
    "(4, 4)": lambda: (4, 4),
    "pair": lambda: Pair(9, 5),
    "mean": lambda: ["mean", [2.0, "a", "b"]],
    "mean of nothing": lambda: ["mean", []],
    "[1, 2, 3, -1]": lambda: [1, 2, 3, -1],
    "[5, 1, 1]": lambda: [5, 1, 1],
    "[1, 1, 2]": lambda: [1, 1, 2],
    "deque": lambda: collections.deque([4, 3]),
    "row": lambda: Row(4, 3),
    "long row": lambda: Row(1, 2, -1),
    "{}": dict,
    "scale": lambda: {"type": "scale", "by": 3},
    "scale by text": lambda: {"type": "scale", "by": "3"},
    "rest": lambda: {"type": "x", "a": 1, "b": 2},
    "deep": lambda: {"deep": {"er": (3, 4)}},
    "keyed by a constant": lambda: {"x": 4},
    "table": lambda: Table(type="scale", by=3),
    "table with rest": lambda: Table(type="x", a=1, b=2),
    "mapping proxy": lambda: types.MappingProxyType({"type": "scale", "by": 3}),
    "ordered": lambda: collections.OrderedDict(type="x", a=1, b=2),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "list of settings": lambda: [Setting(), 3, "x"],
}
MATCHES = [
    by_class, by_captured_attribute, by_value, by_none, by_truth, by_point, by_sequence, by_mapping, by_builtin_class,
    by_captures_of_guards, by_local_values,
]  # fmt: skip
