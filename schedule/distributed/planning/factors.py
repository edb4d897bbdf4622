"""What dimensions are made of: the factors that operations split, merge and equate.

A dimension is a list of factors, outermost first. ``view(b, s, heads, d)`` splits the factor of 32 features into one
of 4 heads and one of 8; an addition says that two dimensions have the same factors. Factors that are the same all
through a model can be shared out over ranks together: that is how the planner sees that q, k, v and the projection
after them belong together, whatever they are called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Dim = list["Factor"]


class Factor:
    """One factor of dimensions; equal ones are merged, and it may turn out to be made of several.

    Attributes:
        size: how large.
        blocked: why it cannot be shared out; "" if nothing is in the way.
        picked: parts of it are taken by position, such as q, k and v of one packed projection.
        repeated: the same data for each index, by ``expand``.
        leading: the first of it, where the rest is taken apart: queries of all heads before the one key and value.
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
        """The factor that this one was merged into."""
        found = self
        while found._merged is not None:
            found = found._merged
        if found is not self:
            self._merged = found
        return found

    def split(self, outer: int) -> None:
        """Make it two factors."""
        own = self.root()
        first, second = Factor(outer), Factor(own.size // outer)
        for part in (first, second):
            part.blocked, part.picked, part.repeated = own.blocked, own.picked, own.repeated
        own._parts = (first, second)

    def merge(self, other: Factor) -> None:
        """Make them one."""
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
        """The factors it is made of by now."""
        own = self.root()
        if own._parts is None:
            return [own]
        return [leaf for part in own._parts for leaf in part.leaves()]


def factors(dim: Iterable[Factor]) -> list[Factor]:
    """The factors of ``dim`` by now, outermost first."""
    return [leaf for factor in dim for leaf in factor.leaves()]


def has(dim: Iterable[Factor], factor: Factor) -> bool:
    """Whether ``factor`` is in ``dim``, or in what is leading there."""
    return any(one is factor or leads(one, factor) for one in factors(dim))


def leads(one: Factor, factor: Factor) -> bool:
    """Whether ``factor`` is in what is leading in ``one``."""
    return one.leading is not None and factor in one.leading.leaves()


def size_of(dim: Iterable[Factor]) -> int:
    """The size of a dimension."""
    return math.prod(factor.size for factor in dim)


def new_dim(size: int, blocked: str = "", repeated: bool = False) -> Dim:
    """A dimension of one factor, of none if it is 1."""
    return [] if size == 1 else [Factor(size, blocked, repeated)]


def block(dim: Iterable[Factor], why: str) -> None:
    """None of the factors can be shared out."""
    for factor in factors(dim):
        factor.blocked = factor.blocked or why


def lead(dim: Dim, size: int) -> Dim:
    """The first ``size`` of ``dim``, whose rest is taken apart; the same whenever it is asked for."""
    own = factors(dim)
    if len(own) != 1 or (own[0].leading is not None and own[0].leading.size != size):
        return new_dim(size, "a piece of a dimension")
    own[0].leading = own[0].leading or Factor(size)
    return [own[0].leading]


def equate(one: Dim, other: Dim, why: str = "sizes that do not divide each other meet") -> None:
    """Both dimensions have the same factors; where that cannot be, they are blocked."""
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
    """The outer factors of ``dim`` whose product is ``size``, and the rest; None if it cannot be divided so."""
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
