"""Pictures of a schedule as one page: modules, graphs, memory, pipeline stages and shards."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from schedule.distributed.tensor_parallel.sharded_modules import is_sharded
from schedule.distributed.tensor_parallel.state import sharded_state
from schedule.report.pictures.grids import sharding, stages
from schedule.report.pictures.memory import Bar, Memory, memory_of
from schedule.report.pictures.module_pictures import Branch, Pictures, tree_of
from schedule.report.pictures.paths import ranged
from schedule.util.files import write
from schedule.util.templating import rendered

if TYPE_CHECKING:
    from schedule.capture import Recording
    from schedule.core.node import Node
    from schedule.report.costs import TimeRatio
    from schedule.report.entries import Entry

_SMALLEST_BAR, _OPEN_ROWS = 0.02, 40


@dataclass(frozen=True)
class Page:
    """Self-contained HTML page about a schedule, displayed inline in a notebook.

    Attributes:
        html: the document.
        title: its title.
    """

    html: str
    title: str

    def save(self, path: str | Path) -> None:
        """Write the page to ``path`` atomically.

        Raises:
            NotApplicable: it cannot be written there.
        """
        write(Path(path), self.html)

    def _repr_html_(self) -> str:
        inside = html.escape(self.html, quote=True)
        style, title = "width: 100%; height: 85vh; border: 1px solid #8884", html.escape(self.title)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts" style="{style}" title="{title}"></iframe>'

    def __repr__(self) -> str:
        return f"Page({self.title!r}, {len(self.html) / 1000:.0f} kB of HTML; save(path) writes it)"


@dataclass(frozen=True)
class _Shown:
    """A branch with the values for the template."""

    branch: Branch
    id: int
    title: str
    saved: Bar | None
    children: list[_Shown]

    def __getattr__(self, name: str) -> object:
        return getattr(self.branch, name)

    def all(self) -> Iterator[_Shown]:
        """Yield it and all branches below."""
        yield self
        for child in self.children:
            yield from child.all()


def section(sch: Node, entries: Sequence[Entry], timing: TimeRatio | None = None) -> Markup:
    """Render the pictures of ``sch`` as part of a page.

    Args:
        sch: the schedule of a model or a module in it.
        entries: entries of its report, for the rules not applied.
        timing: time of a training step divided by the original model's, if measured.
    """
    recording = recording_of(sch)
    pictures = Pictures(sch, recording)
    tree = tree_of(sch, pictures, entries)
    memory = memory_of(sch)
    whole = memory.of([""])
    most = max((size for size in whole or (1,) if size is not None), default=1)
    top = _numbered(tree, memory, most, iter(range(1 << 30)))
    every = list(top.all())
    drawn = [each for each in every if each.branch.picture is not None]
    first = max(drawn, key=lambda each: pictures.made[each.branch.picture or 0].interest, default=None)
    return rendered(
        "pictures.html",
        top=top,
        shown=[each for each in every if each.branch.interesting],
        open={each.id for each in every if each.branch.changed or len(every) <= _OPEN_ROWS},
        first=None if first is None else first.id,
        pictures=pictures.made,
        bars=list(_bars(tree, memory, most)),
        unmeasured=memory.missing,
        timing=timing,
        stages=stages(sch, recording),
        sharding=sharding(sch),
    )


def recording_of(sch: Node) -> Recording | None:
    """Return the recorded run of the model, made now if necessary.

    For a sharded model without one, return the run recorded before sharding, if any: a new recording would need all
    ranks.
    """
    graphs = sch.tree.graphs
    if graphs.made_recording is not None or not is_sharded(sch.tree.root):
        return graphs.recording
    return sharded_state(sch.tree).whole


def _numbered(branch: Branch, memory: Memory, most: int, numbers: Iterator[int]) -> _Shown:
    number, sizes = next(numbers), memory.of(branch.paths)
    title = ", ".join(ranged(branch.paths)) or "the whole model"
    saved = Bar("", *sizes, most) if sizes is not None and any(sizes) else None
    return _Shown(branch, number, title, saved, [_numbered(child, memory, most, numbers) for child in branch.children])


def _bars(branch: Branch, memory: Memory, most: int) -> Iterator[Bar]:
    """Yield a bar for each module with enough bytes and something to show, depth first."""
    sizes = memory.of(branch.paths)
    if sizes is not None:
        if max(size or 0 for size in sizes) < _SMALLEST_BAR * most:
            return
        if branch.interesting:
            yield Bar(", ".join(ranged(branch.paths)) or "the whole model", *sizes, most)
    for child in branch.children:
        yield from _bars(child, memory, most)
