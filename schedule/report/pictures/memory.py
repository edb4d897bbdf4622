"""Bytes kept for backward by each module, before and after the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedule.primitives.activations.saved import SavedBytes, measure_saved
from schedule.report.comparing import refuse_sharded, trains
from schedule.report.costs import training
from schedule.util.errors import NotApplicable
from schedule.util.wording import size_text
from schedule.verify.bisection import undone

if TYPE_CHECKING:
    from schedule.core.node import Node


@dataclass(frozen=True)
class Bar:
    """Bytes kept for backward in one module, or in several similar ones together.

    Attributes:
        label: path of the module or modules.
        before: bytes without the schedule; None if it has no steps.
        after: bytes now.
        most: bytes of the whole model, for the length of the bars.
    """

    label: str
    before: int | None
    after: int
    most: int

    @property
    def text(self) -> str:
        """Sizes before and after, with units."""
        return size_text(self.after) if self.before is None else f"{size_text(self.before)} → {size_text(self.after)}"

    @property
    def ratio(self) -> str:
        """Ratio of after to before."""
        return f"{self.after / self.before:.2f} ×" if self.before else ""

    @property
    def widths(self) -> tuple[float | None, float]:
        """Lengths of the bars before and after, in per cent."""
        before = None if self.before is None else 100 * self.before / max(self.most, 1)
        return before, 100 * self.after / max(self.most, 1)


class Memory:
    """Bytes kept for backward by the modules of a model in one training step.

    Empty if they cannot be measured; ``missing`` is then the reason.
    """

    def __init__(self, after: SavedBytes | None, before: SavedBytes | None, missing: str = "") -> None:
        self.after, self.before, self.missing = after, before, missing

    def of(self, paths: Iterable[str]) -> tuple[int | None, int] | None:
        """Return the bytes (before, after) of the modules at ``paths`` together, or None if not called."""
        paths = list(paths)
        if self.after is None or not any(path in self.after.modules for path in paths):
            return None
        return None if self.before is None else _together(self.before, paths), _together(self.after, paths)


def _together(saved: SavedBytes, paths: Iterable[str]) -> int:
    storages: dict[int, int] = {}
    for path in paths:
        if path in saved.modules:
            storages |= saved.modules[path].saved
    return sum(storages.values())


def memory_of(sch: Node) -> Memory:
    """Measure one training forward of the model of ``sch``, with its steps and without.

    The model and its steps are restored.
    """
    top = sch.root
    try:
        refuse_sharded(top)
        with trains():
            after = _measured(top)
            if not top.history:
                return Memory(after, None)
            with undone(top):
                return Memory(after, _measured(top))
    except NotApplicable as error:
        return Memory(None, None, error.why)


def _measured(top: Node) -> SavedBytes:
    with training(top.module):
        return measure_saved(top.module, top.tree.graphs.batch)
