"""Sizes that a module keeps in its attributes, as they appear in its traced forward."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from schedule.recording import Recording
from schedule.tracing.specialisation import Specialisation, original_class, specialise


class Setting(int):
    """A size that was read from an attribute of the traced module."""

    name: str

    def __new__(cls, value: int, name: str) -> Setting:
        """``value``, remembering ``name``."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    __hash__ = int.__hash__


def _plain(name: str) -> Any:
    """An operator that takes a setting for the plain number it is: symbolic sizes know no subclasses of int."""
    operation, reflected = getattr(operator, name, None), False
    if operation is None:
        operation, reflected = getattr(operator, name.replace("__r", "__", 1)), True

    def apply(self: Setting, other: Any) -> Any:
        other = int(other) if isinstance(other, Setting) else other
        return operation(other, int(self)) if reflected else operation(int(self), other)

    return apply


for _operator in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Setting, f"__{_operator}__", _plain(f"__{_operator}__"))
    setattr(Setting, f"__r{_operator}__", _plain(f"__r{_operator}__"))
for _operator in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Setting, f"__{_operator}__", _plain(f"__{_operator}__"))


def whole_forward(caller: nn.Module, recording: Recording) -> Specialisation:
    """The forward of ``caller`` as recorded; its own integer attributes appear as :class:`Setting`.

    Raises:
        TraceError: it cannot be traced.
    """
    with _settings_marked(caller):
        forward = original_class(caller).forward
        return specialise(caller, forward, recording.calls[caller][0], recording, False)


@contextmanager
def _settings_marked(module: nn.Module) -> Iterator[None]:
    plain = {name: value for name, value in vars(module).items() if type(value) is int}
    try:
        vars(module).update({name: Setting(value, name) for name, value in plain.items()})
        yield
    finally:
        vars(module).update(plain)


def settings_in(size: Any) -> Iterator[Setting]:
    """The settings in a size: itself, or the factors of a product or quotient."""
    if isinstance(size, Setting):
        yield size
    elif isinstance(size, fx.Node) and getattr(size.target, "__name__", "") in ("mul", "floordiv"):
        for operand in size.args:
            yield from settings_in(operand)
