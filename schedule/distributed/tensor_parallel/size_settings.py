"""Sizes read from a module's attributes in its traced forward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from schedule.capture import Recording, Specialization, original_class, specialize
from schedule.distributed.tensor_parallel.sharded_modules import Projection, projection_of


class Derived(int):
    """A size computed in the traced forward from sizes read from attributes.

    Attributes:
        names: names of these attributes.
    """

    names: frozenset[str]
    _operation: Callable[[Any, Any], Any]
    _operands: tuple[int, int]

    @classmethod
    def of(cls, operation: Callable[[Any, Any], Any], one: int, other: int) -> Derived:
        """Return the result of ``operation`` together with its operands."""
        made = cls(operation(int(one), int(other)))
        made._operation, made._operands = operation, (one, other)
        made.names = frozenset(name for each in (one, other) if isinstance(each, Derived) for name in each.names)
        return made

    def given(self, values: Mapping[str, int]) -> int:
        """Return the size for other attribute values. Attributes missing from ``values`` keep their recorded value."""
        one, other = (each.given(values) if isinstance(each, Derived) else each for each in self._operands)
        result: int = self._operation(one, other)
        return result

    def settings(self) -> Iterator[Setting]:
        """Yield the settings among the operands, recursively."""
        for each in self._operands:
            if isinstance(each, Derived):
                yield from each.settings()

    __hash__ = int.__hash__


class Setting(Derived):
    """A size read from an attribute of the traced module."""

    def __new__(cls, value: int, name: str) -> Setting:
        """Create the size ``value`` read from the attribute ``name``."""
        made = super().__new__(cls, value)
        made.names = frozenset((name,))
        return made

    @property
    def name(self) -> str:
        """Name of the attribute."""
        (name,) = self.names
        return name

    def given(self, values: Mapping[str, int]) -> int:
        """Return the attribute's value from ``values``, or else the recorded one."""
        return values.get(self.name, int(self))

    def settings(self) -> Iterator[Setting]:
        """Yield only this setting."""
        yield self

    __hash__ = int.__hash__


def _remembering(name: str) -> Any:
    """Return an operator method of :class:`Derived` to compute on plain ints and return integer results as sizes.

    The operation runs on plain ints because symbolic sizes do not support subclasses of int.
    """
    operation, reflected = getattr(operator, name, None), False
    if operation is None:
        operation, reflected = getattr(operator, name.replace("__r", "__", 1)), True

    def apply(self: Derived, other: Any) -> Any:
        plain = int(other) if isinstance(other, Derived) else other
        result = operation(plain, int(self)) if reflected else operation(int(self), plain)
        if type(result) is not int or not isinstance(other, int):
            return result
        return Derived.of(operation, *((other, self) if reflected else (self, other)))

    return apply


for _operator in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(Derived, f"__{_operator}__", _remembering(f"__{_operator}__"))
    setattr(Derived, f"__r{_operator}__", _remembering(f"__r{_operator}__"))
for _operator in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Derived, f"__{_operator}__", _remembering(f"__{_operator}__"))


def whole_forward(caller: nn.Module, recording: Recording) -> Specialization:
    """Trace the forward of ``caller`` as recorded, with its integer attributes as :class:`Setting`.

    The output sizes of the projections below ``caller`` are settings too, under names such as
    ``q_proj.out_features``.

    Raises:
        TraceError: the forward cannot be traced.
    """
    with _settings_marked(caller):
        forward = original_class(caller).forward
        return specialize(caller, forward, recording.calls[caller][0], recording, False)


@contextmanager
def _settings_marked(caller: nn.Module) -> Iterator[None]:
    plain = [(caller, name, name, value) for name, value in vars(caller).items() if type(value) is int]
    for path, child in caller.named_modules():
        projection = projection_of(child)
        if projection is not None:
            name = projection.out_features
            plain.append((child, name, outputs_of(path, projection), getattr(child, name)))
    try:
        for module, name, marked, value in plain:
            vars(module)[name] = Setting(value, marked)
        yield
    finally:
        for module, name, _, value in plain:
            vars(module)[name] = value


def outputs_of(path: str, projection: Projection) -> str:
    """Return the name of the setting for the number of outputs of a projection."""
    return f"{path}.{projection.out_features}"


def settings_in(size: Any) -> Iterator[Setting]:
    """Yield the settings in a size: the size itself, or the factors of a product or quotient."""
    if isinstance(size, Setting):
        yield size
    elif isinstance(size, fx.Node) and getattr(size.target, "__name__", "") in ("mul", "floordiv"):
        for operand in size.args:
            yield from settings_in(operand)
