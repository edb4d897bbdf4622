"""Methods that ``dataclasses`` generates, whose code has no source to follow."""

from __future__ import annotations

import dataclasses
import inspect
import types
from typing import Any, Protocol

from schedule.capture.tracing.reading.resolution import ABSENT


class _Evaluator(Protocol):
    def attr(self, owner: Any, name: str) -> Any: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any: ...
    def eq(self, a: Any, b: Any) -> Any: ...
    def resolve(self, cls: type, name: str) -> Any: ...
    def set_attr(self, owner: Any, name: str, value: Any) -> None: ...
    def truth(self, value: Any) -> Any: ...


def fields_of(function: types.FunctionType, instance: Any) -> dict[str, Any] | None:
    """Return the fields that a generated method of ``instance`` is about, or None for any other function."""
    bases = type(instance).__mro__
    holder = next((base for base in bases if vars(base).get(function.__name__) is function), None)
    fields = None if holder is None else vars(holder).get("__dataclass_fields__")
    return fields if function.__code__.co_filename.startswith("<") else None


def equal(evaluator: _Evaluator, fields: dict[str, Any], one: Any, other: Any) -> Any:
    """Compare two objects field by field, as the generated ``__eq__`` does."""
    if type(one) is not type(other):
        return NotImplemented
    names = (name for name, field in fields.items() if field.compare and field._field_type.name == "_FIELD")
    return all(evaluator.truth(evaluator.eq(evaluator.attr(one, n), evaluator.attr(other, n))) for n in names)


def initialize(
    evaluator: _Evaluator, function: types.FunctionType, fields: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Set the fields of a new object, and call its ``__post_init__``, as the generated constructor does.

    Args:
        evaluator: calls factories and ``__post_init__``.
        function: the constructor.
        fields: its fields.
        args: the object and its positional arguments.
        kwargs: its keyword arguments.
    """
    instance = args[0]
    bound = inspect.signature(function).bind(*args, **kwargs)
    given, passed_on = bound.arguments, []
    frozen = type(instance).__dataclass_params__.frozen
    for name, field in fields.items():
        kind = field._field_type.name
        if kind == "_FIELD_CLASSVAR" or (not field.init and field.default_factory is dataclasses.MISSING):
            continue
        if name in given:
            value = given[name]
        elif field.default_factory is not dataclasses.MISSING:
            value = evaluator.call(field.default_factory)
        else:
            value = field.default
        if kind == "_FIELD_INITVAR":
            passed_on.append(value)
        elif frozen:
            object.__setattr__(instance, name, value)
        else:
            evaluator.set_attr(instance, name, value)
    after = evaluator.resolve(type(instance), "__post_init__")
    if after is not ABSENT:
        evaluator.call(after, instance, *passed_on)
