"""Registration of schedule functions as primitives, with located errors and one undoable step each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from schedule.util.arguments import refuse_unknown
from schedule.util.errors import ScheduleError, located

if TYPE_CHECKING:
    from schedule.core.node import NodeT

P = ParamSpec("P")
R = TypeVar("R")

_primitives: dict[str, Callable[..., Any]] = {}
_reserved: set[str] = set()


def primitive(function: Callable[Concatenate[NodeT, P], R]) -> Callable[Concatenate[NodeT, P], R]:
    """Register ``function(sch, ...)`` as a primitive and as a method of schedules and groups.

    The function checks first and changes the model through other primitives, or through ``sch.commit(edits)``.
    If it raises, all its changes are reverted; if not, it is one step of ``sch.history``, whatever it called::

        @schedule.primitive
        def no_dropout(sch: Schedule) -> None:
            \"\"\"Every dropout becomes an identity.\"\"\"
            sch.replace_all(nn.Dropout, lambda path, module: nn.Identity())

        sch["transformer.h.*"].no_dropout()

    Raises:
        ScheduleError: another primitive has this name.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def method(sch: NodeT, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = _bound(function.__name__, signature, sch, args, kwargs)
        asked = call_text(function, arguments)
        with (
            located(asked, sch.label),
            sch.tree.history.transaction(function.__name__, [sch.path], arguments, f"{asked} on {sch.label}"),
        ):
            return function(sch, *args, **kwargs)

    return _registered(function, method)


def query(function: Callable[Concatenate[NodeT, P], R]) -> Callable[Concatenate[NodeT, P], R]:
    """Register a read-only primitive, without a step in the history."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def method(sch: NodeT, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = _bound(function.__name__, signature, sch, args, kwargs)
        with located(call_text(function, arguments), sch.label):
            return function(sch, *args, **kwargs)

    return _registered(function, method)


def _registered(function: Callable[..., Any], method: Callable[..., R]) -> Callable[..., R]:
    name = function.__name__
    if name in _primitives or name in _reserved:
        raise ScheduleError(f"there is a primitive or a method {name!r} already", fix="give the function another name")
    _primitives[name] = method
    method.__signature__ = _as_users_read_it(inspect.signature(function))  # type: ignore[attr-defined]
    return method


def _as_users_read_it(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a primitive for ``help``, with ``Schedule`` in place of nodes."""

    def named(annotation: Any) -> Any:
        return "Schedule" if annotation in ("Node", "NodeT") else annotation

    parameters = [each.replace(annotation=named(each.annotation)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=named(signature.return_annotation))


def reserve(names: Iterable[str]) -> None:
    """Reserve names of methods, forbidden for new primitives."""
    _reserved.update(names)


def unregister(name: str) -> None:
    """Remove a user's primitive from the registry."""
    _primitives.pop(name, None)


def registered() -> Mapping[str, Callable[..., Any]]:
    """Return all primitives by name."""
    return dict(_primitives)


def list_primitives() -> dict[str, str]:
    """Return name → one-line summary of every primitive."""
    return {name: (inspect.getdoc(f) or "").partition("\n")[0] for name, f in sorted(_primitives.items())}


def _bound(name: str, signature: inspect.Signature, sch: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by name, without the schedule, or raise TypeError."""
    refuse_unknown(name, kwargs, signature.parameters)
    bound = signature.bind(sch, *args, **kwargs)
    return dict(list(bound.arguments.items())[1:])


def call_text(primitive: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Format a call for steps and errors, such as ``find(bias_gelu, expect=1)``.

    Arguments of parameters with a default are written by keyword.

    Args:
        primitive: the called primitive.
        arguments: by parameter name, without the schedule.
    """
    parameters, given = inspect.signature(primitive).parameters, list[str]()
    for name, value in arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given += [f"{key}={_text(item)}" for key, item in value.items()]
        elif text := _text(value):
            given.append(text if parameters[name].default is inspect.Parameter.empty else f"{name}={text}")
    return f"{primitive.__name__}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(dict.fromkeys(filter(None, map(_text, value))))
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    name = getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__
    return str(name)
