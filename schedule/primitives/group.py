"""Groups of schedules: a primitive applies to all members or to none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from schedule import primitives
from schedule.core.matching import Match, find_in, find_parallel_in, holds, named_matches
from schedule.core.node import Node, NodeT
from schedule.primitives.checkpoint import checked_every, within_budget
from schedule.primitives.registry import call_text, registered
from schedule.primitives.splicing import refuse_no_match, refuse_none
from schedule.util.arguments import keywords_checked, refuse_unknown
from schedule.util.errors import MatchError, PathError, located, no_attribute
from schedule.util.wording import Bytes, counted

P = ParamSpec("P")
R = TypeVar("R")


def broadcast(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Group[Any], P], list[R]]:
    """Return the version of a primitive for groups, one step over all members.

    Each member gets the matches in it.
    """

    def on_all(group: Group[Any], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        signature = inspect.signature(method)
        refuse_unknown(method.__name__, kwargs, signature.parameters)
        bound = signature.bind(group[0], *args, **kwargs)
        arguments = dict(list(bound.arguments.items())[1:])
        with one_step(group, method, arguments):
            return [method(member, *own[0], **own[1]) for member, own in _distributed(group, bound)]

    on_all.__name__, on_all.__doc__ = method.__name__, method.__doc__
    on_all.__wrapped__ = method  # type: ignore[attr-defined]
    return on_all


@contextmanager
def one_step(group: Group[Any], method: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[None]:
    """Group edits of all members into one undoable step."""
    asked, name = call_text(method, arguments), method.__name__
    paths, history = [member.path for member in group], group[0].tree.history
    with (
        located(asked, group.label),
        history.transaction(name, paths, arguments, f"{asked} on {group.label}", group.glob),
    ):
        yield


def _distributed(group: Group[NodeT], bound: Any) -> Iterator[tuple[NodeT, tuple[Any, Any]]]:
    """Yield (member, arguments) for each member, with matches assigned to the member they are in.

    Members without any of the given matches are skipped.
    """
    matches = bound.arguments.get("matches")
    if "matches" in bound.arguments and matches is not None:
        matches = named_matches(list(group), matches)
    if not isinstance(matches, (list, tuple)):
        for member in group:
            bound.arguments[next(iter(bound.arguments))] = member
            yield member, (bound.args[1:], bound.kwargs)
        return
    refuse_none(matches)
    remaining = list(matches)
    for member in list(group):
        inside = [m for m in remaining if holds(member, _first(m))]
        remaining = [m for m in remaining if m not in inside]
        if inside:
            bound.arguments["matches"] = inside
            bound.arguments[next(iter(bound.arguments))] = member
            yield member, (bound.args[1:], bound.kwargs)
    if remaining:
        raise MatchError(
            f"a match in {_first(remaining[0]).path} is in none of these modules",
            fix="give matches that this group's find() returned",
        )


def _first(match: Any) -> Match:
    first: Match = match[0] if isinstance(match, (list, tuple)) else match
    refuse_no_match(first)
    return first


def _asked(method: Callable[..., Any], pattern: Any, expect: int | None) -> str:
    return call_text(method, {"pattern": pattern} if expect is None else {"pattern": pattern, "expect": expect})


_checkpoint = broadcast(primitives.checkpoint)


class Group(Generic[NodeT]):
    """Schedules selected by a glob, such as all MLPs, in model order."""

    def __init__(self, members: Sequence[NodeT], label: str) -> None:
        self._members, self._label = list(members), label

    @property
    def label(self) -> str:
        """The glob and the number of modules, for messages."""
        return f"{self._label} ({counted(len(self), 'module')})"

    @property
    def glob(self) -> str:
        """The glob of the members, or "" if a slice was taken as well."""
        return self._label if ":" not in self._label else ""

    @property
    def paths(self) -> list[str]:
        """Paths of the members."""
        return [member.path for member in self._members]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[NodeT]:
        return iter(self._members)

    @overload
    def __getitem__(self, key: int) -> NodeT: ...
    @overload
    def __getitem__(self, key: slice | str) -> Group[NodeT]: ...

    def __getitem__(self, key: int | slice | str) -> NodeT | Group[NodeT]:
        """Return a member by index, or a group by slice or by a path or glob inside each member."""
        if isinstance(key, int):
            return self._members[key]
        label = f"{self._label}.{key}" if isinstance(key, str) else f"{self._label}[{key.start}:{key.stop}]"
        if isinstance(key, slice):
            return self._nonempty(self._members[key], label)
        found = dict.fromkeys(inner for member in self._members for inner in member.select(key))
        return Group(list(found), label)

    def _nonempty(self, members: list[NodeT], label: str) -> Group[NodeT]:
        if not members:
            why = f"{label} is empty: the group has {counted(len(self), 'member')}"
            raise PathError(why, fix=f"slice within 0:{len(self)}")
        return Group(members, label)

    def __contains__(self, member: object) -> bool:
        return any(member is m or member == m.path for m in self._members)

    def __repr__(self) -> str:
        return f"Group({self.label})"

    @keywords_checked()
    def find(self, pattern: Any, expect: int | None = None, closed: bool = True) -> list[Match]:
        """Return all matches of ``pattern`` in all members, as :meth:`Schedule.find` does.

        Args:
            pattern: as for one schedule.
            expect: required number of matches in all members together.
            closed: as for one schedule.
        """
        with located(_asked(primitives.find, pattern, expect), self.label):
            return find_in(self._members, pattern, expect, closed)

    @keywords_checked()
    def find_parallel(self, pattern: Any, expect: int | None = None) -> list[list[Match]]:
        """Return the groups of parallel matches in all members, as :meth:`Schedule.find_parallel` does."""
        with located(_asked(primitives.find_parallel, pattern, expect), self.label):
            return find_parallel_in(self._members, pattern, expect)

    @keywords_checked()
    def checkpoint(
        self, matches: Sequence[Match] | str | None = None, every: int = 1, budget: Bytes | None = None
    ) -> Sequence[Node]:
        """Recompute members or matches in the backward pass, as :meth:`Schedule.checkpoint` does.

        Args:
            matches: as for one schedule.
            every: only members 0, ``every``, 2 × ``every``, … of the group; for matches, each ``every``-th.
            budget: bytes that the whole model may keep, such as ``"2GB"``; modules are chosen from all members.

        Returns:
            The members that were checkpointed as wholes; with a budget, all members.
        """
        given = {"matches": matches, "every": None if every == 1 else every, "budget": budget}
        with one_step(self, primitives.checkpoint, {k: value for k, value in given.items() if value is not None}):
            if budget is not None:
                return within_budget(self._members, matches, every, budget)
            if matches is not None:
                found = named_matches(self._members, matches)
                return _checkpoint(self, matches=found[:: checked_every(every)])
            return [primitives.checkpoint(member) for member in self._members[:: checked_every(every)]]

    trace = broadcast(primitives.trace)
    trace_until = broadcast(primitives.trace_until)
    fuse = broadcast(primitives.fuse)
    replace = broadcast(primitives.replace)
    replace_all = broadcast(primitives.replace_all)
    decompose = broadcast(primitives.decompose)
    annotate = broadcast(primitives.annotate)
    fork_rng = broadcast(primitives.fork_rng)
    cut_pipeline_stage = broadcast(primitives.cut_pipeline_stage)
    shard = broadcast(primitives.shard)
    shard_experts = broadcast(primitives.shard_experts)
    sync = broadcast(primitives.sync)
    context_parallel = broadcast(primitives.context_parallel)

    if not TYPE_CHECKING:  # else a misspelled primitive would not be an error

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """Return a user-registered primitive for groups."""
            method = None if name.startswith("_") else registered().get(name)
            if method is None:
                raise no_attribute(self, name, registered())
            return broadcast(method).__get__(self)
