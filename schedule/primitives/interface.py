"""Checks of a replacement's signature against calls of the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from schedule.capture import Call, original_class
from schedule.util.errors import NotApplicable

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def refuse_other_interface(old: nn.Module, new: nn.Module, calls: Sequence[Call]) -> None:
    """Raise unless ``new`` accepts every recorded call of ``old``.

    Without recorded calls, only the parameters are compared.
    """
    signature = _signature(new.forward)
    if signature is None:
        return
    for call in calls:
        try:
            signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise _other_interface(old, new, signature, f"the recorded call does not fit: {error}") from None
    ours = _signature(old.forward)
    if calls or ours is None:
        return
    required = [p for p in ours.parameters.values() if p.kind in _POSITIONAL and p.default is p.empty]
    names = [p.name for p in ours.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    try:
        signature.bind(*required, **dict.fromkeys(names))
    except TypeError as error:
        raise _other_interface(old, new, signature, str(error)) from None


def _other_interface(old: nn.Module, new: nn.Module, signature: inspect.Signature, why: str) -> NotApplicable:
    was = inspect.signature(old.forward)
    return NotApplicable(
        f"the replacement has another signature; {why}",
        where=f"{original_class(old).__name__}.forward{was}\n{original_class(new).__name__}.forward{signature}",
        fix="give the replacement's forward the same parameters, or **kwargs",
    )


def call_arguments(
    function: Callable[..., Any], name: str, inputs: Mapping[str, Any], scalars: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of ``function`` in place of a pattern.

    Inputs are passed by name if it has parameters of all their names, else in order. Constants are passed by keyword,
    to the parameters of those names.

    Raises:
        NotApplicable: they do not fit.
    """
    signature = _signature(function)
    if signature is None and not inputs:
        raise NotApplicable(
            f"the pattern names no inputs to call {name} with",
            fix="give find() a function of them: def pattern(x): return call_module(…)(x)",
        )
    if signature is None:
        return tuple(inputs.values()), {}
    parameters = signature.parameters
    named = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    kwargs = {n: value for n, value in scalars.items() if n in named or everything}
    args: tuple[Any, ...] = tuple(inputs.values())
    if named.issuperset(inputs):
        args, kwargs = (), {**inputs, **kwargs}
        order = [n for n in parameters if n in kwargs]
        kwargs = {n: kwargs[n] for n in order} | kwargs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*inputs, *(f"{n}=…" for n in scalars)]
        raise NotApplicable(
            f"the replacement {name} has another signature than the pattern: {error}",
            where=f"the pattern gives ({', '.join(given)})\n{name}{signature}",
            fix="give it one parameter for each input of the pattern, and keywords named like its scalars",
        ) from None
    return args, kwargs


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # many C functions have none
        return None
