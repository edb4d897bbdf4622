"""Which modules to compute again so that what is kept fits a number of bytes, at the least work.

A knapsack on the tree of modules: for each module, either it is computed again as a whole, or its parts decide.
Every subtree hands up the choices of which none keeps fewer bytes for less work (a Pareto front); fronts of parts are
added up. That is exact up to a thousandth of all bytes, as long as bytes add up. Storages that several modules share
make them not add up quite, so the choice is counted anew, exactly, and made again with what is missing added to the
goal, until it fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from schedule.primitives.activations.saved import SavedBytes

_STEPS = 1000


@dataclass(frozen=True)
class Choice:
    """Modules to compute again: bytes freed, and work added."""

    freed: int = 0
    work: float = 0.0
    paths: tuple[str, ...] = ()

    def __add__(self, other: Choice) -> Choice:
        return Choice(self.freed + other.freed, self.work + other.work, self.paths + other.paths)


class OutOfBudget(Exception):
    """Not even computing all again frees enough.

    Args:
        least: bytes kept at least.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} bytes are kept")
        self.least = least


def choose(seen: SavedBytes, budget: int, candidates: Collection[str]) -> tuple[str, ...]:
    """Paths of the modules to compute again, none inside another; none if all fits as it is.

    Args:
        seen: the measured forward.
        budget: bytes that may be kept.
        candidates: paths to choose from.

    Raises:
        OutOfBudget: that cannot be reached.
    """
    tree = _Tree(seen, candidates)
    whole = seen.kept()
    goal = whole - budget
    if goal <= 0:
        return ()
    front = tree.front()
    least = whole
    while True:
        reaching = [choice for choice in front if choice.freed >= goal]
        if not reaching:
            break
        best = min(reaching, key=lambda choice: (choice.work, -choice.freed))
        kept = seen.kept(frozenset(best.paths))
        least = min(least, kept)
        if kept <= budget:
            return best.paths
        goal = max(best.freed + 1, goal + kept - budget)
    raise OutOfBudget(least)


class _Tree:
    """The candidates, each with those right below it."""

    def __init__(self, seen: SavedBytes, candidates: Collection[str]) -> None:
        self.seen, self.whole = seen, seen.kept()
        paths = sorted(path for path in candidates if path in seen.modules and seen.modules[path].saved)
        self.below: dict[str, list[str]] = {path: [] for path in paths}
        self.top: list[str] = []
        for path in paths:
            above = [other for other in paths if path.startswith(f"{other}.") or (other == "" and path)]
            (self.below[max(above, key=len)] if above else self.top).append(path)
        self.step = max(1, self.whole // _STEPS)

    def front(self) -> list[Choice]:
        return self._added(self.top)

    def _added(self, paths: Iterable[str]) -> list[Choice]:
        total = [Choice()]
        for path in paths:
            own = self._of(path)
            total = self._pruned(left + right for left in total for right in own)
        return total

    def _of(self, path: str) -> list[Choice]:
        freed = self.whole - self.seen.kept(frozenset([path]))
        parts = self._added(self.below[path])
        if freed <= 0:
            return parts
        return self._pruned([*parts, Choice(freed, self.seen.modules[path].work, (path,))])

    def _pruned(self, choices: Iterable[Choice]) -> list[Choice]:
        """Of those that free about as much, the one of least work; none that frees less for more work."""
        best: dict[int, Choice] = {}
        for choice in choices:
            known = best.get(choice.freed // self.step)
            if known is None or (choice.work, -choice.freed) < (known.work, -known.freed):
                best[choice.freed // self.step] = choice
        front: list[Choice] = []
        for _, choice in sorted(best.items(), reverse=True):
            if not front or choice.work < front[-1].work:
                front.append(choice)
        return front[::-1]
