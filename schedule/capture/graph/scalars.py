"""Sizes and other Python numbers with a known origin in the graph.

A size read from a traced tensor is a real ``torch.SymInt`` (or ``SymFloat``, ``SymBool``), so every torch
function accepts it in place of an int. Its ``node`` is a :class:`ScalarNode`, which computes with the recorded
value and writes each operation into the graph. When Python needs the number itself (an ``if``, a ``range``,
an index), the tracer adds a guard.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from schedule.capture.graph.trace_interface import Trace
from schedule.util.internal_errors import perform

Number = int | float | bool
_HASH = torch.SymInt.__hash__.__code__
SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class ScalarNode:
    """Implementation of torch's node protocol for SymInt, SymFloat and SymBool.

    Args:
        tracer: the tracer whose graph ``node`` is in.
        node: the graph node that computes the number.
        value: the number in the recorded run.
    """

    def __init__(self, tracer: Trace, node: fx.Node | Number, value: Number) -> None:
        self.tracer, self.node, self.value = tracer, node, value

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return isinstance(self.value, float)

    def is_bool(self) -> bool:
        return isinstance(self.value, bool)

    def is_nested_int(self) -> bool:
        return sys._getframe(1).f_code is _HASH  # the only kind of SymInt that torch hashes

    def nested_int(self) -> Any:
        return self.known()

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def clone(self) -> ScalarNode:
        return self

    def _wrap(self, value: Number) -> ScalarNode:
        return ScalarNode(self.tracer, value, value)

    wrap_int = wrap_float = wrap_bool = _wrap

    def known(self, *_: Any) -> Any:
        """Return the number itself for use by Python, and guard on it."""
        if isinstance(self.node, fx.Node):
            self.tracer.guard(self.node, self.value)
        return self.value

    guard_int = guard_float = guard_bool = int_ = bool_ = guard_size_oblivious = known
    expect_true = expect_size = guard_or_false = guard_or_true = statically_known_true = known

    def _text(self) -> str:
        return self.tracer.strings.of(self)

    str = _graph_repr = __str__ = _text

    def __repr__(self) -> str:  # type: ignore[valid-type]
        return f"<{self.value}>"

    def compute(self, function: Callable[..., Number], *others: ScalarNode) -> ScalarNode:
        """Apply ``function`` to this number and ``others``, and write it into the graph."""
        value = function(self.value, *(other.value for other in others))
        operands = (self.node, *(other.node for other in others))
        if not any(isinstance(operand, fx.Node) for operand in operands):
            return self._wrap(value)
        return ScalarNode(self.tracer, self.tracer.emit_scalar(function, operands, value), value)

    def round(self, ndigits: int | None = None) -> ScalarNode:
        """Round as Python does. torch hands the number of digits as it is."""
        return self.compute(round, *(() if ndigits is None else (self._wrap(ndigits),)))

    def is_integer(self) -> ScalarNode:
        return self.compute(is_whole)

    def sym_ite(self, then: ScalarNode, otherwise: ScalarNode) -> ScalarNode:
        return then if self.known() else otherwise


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mod": operator.mod,
    "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "pow": operator.pow,
    "pow_by_natural": operator.pow,
    "float_pow": operator.pow,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and_": operator.and_,
    "or_": operator.or_,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "sym_not": operator.not_,
    "sym_float": float,
    "sym_int": int,
    "sym_max": max,
    "sym_min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    "sym_sqrt": math.sqrt,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}


def _operation(function: Callable[..., Number]) -> Callable[..., ScalarNode]:
    def method(self: ScalarNode, *others: ScalarNode) -> ScalarNode:
        return self.compute(function, *others)

    return method


for _name, _function in _OPERATIONS.items():
    setattr(ScalarNode, _name, _operation(_function))


def symbolic(tracer: Trace, node: fx.Node, value: Number) -> Any:
    """Return ``value`` as a SymInt, SymFloat or SymBool computed by ``node``."""
    scalar: Any = ScalarNode(tracer, node, value)
    if isinstance(value, bool):
        return torch.SymBool(scalar)
    return torch.SymInt(scalar) if isinstance(value, int) else torch.SymFloat(scalar)


def scalar_of(value: Any) -> ScalarNode | None:
    """Return the :class:`ScalarNode` of a symbolic number, else None."""
    if isinstance(value, SYMBOLIC_TYPES) and isinstance(value.node, ScalarNode):
        return value.node
    return None


def computed(tracer: Trace, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without effects on numbers, some of them symbolic.

    A number that it returns is computed by the graph; anything else binds the graph to the numbers given.
    """
    scalars = [scalar_of(each) for each in args]
    numbers = (each if scalar is None else scalar.value for each, scalar in zip(args, scalars, strict=True))
    value = perform(function, *numbers)
    if type(value) in (bool, int, float):
        return symbolic(tracer, tracer.emit_scalar(function, tracer.as_nodes(args), value), value)
    for scalar in scalars:
        if scalar is not None:
            scalar.known()
    return value


def is_whole(number: float) -> bool:
    """Check whether ``number`` has no fraction (graph target)."""
    return number.is_integer()


def of_number(name: str, number: Number, *args: Any) -> Any:
    """Return an attribute of a number, or the result of its method (graph target)."""
    found = getattr(number, name)
    return found(*args) if callable(found) else found


class NumberMethod:
    """Method of Python's numbers, bound to a symbolic one."""

    def __init__(self, number: Any, name: str) -> None:
        self.number, self.name = number, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scalar: ScalarNode = self.number.node
        if kwargs:
            return getattr(scalar.known(), self.name)(*args, **kwargs)
        return computed(scalar.tracer, of_number, self.name, self.number, *args)


def attribute_of_number(number: Any, name: str) -> Any:
    """Return attribute ``name`` of a symbolic number, as a Python number has it."""
    scalar: ScalarNode = number.node
    if hasattr(type(number), name) or not hasattr(scalar.value, name):
        return getattr(number, name)
    if callable(getattr(scalar.value, name)):
        return NumberMethod(number, name)
    return computed(scalar.tracer, of_number, name, number)
