"""Schedules as text for a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree as Branches

from schedule.capture import original_class
from schedule.util.wording import counted

if TYPE_CHECKING:
    from schedule.core.node import Node


def rendered_tree(sch: Node, depth: int | None = None) -> Branches:
    """Return the modules under ``sch`` as a tree, with the steps applied to each."""
    done = what_was_done(sch)
    top = Branches(_line(sch, sch.path, done))
    branches = {"": top}
    for name, node in sch.named_schedules():
        if not name or (depth is not None and name.count(".") >= depth):
            continue
        parent = branches[name.rpartition(".")[0]]
        branches[name] = parent.add(_line(node, name.rpartition(".")[2], done))
    return top


def what_was_done(sch: Node) -> dict[str, list[str]]:
    """Return path → descriptions of the steps applied there, such as ``fuse(bias_gelu)``."""
    done: dict[str, list[str]] = {}
    for step in sch.history:
        what = short(step.description)
        for path, matches in step.touched.items():
            if matches:
                done.setdefault(path, []).append(what if matches == 1 else f"{what} ×{matches}")
    return done


def short(description: str) -> str:
    """Return the description of a step without its location, such as ``fuse(bias_gelu)``."""
    return re.sub(r" on .*", "", description, flags=re.DOTALL)


def _line(node: Node, name: str, done: dict[str, list[str]]) -> Text:
    text = Text(name or "(root)", style="bold").append(f": {original_class(node.module).__name__}", style="default")
    for what in done.get(node.path, ()):
        text.append(f"  ← {what}", style="green")
    state = getattr(node.module, "_schedule_state", None)
    if state is not None and state.fallbacks:
        text.append(f"  ({counted(state.fallbacks, 'call')} fell back)", style="yellow")
    return text
