"""Schedules as HTML, with every value escaped and no external resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedule.capture import original_class
from schedule.report.entries import Entry, rows_of
from schedule.report.pictures.page import Page, section
from schedule.report.tree_text import what_was_done
from schedule.runtime.scheduled import state_of
from schedule.util.templating import rendered

if TYPE_CHECKING:
    from schedule.core.node import Node


@dataclass
class Branch:
    """A module in the tree of a schedule.

    Attributes:
        name: last part of its path.
        kind: its class.
        done: the steps applied to it.
        fallbacks: number of its calls that ran the original forward.
        children: its submodules.
    """

    name: str
    kind: str
    done: list[str]
    fallbacks: int
    children: list[Branch] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether a step was applied to it or a submodule."""
        return bool(self.done) or any(child.changed for child in self.children)


def tree_html(sch: Node) -> str:
    """Return the modules under ``sch`` with the steps applied to each, expanded at changed ones."""
    done = what_was_done(sch)
    branches: dict[str, Branch] = {}
    for name, node in sch.named_schedules():
        state = state_of(node.module)
        kind, fallbacks = original_class(node.module).__name__, 0 if state is None else state.fallbacks
        shown = name.rpartition(".")[2] or sch.label
        branches[name] = Branch(shown, kind, done.get(node.path, []), fallbacks)
        if name:
            branches[name.rpartition(".")[0]].children.append(branches[name])
    return str(rendered("tree.html", top=branches[""]))


def schedule_page(sch: Node, entries: Sequence[Entry]) -> Page:
    """Return a page with the pictures of a schedule, and the rules not applied according to ``entries``."""
    name = original_class(sch.module).__name__
    title = f"{name}: {sch.path}" if sch.path else name
    pictures = section(sch, entries)
    rows = rows_of(entry for entry in entries if entry.status != "applied")
    steps = [step.description for step in sch.history]
    text = rendered("schedule.html", title=title, steps=steps, pictures=pictures, rows=rows)
    return Page(str(text), title)
