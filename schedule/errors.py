"""What can go wrong, each kind with its own class.

Inner code raises a short error: what failed and why. The outer handler (:func:`located`) adds what was asked
and where. Every message therefore reads: what was asked, where, why not, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ScheduleError(Exception):
    """Base of every error of this package.

    Args:
        why: why it cannot be.
        fix: what the user can do instead.
        where: module path, graph excerpt or source line the error is about.
        asked: what the user asked for, such as ``fuse(bias_gelu)``.
    """

    def __init__(self, why: str, *, fix: str = "", where: str = "", asked: str = "") -> None:
        self.why, self.fix, self.where, self.asked = why, fix, where, asked
        super().__init__(why)

    def __str__(self) -> str:
        lines = [f"cannot {self.asked}: {self.why}" if self.asked else self.why]
        if self.where:
            lines += ["  where: " + self.where.replace("\n", "\n    ")]
        if self.fix:
            lines += ["  fix: " + self.fix]
        return "\n".join(lines)


class NotApplicable(ScheduleError):
    """The primitive does not apply here; nothing was changed and the schedule can go on."""


class PathError(ScheduleError, KeyError):
    """No module has this path; the message names the nearest ones."""

    __str__ = ScheduleError.__str__


class TraceError(ScheduleError):
    """The forward cannot be turned into a graph."""


class MatchError(ScheduleError):
    """A match is missing, stale, foreign, or unsafe to rewrite."""


class ShardError(ScheduleError):
    """A sharding or synchronisation request that cannot hold."""


class RecipeError(ScheduleError):
    """A recorded schedule that cannot be read or replayed."""


class VerificationError(ScheduleError):
    """The scheduled model does not compute what the original computes."""


@contextmanager
def located(asked: str, where: str) -> Iterator[None]:
    """Add what was asked, and where, to any :class:`ScheduleError` that passes, unless it already says."""
    try:
        yield
    except ScheduleError as error:
        error.asked = error.asked or asked
        error.where = error.where or where
        raise
