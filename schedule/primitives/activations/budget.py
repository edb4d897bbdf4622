"""Choice of the modules to recompute with the least work, for saved tensors to fit a number of bytes.

A knapsack on the tree of modules: each module is either recomputed as a whole, or its parts decide. Every subtree
returns a Pareto front of choices (bytes freed, work added), and the fronts of sibling modules are combined by
addition. The result is exact up to a thousandth of all bytes if the bytes of modules are additive. Storages shared by
several modules are not, so the bytes of the best choice are counted exactly. If they exceed the budget, the goal is
raised by the excess and the choice is made again, until it fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from schedule.primitives.activations.saved import SavedBytes

_STEPS = 1000


@dataclass(frozen=True)
class Choice:
    """Modules to recompute, with the bytes freed and the work added."""

    freed: int = 0
    work: float = 0.0
    paths: tuple[str, ...] = ()

    def __add__(self, other: Choice) -> Choice:
        return Choice(self.freed + other.freed, self.work + other.work, self.paths + other.paths)


class OutOfBudget(Exception):
    """Error for a budget out of reach even with all candidates recomputed.

    Args:
        least: the smallest number of saved bytes that was reached.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"at least {least} bytes are saved")
        self.least = least


def choose(seen: SavedBytes, budget: int, candidates: Collection[str]) -> tuple[str, ...]:
    """Return the paths of the modules to recompute, none inside another.

    The result is empty if everything fits without recomputation.

    Args:
        seen: the measured forward.
        budget: bytes that may be saved.
        candidates: paths to choose from.

    Raises:
        OutOfBudget: the budget cannot be reached.
    """
    tree = _Tree(seen, candidates)
    whole = seen.saved()
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
        saved = seen.saved(frozenset(best.paths))
        least = min(least, saved)
        if saved <= budget:
            return best.paths
        goal = max(best.freed + 1, goal + saved - budget)
    raise OutOfBudget(least)


class _Tree:
    """Tree of the candidates, each with its nearest candidates below."""

    def __init__(self, seen: SavedBytes, candidates: Collection[str]) -> None:
        self.seen, self.whole = seen, seen.saved()
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
        freed = self.whole - self.seen.saved(frozenset([path]))
        parts = self._added(self.below[path])
        if freed <= 0:
            return parts
        return self._pruned([*parts, Choice(freed, self.seen.modules[path].work, (path,))])

    def _pruned(self, choices: Iterable[Choice]) -> list[Choice]:
        """Keep the choice of least work per size step, and drop dominated choices."""
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
