"""Helpers shared by all commands: exit codes, progress, errors, and checks of output files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console

from schedule.util import files
from schedule.util.errors import NotApplicable, PathError, ScheduleError, VerificationError

P = ParamSpec("P")


class Code(IntEnum):
    """Exit codes, explained in :mod:`fxschedule.cli`."""

    DONE = 0
    NO = 1
    USAGE = 2
    NO_MODEL = 3
    REFUSED = 4


class CommandError(ScheduleError):
    """Error of the command line itself, with its exit code."""

    def __init__(self, why: str, code: Code, *, fix: str = "", where: str = "") -> None:
        super().__init__(why, fix=fix, where=where)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why, self.code), self.__dict__


def command(function: Callable[P, Code]) -> Callable[P, None]:
    """Wrap a command to exit with its returned code, and print a :class:`ScheduleError` without a traceback."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except ScheduleError as error:
            if kwargs.get("as_json"):
                emit({"error": error.to_dict()})
            else:
                stderr().print(error, soft_wrap=True)
            code = _code_of(error)
        raise typer.Exit(int(code))

    return run


def _code_of(error: ScheduleError) -> Code:
    if isinstance(error, CommandError):
        return error.code
    kinds = {VerificationError: Code.NO, PathError: Code.USAGE}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), Code.REFUSED)


def stdout() -> Console:
    """Return the console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console for progress and errors."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def emit(data: Any) -> None:
    """Print ``data`` as JSON to the standard output."""
    print(json.dumps(data, indent=2, default=str))


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Print what the block does, above the progress bars of its parts."""
    stderr().print(f"{what} …")
    yield


def refuse_unwritable(path: Path, what: str, suffixes: tuple[str, ...]) -> None:
    """Raise if ``path`` cannot be written, before any work is done.

    Raises:
        CommandError: ``path`` has another suffix or is a folder, or its parent folder is missing or not writable.
    """
    if path.suffix not in suffixes:
        raise CommandError(
            f"a {what} ends in {' or '.join(suffixes)}, {path.name!r} does not",
            Code.USAGE,
            fix=f"{path.stem}{suffixes[0]}",
        )
    try:
        files.refuse_unwritable(path, what)
    except NotApplicable as error:
        raise CommandError(error.why, Code.USAGE, fix=error.fix) from error
