"""Objects with containers of all kinds, for forwards to read and change, and a submodule that may change them."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


class Part:
    """An object in an object."""

    def __init__(self) -> None:
        self.items, self.n = [1, 2], 1


class Holder:
    """An object with containers of all kinds, changed by its methods."""

    def __init__(self) -> None:
        self.n = 1
        self.items, self.flags, self.tensors = [3, 2], {1: False, "a": 2}, [torch.ones(8), torch.full((8,), 2.0)]
        self.nested: list[Any] = [[1, 2], {"a": 1}]
        self.part, self.parts, self.pair = Part(), [Part()], ([1], 2)
        self.set, self.queue, self.bytes = {1, 2}, collections.deque([1, 2]), bytearray(b"ab")
        self.ordered, self.counts = collections.OrderedDict(a=1), collections.Counter("aab")
        self.default, self.user = collections.defaultdict(int, a=1), collections.UserList([1, 2])

    def change(self) -> None:
        """Change a number, a list and a dict."""
        self.n += 1
        self.items.append(9)
        self.flags[1] = not self.flags[1]

    def number(self) -> Any:
        """Return the number."""
        return self.n

    def own(self) -> list[int]:
        """Return the list itself."""
        return self.items

    def new(self) -> list[int]:
        """Return a new list."""
        return list(self.items)

    def several(self) -> tuple[int, ...]:
        """Return tuples of different lengths."""
        return (1, 2) if self.n == 1 else (1, 2, 3)

    def by_name(self) -> dict[str, int]:
        """Return dicts with different keys."""
        return {"p": 1, "q": 2} if self.n == 1 else {"p": 1}


class Acting(Holder):
    """An object whose special methods, called by Python, change it."""

    def __iter__(self) -> Any:
        self.items.append(1)
        return iter([1, 2])

    def __add__(self, other: int) -> int:
        self.items.append(1)
        return self.n + other

    def __float__(self) -> float:
        self.items.append(1)
        return float(self.n)

    def __bool__(self) -> bool:
        self.items.append(1)
        return self.n > 1

    def __str__(self) -> str:
        self.items.append(1)
        return "a" * self.n


@dataclasses.dataclass
class Record:
    """A dataclass with containers."""

    n: int = 1
    items: list[int] = dataclasses.field(default_factory=lambda: [3, 2])
    flags: dict[Any, Any] = dataclasses.field(default_factory=lambda: {1: False, "a": 2})
    tensors: list[Tensor] = dataclasses.field(default_factory=lambda: [torch.ones(8)])


class Child(nn.Module):
    """A submodule that may change what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), None

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        if self.change is not None:
            self.change(given)
        return self.linear(x)
