"""Tree of a model's modules, with the steps applied to each, its picture, and the rules not applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.capture import Recording, is_basic, original_class
from schedule.distributed.tensor_parallel.sharded_modules import is_sharded, sharding_of
from schedule.distributed.tensor_parallel.state import sharded_state
from schedule.report.pictures.drawing import Change, Palette, Picture, Side, picture
from schedule.report.pictures.flow import Flow, flow_of
from schedule.report.pictures.pairs import Pair, pair_of
from schedule.report.tree_text import what_was_done
from schedule.runtime.scheduled import state_of
from schedule.util.errors import ScheduleError, TraceError

if TYPE_CHECKING:
    from schedule.core.node import Node
    from schedule.report.entries import Entry

_NO_MARK = ("optimize(", "fuse(", "replace(", "decompose(", "trace(", "trace_until(", "annotate(")


@dataclass
class Branch:
    """A module, or several consecutive similar ones.

    Attributes:
        paths: of all of them; the first represents the others.
        name: name in the tree: the last part of the path, or ``0–11`` for several.
        kind: its class.
        done: the steps applied to it.
        fallbacks: number of calls that ran the original forward.
        picture: number of its picture, None if there is none.
        note: why there is none, if worth showing.
        missed: rules not applied, as (status, rule, reason).
        children: its submodules.
    """

    paths: list[str]
    name: str
    kind: str
    done: tuple[str, ...]
    fallbacks: int
    picture: int | None
    note: str
    missed: tuple[tuple[str, str, str], ...]
    children: list[Branch] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether a step was applied to it or a submodule."""
        return bool(self.done) or any(child.changed for child in self.children)

    @property
    def interesting(self) -> bool:
        """Whether it has anything to show."""
        return self.picture is not None or bool(self.done or self.missed or self.note)

    def alike(self, other: Branch) -> bool:
        """Check whether ``other`` looks the same, apart from its path."""
        return self._looks() == other._looks()

    def _looks(self) -> tuple[Any, ...]:
        inside = tuple((child.name, child._looks()) for child in self.children)
        return self.kind, self.done, self.fallbacks, self.picture, self.note, self.missed, inside


class Pictures:
    """Pictures of a model's modules, shared by similar ones.

    Attributes:
        made: the pictures, indexed by the numbers from :meth:`of`.
    """

    def __init__(self, top: Node, recording: Recording | None) -> None:
        self.made: list[Picture] = []
        self._top, self._recording, self._palette = top, recording, Palette()
        self._known: dict[tuple[Any, ...], int] = {}
        self._done = what_was_done(top)
        self._looked: dict[str, tuple[Any, ...]] = {}
        self._failed: Mapping[nn.Module, ScheduleError] = {}
        self._sharded = is_sharded(top.module)
        if recording is not None and not self._sharded:
            wanted = [m for m in top.module.modules() if m in recording.calls and not is_basic(m) and not state_of(m)]
            self._failed = top.tree.graphs.ensure(wanted)

    def of(self, node: Node) -> tuple[int | None, str]:
        """Return the number of a module's picture, or None with the reason, if worth showing."""
        failed = self._failed.get(node.module)
        if failed is not None:
            return None, f"it cannot be traced: {failed.why.partition(chr(10))[0]}"
        pair = pair_of(node, self._recording)
        if pair is None and self._sharded:
            pair = _as_planned(node)
        if pair is None:
            return None, ""
        modules = dict(node.module.named_modules())

        def looks(path: str) -> tuple[Any, ...]:
            return self._looks(f"{node.path}.{path}" if node.path else path)

        after = flow_of(pair.after, modules, looks)
        before = None if pair.before is None else flow_of(pair.before, modules, looks)
        calls = self._calls(node, [*after.nodes, *([] if before is None else before.nodes)])
        shapes = (None if before is None else before.shape, after.shape)
        key = (*shapes, *(tuple(sorted(each.items())) for each in (pair.old, pair.new)), *calls.items(), *pair.rules)
        if key not in self._known:
            self._known[key] = len(self.made)
            self.made.append(picture(_sides(pair, before, after, calls), self._palette))
        return self._known[key], ""

    def _looks(self, path: str) -> tuple[Any, ...]:
        """Return the steps applied to a module and its submodules, by relative path."""
        if path not in self._looked:
            below = f"{path}."
            done = ((at[len(path) :], *what) for at, what in self._done.items() if at == path or at.startswith(below))
            self._looked[path] = tuple(done)
        return self._looked[path]

    def _calls(self, node: Node, boxes: Iterable[Any]) -> dict[str, str]:
        """Return path of a called module → the primitive applied to it as a whole."""
        found = {}
        for path in dict.fromkeys(box.path for box in boxes if box.path):
            child = f"{node.path}.{path}" if node.path else path
            marks = [what for what in self._done.get(child, ()) if not what.startswith(_NO_MARK)]
            if marks:
                found[path] = _role(node.module.get_submodule(path)) or marks[0].partition("(")[0]
        return found


