"""History of the changes to a model, in steps with undo and redo.

A step is a list of edits. An edit is applied when a primitive makes it and reverted, in reverse order, if the
primitive raises later: a primitive, on one module or on a group, changes everything or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from schedule.util.errors import NotApplicable
from schedule.util.generators import generator_states, restore_generators


def reached(point: str) -> None:
    """Mark a point of possible failure of a primitive, for tests to inject faults."""


class Edit(Protocol):
    """One change of the model, applied and reverted any number of times in turn."""

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Revert the change bit-exactly, also after a partial :meth:`apply`."""


@dataclass(frozen=True)
class Step:
    """One applied primitive.

    Attributes:
        primitive: its name.
        paths: the modules it was called on; "" is the root.
        arguments: its arguments, by parameter name.
        description: what was done and where, such as ``fuse(bias_gelu) on transformer.h.0.mlp``.
        edits: the changes, in order.
        touched: path of each changed module → number of changed locations in it.
        record: its entry in a recipe; all steps of one call share it.
    """

    primitive: str
    paths: tuple[str, ...]
    arguments: Mapping[str, Any] = field(repr=False)
    description: str
    edits: tuple[Edit, ...] = field(repr=False)
    touched: Mapping[str, int] = field(default_factory=dict, repr=False)
    record: Any = field(default=None, repr=False)

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """Nodes of the matches among its arguments, in the first graph of each match."""
        given = self.arguments.get("matches") or ()
        groups = [each if isinstance(each, (list, tuple)) else (each,) for each in given]
        return tuple(node for group in groups for match in group for node in match.nodes)


@dataclass
class Pending:
    """A step in progress."""

    description: str
    edits: list[Edit] = field(default_factory=list)
    touched: dict[str, int] = field(default_factory=dict)


class History:
    """The applied steps of one schedule, and the steps undone last.

    Args:
        record: describes a call (primitive, paths, the glob for them, arguments) before it is made.
    """

    def __init__(self, record: Callable[[str, Sequence[str], str, Mapping[str, Any]], Any] | None = None) -> None:
        self.record = record or (lambda *call: None)
        self._done: list[Step] = []
        self._undone: list[Step] = []
        self._pending: Pending | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """Applied steps, oldest first."""
        return tuple(self._done)

    @property
    def undone(self) -> tuple[Step, ...]:
        """Undone steps available to ``redo``, last undone first."""
        return tuple(reversed(self._undone))

    @property
    def pending(self) -> Pending | None:
        """The step in progress, or None if no primitive is running."""
        return self._pending

    @contextmanager
    def transaction(
        self,
        primitive: str,
        paths: Sequence[str],
        arguments: Mapping[str, Any],
        description: str,
        glob: str = "",
        record: Any = None,
    ) -> Iterator[Pending]:
        """Group edits into one undoable step, or revert them on error.

        An inner transaction becomes part of the outer one's step. If it fails, only its own edits are reverted, and
        the outer one may continue.

        Args:
            primitive: like the other arguments, see :class:`Step`.
            glob: the glob for the modules, if one was given.
            record: the recipe entry of the step, if it is part of a larger call.
        """
        outer = self._pending
        if outer is None and record is None:
            record = self.record(primitive, paths, glob, arguments)
        pending = self._pending = outer or Pending(description)
        mark, touched = len(pending.edits), dict(pending.touched)
        generators = generator_states()
        complete = False
        try:
            reached(f"{primitive}: begin")
            yield pending
            reached(f"{primitive}: end")
            complete = True
        finally:
            self._pending = outer
            if not complete:
                while len(pending.edits) > mark:
                    pending.edits.pop().revert()
                pending.touched = touched
                restore_generators(generators)
        if outer is None and pending.edits:
            edits, touched = tuple(pending.edits), pending.touched
            step = Step(primitive, tuple(paths), dict(arguments), description, edits, touched, record)
            self._done.append(step)
            self._undone.clear()

    def apply(self, edits: Sequence[Edit], path: str = "", matches: int = 1) -> None:
        """Apply edits as part of the step in progress.

        Args:
            edits: the edits, in order.
            path: the path of the changed module.
            matches: the number of changed locations in it, for the report.
        """
        if self._pending is None:
            raise NotApplicable("changes are made by primitives only", fix="decorate the function with @primitive")
        for edit in edits:
            reached(f"before {type(edit).__name__}")
            self._pending.edits.append(edit)  # first, so that a partial apply is reverted too
            edit.apply()
            reached(f"after {type(edit).__name__}")
        self._pending.touched[path] = self._pending.touched.get(path, 0) + matches

    def undo(self) -> Step:
        """Revert the last step."""
        self.refuse_while_pending("undo")
        if not self._done:
            raise NotApplicable("nothing was done yet", asked="undo", fix="sch.history says what can be undone")
        step = self._done[-1]
        _all([(edit.revert, edit.apply) for edit in reversed(step.edits)])
        self._undone.append(self._done.pop())
        return step

    def redo(self) -> Step:
        """Reapply the last undone step."""
        self.refuse_while_pending("redo")
        if not self._undone:
            raise NotApplicable(
                "nothing was undone, or something was done since", asked="redo", fix="redo directly after undo"
            )
        step = self._undone[-1]
        _all([(edit.apply, edit.revert) for edit in step.edits])
        self._done.append(self._undone.pop())
        return step

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All applied edits, oldest first, including those of the step in progress."""
        done = [edit for step in self._done for edit in step.edits]
        return (*done, *(self._pending.edits if self._pending is not None else ()))

    @contextmanager
    def all_or_nothing(self) -> Iterator[Savepoint]:
        """Restore the model and the history if the body raises or rolls back.

        The body may make and undo steps. May be nested, and used within a step in progress.
        """
        savepoint = Savepoint(self)
        complete = False
        try:
            yield savepoint
            complete = True
        finally:
            if not complete:
                savepoint.roll_back()

    def refuse_while_pending(self, what: str) -> None:
        """Raise if a primitive is running, for callers making or reverting whole steps."""
        if self._pending is not None:
            raise NotApplicable(
                f"{self._pending.description} is still running",
                asked=what,
                fix=f"{what} outside of primitives; what one did is taken back when it raises, or by attempt()",
            )


class Savepoint:
    """Saved state of a history, made by :meth:`History.all_or_nothing`."""

    def __init__(self, history: History) -> None:
        self._history, self._pending = history, history._pending
        self._done, self._undone = list(history._done), list(history._undone)
        self._edits = len(self._pending.edits) if self._pending is not None else 0
        self._touched = dict(self._pending.touched) if self._pending is not None else {}
        self._generators = generator_states()

    def roll_back(self) -> None:
        """Revert steps and edits made since, and reapply undone ones, bit-exactly."""
        history = self._history
        if self._pending is not None:
            while len(self._pending.edits) > self._edits:
                self._pending.edits.pop().revert()
            self._pending.touched = dict(self._touched)
        shared = 0
        while shared < min(len(history._done), len(self._done)) and history._done[shared] is self._done[shared]:
            shared += 1
        while len(history._done) > shared:
            history.undo()
        for step in self._done[shared:]:
            for edit in step.edits:
                edit.apply()
        history._done, history._undone = list(self._done), list(self._undone)
        restore_generators(self._generators)


def _all(changes: Sequence[tuple[Callable[[], None], Callable[[], None]]]) -> None:
    """Make changes, given as (change, inverse) pairs, and call the inverses of those made if one raises."""
    made: list[Callable[[], None]] = []
    complete = False
    try:
        for change, back in changes:
            change()
            made.append(back)
        complete = True
    finally:
        for back in reversed(made if not complete else ()):
            back()
