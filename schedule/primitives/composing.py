"""Composition: functions over schedules are ordinary Python, and these make larger ones of them.

A *schedule function* takes a schedule (or a group, or a match) first::

    def fuse_mlp(mlp: Schedule) -> None:
        mlp.fuse(mlp.find(bias_gelu, expect=1))

It says that it does not apply here by letting :class:`~schedule.util.errors.NotApplicable` pass; every other error is a
real one and goes through to the user. Either way what it did until then is taken back, to the bit.

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
"""How often :func:`repeat` runs a function that always changes something before it takes it for endless."""


@dataclass(frozen=True)
class Attempt(Generic[R]):
    """What came of an :func:`attempt`: true if it was done.

    Attributes:
        value: what the function returned; None if it did not apply.
        error: why it did not apply; None if it was done.
    """

    value: R | None = None
    error: NotApplicable | None = None

    @property
    def why(self) -> str:
        """Why it did not apply, with the fix; "" if it was done."""
        return "" if self.error is None else str(self.error)

    def __bool__(self) -> bool:
        return self.error is None


def attempt(fn: Callable[Concatenate[T, P], R], sch: T, *args: P.args, **kwargs: P.kwargs) -> Attempt[R]:
    """Run ``fn(sch, ...)``; if it does not apply, take back all that it did and go on.

    ::

        for mlp in sch["h.*.mlp"]:
            done = schedule.attempt(fuse_mlp, mlp)
            if not done:
                print(mlp.path, done.why)

    What did not apply leaves no trace: model, history, recipe and random numbers are as they were, to the bit. May be
    nested, and used inside primitives, where it becomes part of their step.

    Args:
        fn: changes ``sch`` through primitives, or raises :class:`NotApplicable`.
        sch: a schedule, a group or a match; further arguments go to ``fn`` too.

    Raises:
        Exception: any other error of ``fn``, such as a TypeError or MatchError, after all that it did was taken back.
    """
    with _history_of(sch, "attempt(function, sch, ...)").all_or_nothing() as savepoint:
        try:
            return Attempt(fn(sch, *args, **kwargs))
        except NotApplicable as error:
            savepoint.roll_back()
            return Attempt(error=error)


def first_of(*functions: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A function that does what the first of these does that applies.

    ::

        fuse_any = schedule.first_of(fuse_swiglu, fuse_geglu, fuse_mlp)
        fuse_any(sch["h.0.mlp"])

    It returns what that one returned. An alternative that returns applies, even if it changed nothing.

    Raises:
        ScheduleError: no function was given.
        NotApplicable: by the function that is made: none applies; says why each does not.
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
    """A function that runs ``fn`` again and again, until it does not apply or changes nothing.

    ::

        count = schedule.repeat(cancel_one_transpose)(sch["attn"])

    It returns how often ``fn`` was done. Not at all is fine: 0.

    Args:
        times: at most so often; without a limit if None.

    Raises:
        ScheduleError: ``times`` is no number from 0; or, by the function that is made, ``fn`` goes on changing the
            model without an end: then nothing was changed.
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
    """A function that runs ``fn`` on every module or match that ``where`` means; on all of them, or on none.

    ::

        fuse_all = schedule.for_each("h.*.mlp", fuse_mlp)              # fuse_mlp(mlp) for each
        fuse_all(sch)
        schedule.for_each("h.*.mlp", lambda mlp: schedule.attempt(fuse_mlp, mlp))(sch)     # on those where it applies
        schedule.for_each(bias_gelu, lambda match: match.schedule.fuse([match]))(sch["h.0.mlp"])

    It returns what ``fn`` returned for each, in the order of the model. Further arguments go to ``fn`` too.

    Args:
        where: a path or glob, from the schedule that the function is given; a group; a list of schedules or matches,
            such as ``sch.find("bias_gelu_tanh")``; or a pattern, for its matches: a function, a module, a module type,
            a rule.

    Raises:
        NotApplicable: by the function that is made: the pattern occurs nowhere; or whatever ``fn`` raises, after what
            was done to earlier ones was taken back.
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
        raise ScheduleError(f"a {type(target).__name__} is no schedule, group or match", fix=usage)
    return _tree_of(target).history


def _tree_of(target: Node | Group[Any] | Match) -> Tree:
    if isinstance(target, Match):
        return target.schedule.tree
    return target[0].tree if isinstance(target, Group) else target.tree


def _same(before: Sequence[Edit], after: Sequence[Edit]) -> bool:
    """Whether these are the very same edits."""
    return len(before) == len(after) and all(old is new for old, new in zip(before, after, strict=True))


def _label(target: Any) -> str:
    return str(target.path if isinstance(target, Match) else target.label)


def _name(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} given"
    if isinstance(value, str):
        return repr(value)
    return str(getattr(value, "__name__", None) or getattr(value, "name", value))
