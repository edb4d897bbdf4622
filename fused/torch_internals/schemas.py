"""Side effects of torch's operators, as their schemas declare them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

_PROBABILITIES = ("p", "dropout_p", "dropout")
_NAMESPACES = ("aten", "prims", "prim")


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operator.

    Attributes:
        name: its name.
        position: its position; keyword-only parameters come last.
        default: its default; None without one.
        is_written: whether the operator changes it in place.
    """

    name: str
    position: int
    default: Any = field(compare=False)
    is_written: bool


def parameters(operator: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an operator, those of all its overloads if it is a packet; of anything else none."""
    if isinstance(operator, OpOverload):
        return _of_overload(operator)
    return _of_packet(operator) if isinstance(operator, OpOverloadPacket) else ()


@functools.lru_cache(maxsize=4096)
def _of_overload(operator: OpOverload) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(given.name, position, given.default_value, bool(given.alias_info and given.alias_info.is_write))
        for position, given in enumerate(operator._schema.arguments)
    )


@functools.lru_cache(maxsize=1024)
def _of_packet(packet: OpOverloadPacket) -> tuple[Parameter, ...]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return tuple(dict.fromkeys(parameter for overload in overloads for parameter in _of_overload(overload)))


@functools.lru_cache(maxsize=1024)
def aten_parameters(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of the aten operator of this name if it has one overload that returns new tensors."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return ()
    overloads = [each for each in packet.overloads() if "out" not in each]
    return _of_overload(getattr(packet, overloads[0])) if len(overloads) == 1 else ()


@functools.lru_cache(maxsize=1024)
def takes_no_tensor(name: str, parameter: str) -> bool:
    """Check whether the aten operators of this name have such a parameter, and none takes a tensor for it."""
    packet = getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet is not None else []
    types = [str(given.type) for schema in schemas for given in schema.arguments if given.name == parameter]
    return bool(types) and not any("Tensor" in each for each in types)


def is_custom(function: Any) -> bool:
    """Check whether ``function`` is an operator that torch did not define."""
    if isinstance(function, OpOverload):
        return function.namespace not in _NAMESPACES
    return isinstance(function, OpOverloadPacket) and function._qualified_op_name.split("::")[0] not in _NAMESPACES


def given_argument(parameter: Parameter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of a call for ``parameter``, or its default."""
    if parameter.name in kwargs:
        return kwargs[parameter.name]
    return args[parameter.position] if parameter.position < len(args) else parameter.default


def written_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of the operator changes in place."""
    for parameter in _written(operator):
        value = given_argument(parameter, args, kwargs)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


@functools.lru_cache(maxsize=4096)
def _written(operator: OpOverload) -> tuple[Parameter, ...]:
    return tuple(parameter for parameter in _of_overload(operator) if parameter.is_written)


def may_raise(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call of the operator may raise because of the data of its tensors.

    An operator that returns nothing is an assertion. Matrix decompositions fail on singular matrices. Integers given
    beside the first argument are indices, labels or lengths, which may be out of range.
    """
    if not operator._schema.returns or _is_decomposition(operator):
        return not _written(operator)
    if torch.Tag.pointwise in operator.tags:
        return False
    first = args[0] if args else None
    if torch.Tag.dynamic_output_shape in operator.tags and _has_integers(first):
        return True
    given = ((each.name, given_argument(each, args, kwargs)) for each in _of_overload(operator) if each.position)
    return any(_has_integers(value) or (name == "target" and value is not None) for name, value in given)


@functools.lru_cache(maxsize=4096)
def _is_decomposition(operator: OpOverload) -> bool:
    return operator._schema.name.split("::")[1].lstrip("_").startswith(("linalg", "cholesky"))


def _has_integers(value: Any) -> bool:
    """Check whether ``value`` is or contains an integer tensor."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_integers, value))
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def is_drawing(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a call of the operator draws random numbers. A dropout of probability 0 does not."""
    chances = _chances(operator)
    return chances is not None and not any(_is_zero(given_argument(chance, args, kwargs)) for chance in chances)


def _is_zero(chance: Any) -> bool:
    return isinstance(chance, (int, float)) and chance == 0


@functools.lru_cache(maxsize=4096)
def _chances(operator: OpOverload) -> tuple[Parameter, ...] | None:
    """Return the parameters that are probabilities of a random operator, or None if it is not random."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return None
    return tuple(parameter for parameter in _of_overload(operator) if parameter.name in _PROBABILITIES)
