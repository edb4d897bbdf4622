"""A model of another library, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from schedule.batches import Inputs

Batch = Callable[[int, int], Inputs]
"""Makes what a model is called with, for a number of rows and a length."""

N, L = "rows", "length"
"""Dimensions that differ between examples, in the shapes of :func:`given`."""


MAX_PARAMETERS = 30_000_000


class Unavailable(Exception):
    """There is no such model here; ``kind`` says why."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why
        super().__init__(f"{kind}: {why}")


def parameters(model: nn.Module) -> int:
    """How many there are."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_large(count: int) -> bool:
    """Whether a model of so many parameters is too large."""
    return count > MAX_PARAMETERS


def refuse_large(count: int) -> None:
    """Raise Unavailable for a model of so many parameters."""
    if is_large(count):
        raise Unavailable("too large", f"more than {MAX_PARAMETERS:,} parameters")


@dataclass(frozen=True)
class Case:
    """A model, and what it is called with for a number of rows and a length."""

    make: Callable[[], nn.Module]
    batch: Batch


def given(**arguments: Any) -> Batch:
    """Describe a batch: a tuple is the shape of a random tensor, a function makes a value from rows and length."""
    return lambda rows, length: {name: _made(value, rows, length) for name, value in arguments.items()}


def _made(value: Any, rows: int, length: int) -> Any:
    if isinstance(value, tuple):
        return torch.randn(_sizes(value, rows, length))
    if isinstance(value, dict):
        return {name: _made(each, rows, length) for name, each in value.items()}
    if isinstance(value, list):
        return [_made(each, rows, length) for each in value]
    return value(rows, length) if callable(value) else value


def _sizes(shape: tuple[int | str, ...], rows: int, length: int) -> list[int]:
    return [{N: rows, L: length}[size] if isinstance(size, str) else size for size in shape]


def times(rows: int, length: int) -> torch.Tensor:
    """A time step for each row."""
    return torch.arange(rows) + 1


def ones(*shape: int | str, dtype: torch.dtype = torch.float32) -> Callable[[int, int], torch.Tensor]:
    """Ones, such as a mask of nothing."""
    return lambda rows, length: torch.ones(_sizes(shape, rows, length), dtype=dtype)


def indices(high: int, *shape: int | str) -> Callable[[int, int], torch.Tensor]:
    """Random integers below ``high``."""
    return lambda rows, length: torch.randint(high, _sizes(shape, rows, length))
