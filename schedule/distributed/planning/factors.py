"""Factors of tensor dimensions, as operations split, merge and equate them.

A dimension is a list of factors, outermost first. ``view(b, s, heads, d)`` splits the factor of 32 features into one
of 4 heads and one of 8; an addition gives two dimensions the same factors. A factor that is the same throughout a
model can be sharded over the ranks everywhere at once: this is how the planner recognizes that q, k, v and the
projection after them belong together, regardless of their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Dim = list["Factor"]


class Factor:
    """One factor of one or more dimensions.

    Equal factors are merged, and a factor can be split into several later.

    Attributes:
        size: the number of elements.
        blocked: why it cannot be sharded; "" if it can.
        picked: whether parts of it are selected by position, such as q, k and v of one packed projection.
        repeated: whether every index has the same data, as after ``expand`` or ``repeat_interleave``.
        leading: its first part if the rest is split off, such as the queries of all heads before the one key and value;
            None otherwise.
    """

    __slots__ = ("_merged", "_parts", "blocked", "leading", "picked", "repeated", "size")

    def __init__(self, size: int, blocked: str = "", repeated: bool = False) -> None:
        self.size, self.blocked, self.picked, self.repeated = size, blocked, False, repeated
        self.leading: Factor | None = None
        self._merged: Factor | None = None
        self._parts: tuple[Factor, Factor] | None = None

    def __repr__(self) -> str:
        return f"{self.size}{'!' if self.blocked else ''}"

    def root(self) -> Factor:
        """Follow the merges and return the resulting factor."""
        found = self
        while found._merged is not None:
            found = found._merged
        if found is not self:
            self._merged = found
        return found

    def split(self, outer: int) -> None:
        """Split the factor into two, the first of size ``outer``."""
        own = self.root()
        first, second = Factor(outer), Factor(own.size // outer)
        for part in (first, second):
            part.blocked, part.picked, part.repeated = own.blocked, own.picked, own.repeated
        own._parts = (first, second)

    def merge(self, other: Factor) -> None:
        """Merge ``other`` into this factor."""
        one, two = self.root(), other.root()
        if one is two:
            return
        two._merged = one
        one.blocked = one.blocked or two.blocked
        one.picked = one.picked or two.picked
        one.repeated = one.repeated or two.repeated
        if one.leading is None or two.leading is None:
            one.leading = one.leading or two.leading
        else:
            equate([one.leading], [two.leading])

    def leaves(self) -> list[Factor]:
        """Return the leaf factors after all splits so far."""
        own = self.root()
        if own._parts is None:
            return [own]
        return [leaf for part in own._parts for leaf in part.leaves()]


def factors(dim: Iterable[Factor]) -> list[Factor]:
    """Return the current factors of ``dim``, outermost first."""
    return [leaf for factor in dim for leaf in factor.leaves()]


def has(dim: Iterable[Factor], factor: Factor) -> bool:
    """Check whether ``factor`` is in ``dim`` or in the leading part of one of its factors."""
    return any(one is factor or leads(one, factor) for one in factors(dim))


def leads(one: Factor, factor: Factor) -> bool:
    """Check whether ``factor`` is in the leading part of ``one``."""
    return one.leading is not None and factor in one.leading.leaves()


def size_of(dim: Iterable[Factor]) -> int:
    """Return the size of a dimension."""
    return math.prod(factor.size for factor in dim)


def new_dim(size: int, blocked: str = "", repeated: bool = False) -> Dim:
    """Return a dimension of one new factor, or of no factors if ``size`` is 1."""
    return [] if size == 1 else [Factor(size, blocked, repeated)]


def block(dim: Iterable[Factor], why: str) -> None:
    """Mark every factor of ``dim`` as impossible to shard, for the reason ``why``."""
    for factor in factors(dim):
        factor.blocked = factor.blocked or why


def lead(dim: Dim, size: int) -> Dim:
    """Return the first ``size`` elements of ``dim`` as a dimension, the same one on every call.

    If ``dim`` has several factors, or a leading part of another size, return a new blocked dimension.
    """
    own = factors(dim)
    if len(own) != 1 or (own[0].leading is not None and own[0].leading.size != size):
        return new_dim(size, "a piece of a dimension")
    own[0].leading = own[0].leading or Factor(size)
    return [own[0].leading]


def equate(one: Dim, other: Dim, why: str = "sizes that do not divide each other meet") -> None:
    """Give both dimensions the same factors, or block them if their sizes do not match."""
    while True:
        ours, theirs = factors(one), factors(other)
        for a, b in zip(ours, theirs, strict=False):
            if a is b:
                continue
            if a.size == b.size:
                a.merge(b)
            elif a.size % b.size == 0:
                a.split(b.size)
            elif b.size % a.size == 0:
                b.split(a.size)
            else:
                block([*one, *other], why)
                return
            break
        else:
            if len(ours) != len(theirs):
                block([*one, *other], why)
            return


def take(dim: Dim, size: int) -> tuple[Dim, Dim] | None:
    """Split ``dim`` into outer factors with the product ``size`` and the rest, or return None if it cannot be split."""
    taken: Dim = []
    rest = factors(dim)
    while size > 1:
        if not rest:
            return None
        first = rest[0]
        if size % first.size == 0:
            size //= first.size
            taken.append(rest.pop(0))
        elif first.size % size == 0:
            first.split(size)
            rest[:1] = first.leaves()
        else:
            return None
    return taken, rest
