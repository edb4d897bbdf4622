"""The reference of the public names of ``schedule`` besides the primitives, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

import schedule
import schedule.huggingface as huggingface
import schedule.testing as testing
from docs.generate.docstrings import documented, signature
from schedule.primitives.registry import registered

GROUPS = {
    "Functions": inspect.isfunction,
    "Classes": lambda value: inspect.isclass(value) and not issubclass(value, Exception),
    "Errors and warnings": lambda value: inspect.isclass(value) and issubclass(value, Exception),
}


FIRST = ("optimize", "create_schedule", "verify")
"""What most users need, and with it how to take it back."""


def public_reference() -> str:
    """Every public name: those that most users need, then functions, classes with their methods, errors."""
    parts = ["## First\n"]
    for name in FIRST:
        parts += [f"### {name}\n", *_about(f"schedule.{name}", getattr(schedule, name))]
    for name in ("undo", "undo_all"):
        member = getattr(schedule.Schedule, name)
        parts += [f"### Schedule.{name}\n", signature(f"sch.{name}", member), documented(member)]
    return "\n".join([*parts, _reference(schedule, without=FIRST)])


def testing_reference() -> str:
    """Every public name of ``schedule.testing``."""
    return _reference(testing)


def huggingface_reference() -> str:
    """Every public name of ``schedule.huggingface``."""
    return _reference(huggingface)


def _reference(package: ModuleType, without: Collection[str] = ()) -> str:
    parts: list[str] = []
    for group, belongs in GROUPS.items():
        found = {name: value for name in package.__all__ if belongs(value := getattr(package, name))}
        found = {name: value for name, value in found.items() if name not in without}
        parts += [f"## {group}\n"] if found else []
        for name, value in found.items():
            parts += [f"### {name}\n", *_about(f"{package.__name__}.{name}", value)]
    return "\n".join(parts)


def _about(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield signature(name, value)
        yield documented(value)
        return
    yield documented(value)
    if not issubclass(value, Exception):
        yield from _methods(value)


def _methods(owner: type[Any]) -> Iterator[str]:
    for name, member in vars(owner).items():
        if name.startswith("_") or name in registered() or not (inspect.getdoc(member) or ""):
            continue
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        if isinstance(member, property):
            yield f"#### {owner.__name__}.{name}\n"
            yield documented(member)
        elif inspect.isfunction(member):
            yield f"#### {owner.__name__}.{name}\n"
            yield signature(f".{name}", member, leave_out=["self", "cls"])
            yield documented(member)
