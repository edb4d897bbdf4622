"""The reference of the public names of ``schedule`` besides the primitives, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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


def public_reference() -> str:
    """Every public name: functions, classes with their methods, errors."""
    return _reference(schedule)


def testing_reference() -> str:
    """Every public name of ``schedule.testing``."""
    return _reference(testing)


def huggingface_reference() -> str:
    """Every public name of ``schedule.huggingface``."""
    return _reference(huggingface)


def _reference(package: ModuleType) -> str:
    parts: list[str] = []
    for group, belongs in GROUPS.items():
        found = {name: value for name in package.__all__ if belongs(value := getattr(package, name))}
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