def _role(module: nn.Module) -> str:
    """Return the label for a module's sharding, or "" if it has none."""
    own = sharding_of(module)
    if own is None:
        return ""
    role = own.role(module)
    return f"shard: {role}-parallel" if role in ("column", "row") else "shard" if role else "sync"


def _as_planned(node: Node) -> Pair | None:
    """Return the forward of a module with sharded submodules, as traced before sharding, or None."""
    made = sharded_state(node.tree).whole_forward(node.module)
    return None if isinstance(made, TraceError) else Pair(made.graph, caption="as it was before it was sharded")


def _sides(pair: Pair, before: Flow | None, after: Flow, calls: Mapping[str, str]) -> tuple[Side, ...]:
    def changes(numbers: Mapping[str, int]) -> dict[str, Change]:
        return {name: Change(pair.rules[number], number + 1) for name, number in numbers.items()}

    if before is None:
        return (Side(pair.caption, after, {}, calls),)
    return Side("before", before, changes(pair.old), calls), Side("after", after, changes(pair.new), calls)


def tree_of(sch: Node, pictures: Pictures, entries: Sequence[Entry]) -> Branch:
    """Return the tree of modules under ``sch``, with consecutive similar ones merged."""
    done = what_was_done(sch)
    missed: dict[str, dict[tuple[str, str, str], None]] = {}
    for entry in entries:
        if entry.status != "applied":
            missed.setdefault(entry.path, {})[entry.status, entry.rule, entry.reason] = None
    branches: dict[str, Branch] = {}
    for name, node in sch.named_schedules():
        state, path = state_of(node.module), node.path
        number, note = pictures.of(node)
        kind, shown = original_class(node.module).__name__, name.rpartition(".")[2] or sch.label
        fallbacks = 0 if state is None else state.fallbacks
        why = tuple(missed.get(path, ()))
        branches[name] = Branch([path], shown, kind, tuple(done.get(path, ())), fallbacks, number, note, why)
        if name:
            branches[name.rpartition(".")[0]].children.append(branches[name])
    _gather(branches[""])
    return branches[""]


def _gather(branch: Branch) -> None:
    """Merge consecutive similar numbered children, together with their submodules."""
    for child in branch.children:
        _gather(child)
    merged: list[Branch] = []
    for child in branch.children:
        if merged and child.name.isdigit() and merged[-1].name.isdigit() and merged[-1].alike(child):
            _join(merged[-1], child)
        else:
            merged.append(child)
    for child in merged:
        if len(child.paths) > 1:
            child.name = f"{child.name}–{child.paths[-1].rpartition('.')[2]}"
    branch.children = merged


def _join(first: Branch, other: Branch) -> None:
    first.paths += other.paths
    for child, same in zip(first.children, other.children, strict=True):
        _join(child, same)
