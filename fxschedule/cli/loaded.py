"""Result of loading the MODEL argument, and the errors if there is no such model."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxschedule.cli.output import Code, CommandError


@dataclass(frozen=True)
class Loaded:
    """Model loaded for a command.

    Attributes:
        model: the model.
        batch: inputs of the model; None to make them from the model.
        origin: a description of the source of its weights.
        shapes: shapes of one row of its main input, if its library knows them: the first to try.
    """

    model: nn.Module
    batch: Any
    origin: str
    shapes: tuple[tuple[int, ...], ...] = ()


def missing(why: str, fix: str = "", where: str = "") -> CommandError:
    """Return the error for a model that is not here, or cannot be made."""
    return CommandError(why, Code.NO_MODEL, fix=fix, where=where)


def raised(what: str, error: BaseException, fix: str) -> CommandError:
    """Return the error for ``error`` raised by foreign code, with its line."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    location = f"{innermost.filename}:{innermost.lineno}"
    return missing(f"{what} raised {type(error).__name__}: {first_line(error)}", fix, location)


def first_line(error: BaseException) -> str:
    """Return the beginning of the message of ``error``."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
