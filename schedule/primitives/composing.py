"""Combinators for schedule functions.

A *schedule function* is a Python function with a schedule (or a group, or a match) as its first argument::

    def fuse_mlp(mlp: Schedule) -> None:
        mlp.fuse(mlp.find(bias_gelu, expect=1))

It signals that it does not apply by raising :class:`~schedule.util.errors.NotApplicable`, or not catching it; every
other error is a real one and reaches the user. In both cases its changes so far are reverted bit-exactly::

    done = schedule.attempt(fuse_mlp, sch["h.0.mlp"])       # go on without it
    schedule.first_of(fuse_mlp, fuse_swiglu)(sch["h.0.mlp"])
    schedule.for_each("h.*.mlp", schedule.first_of(fuse_mlp, fuse_swiglu))(sch)
    schedule.repeat(merge_two_reshapes)(sch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from schedule.core.history import Edit, History
from schedule.core.matching import Match
from schedule.core.node import Node, Tree
from schedule.primitives import find
from schedule.primitives.group import Group
from schedule.util.errors import NotApplicable, ScheduleError, located

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Node | Group[Any] | Match")

ENDLESS = 10_000
"""Number of runs with a change after which :func:`repeat` raises, if it has no limit."""


@dataclass(frozen=True)
class Attempt(Generic[R]):
    """Result of an :func:`attempt`, true if the function applied.

    Attributes:
        value: result of the function; None if it did not apply.
        error: why it did not apply; None if it applied.
    """

    value: R | None = None
    error: NotApplicable | None = None

    @property
    def why(self) -> str:
        """The reason why it did not apply, with the fix, or "" if it applied."""
        return "" if self.error is None else str(self.error)

    def __bool__(self) -> bool:
        return self.error is None


def attempt(fn: Callable[Concatenate[T, P], R], sch: T, *args: P.args, **kwargs: P.kwargs) -> Attempt[R]:
    """Run ``fn(sch, ...)``, and revert its changes if it does not apply.

    ::

        for mlp in sch["h.*.mlp"]:
            done = schedule.attempt(fuse_mlp, mlp)
            if not done:
                print(mlp.path, done.why)

    If it does not apply, model, history, recipe and random numbers are restored bit-exactly. May be nested, and used
    inside primitives, where it becomes part of their step.

    Args:
        fn: changes ``sch`` through primitives, or raises :class:`NotApplicable`.
        sch: a schedule, a group or a match; further arguments are passed to ``fn`` too.

    Raises:
        Exception: any other error of ``fn``, such as a TypeError or MatchError, after its changes were reverted.
    """
    with _history_of(sch, "attempt(function, sch, ...)").all_or_nothing() as savepoint:
        try:
            return Attempt(fn(sch, *args, **kwargs))
        except NotApplicable as error:
            savepoint.roll_back()
            return Attempt(error=error)


def first_of(*functions: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Return a function to run the first applicable one of ``functions``.

    ::

        fuse_any = schedule.first_of(fuse_swiglu, fuse_geglu, fuse_mlp)
        fuse_any(sch["h.0.mlp"])

    It returns the result of that function. An alternative that returns has applied, even if it changed nothing.

    Raises:
        ScheduleError: no function was given.
        NotApplicable: raised by the returned function if none applies; gives the reason for each.
    """
    if not functions:
        raise ScheduleError("there is nothing to choose from", asked="first_of()", fix="first_of(a, b, …)")

    def chosen(sch: T, *args: P.args, **kwargs: P.kwargs) -> R:
        refused = []
        for fn in functions:
            done = attempt(fn, sch, *args, **kwargs)
            if done.error is None:
                return done.value  # type: ignore[return-value]
            refused.append((fn, done.error))
        raise NotApplicable(
            f"none of {len(functions)} alternatives applies",
            asked=call,
            module=_label(sch),
            where="\n".join(f"{_name(fn)}: {error.why}" for fn, error in refused),
            fix=next((error.fix for _, error in refused if error.fix), "give an alternative that applies here"),
        )

    call = chosen.__name__ = f"first_of({', '.join(map(_name, functions))})"
    return chosen


