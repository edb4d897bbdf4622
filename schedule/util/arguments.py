"""Keyword arguments that are nearly right: old names work and warn, misspelled ones are told the name."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from schedule.util.errors import NotApplicable, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def keywords_checked(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose keyword arguments are checked: ``@keywords_checked(old="new")``.

    A call with an old name works, with a DeprecationWarning.

    Raises:
        TypeError: a call has an argument that the function does not take, or both an old name and its new one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = kwargs
            for old in renamed.keys() & given.keys():
                new = renamed[old]
                if new in given:
                    raise TypeError(f"{function.__qualname__}() got {new}= and its old name {old}=")
                warnings.warn(f"{function.__qualname__}({old}=) is {new}= now", DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            if given.keys() - parameters.keys():
                refuse_unknown(function.__qualname__, given, parameters)
            return function(*args, **kwargs)

        return checked

    return decorate


def refuse_no_count(subject: str, value: object, least: int, *, fix: str, asked: str = "") -> None:
    """Raise NotApplicable unless ``value`` is an integer from ``least``; ``subject`` is ``steps is a number``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
        raise NotApplicable(f"{subject} from {least}, not {shown}", asked=asked, fix=fix)


def refuse_unknown(function: str, given: Collection[str], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise TypeError if a keyword is no parameter of a function, unless it takes any."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            near = did_you_mean(name, parameters) or f"it takes {', '.join(parameters)}"
            raise TypeError(f"{function}() has no argument {name!r}; {near}")