def repeat(fn: Callable[Concatenate[T, P], Any], times: int | None = None) -> Callable[Concatenate[T, P], int]:
    """Return a function to run ``fn`` repeatedly, until it does not apply or changes nothing.

    ::

        count = schedule.repeat(cancel_one_transpose)(sch["attn"])

    It returns the number of runs of ``fn`` that changed something, which may be 0.

    Args:
        times: maximum number of runs; no limit if None.

    Raises:
        ScheduleError: ``times`` is not an integer from 0; or, raised by the returned function, ``fn`` never stops
            changing the model (:data:`ENDLESS` runs); then all changes are reverted.
    """
    if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 0):
        raise ScheduleError(
            f"times is a number from 0, or None, not {times!r}", asked="repeat", fix="repeat(fn, times=3)"
        )

    def repeated(sch: T, *args: P.args, **kwargs: P.kwargs) -> int:
        history = _history_of(sch, f"{call}(sch, ...)")
        count = 0
        with history.all_or_nothing():
            while times is None or count < times:
                before = history.edits
                if not attempt(fn, sch, *args, **kwargs) or _same(before, history.edits):
                    return count
                count += 1
                if times is None and count == ENDLESS:
                    raise ScheduleError(
                        f"{_name(fn)} still changes the model after {count} times",
                        asked=call,
                        module=_label(sch),
                        fix="let it raise NotApplicable when it is done, or give times=",
                    )
        return count

    call = repeated.__name__ = f"repeat({_name(fn)})"
    return repeated


def for_each(where: Any, fn: Callable[..., R]) -> Callable[..., list[R]]:
    """Return a function to run ``fn`` on every selected module or match, on all or none.

    ::

        fuse_all = schedule.for_each("h.*.mlp", fuse_mlp)              # fuse_mlp(mlp) for each
        fuse_all(sch)
        schedule.for_each("h.*.mlp", lambda mlp: schedule.attempt(fuse_mlp, mlp))(sch)     # on those where it applies
        schedule.for_each(bias_gelu, lambda match: match.schedule.fuse([match]))(sch["h.0.mlp"])

    It returns the list of results of ``fn``, in model order. Further arguments are passed to ``fn`` too.

    Args:
        where: a path or glob, relative to the schedule passed to the function; a group; a list of schedules or
            matches, such as ``sch.find("bias_gelu_tanh")``; or a pattern, for its matches: a function, a module, a
            module type, a rule.

    Raises:
        NotApplicable: raised by the returned function if the pattern has no match. Any error of ``fn`` is raised as
            well, after the changes to earlier items were reverted.
        PathError: no module has the path.
    """

    def each(sch: Any, *args: Any, **kwargs: Any) -> list[R]:
        history = _history_of(sch, f"{call}(sch, ...)")
        with located(call, _label(sch)):
            items = list(_items(where, sch))
        with history.all_or_nothing():
            return [fn(item, *args, **kwargs) for item in items]

    call = each.__name__ = f"for_each({_label(where) if isinstance(where, Group) else _name(where)}, {_name(fn)})"
    return each


def _items(where: Any, sch: Node | Group[Any]) -> Iterator[Node | Match]:
    if isinstance(where, str):
        yield from sch[where] if isinstance(sch, Group) else sch.select(where)
        return
    if isinstance(where, (Group, list, tuple)):
        chosen: Iterable[Any] = where
        for item in chosen:
            if not isinstance(item, (Node, Match)):
                raise ScheduleError(
                    f"a {type(item).__name__} is neither a schedule nor a match",
                    fix="give what sch[…] or find() returned",
                )
            if _tree_of(item) is not _tree_of(sch):
                raise ScheduleError(
                    f"{_label(item)} is of another schedule", fix="take modules and matches from this schedule"
                )
            yield item
        return
    matches = sch.find(where) if isinstance(sch, Group) else find(sch, where)
    if not matches:
        raise NotApplicable("the pattern occurs nowhere here", fix="find(pattern, expect=n) tells what comes nearest")
    yield from matches


def _history_of(target: Any, usage: str) -> History:
    if not isinstance(target, (Node, Group, Match)):
        raise ScheduleError(f"a {type(target).__name__} is not a schedule, group or match", fix=usage)
    return _tree_of(target).history


def _tree_of(target: Node | Group[Any] | Match) -> Tree:
    if isinstance(target, Match):
        return target.schedule.tree
    return target[0].tree if isinstance(target, Group) else target.tree


def _same(before: Sequence[Edit], after: Sequence[Edit]) -> bool:
    """Check whether both sequences contain the same edit objects."""
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))


def _label(target: Any) -> str:
    return str(target.path if isinstance(target, Match) else target.label)


def _name(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} given"
    if isinstance(value, str):
        return repr(value)
    return str(getattr(value, "__name__", None) or getattr(value, "name", value))
