"""Calls of autograd functions: ``apply`` is written in Python up to torch 2.13, and in C from 2.14 on."""

from __future__ import annotations

import inspect
from typing import Any

from torch.autograd import Function

_APPLY: Any = inspect.getattr_static(Function, "apply")


def applied_class(method: Any) -> type[Function] | None:
    """Return ``cls`` if ``method`` is ``cls.apply`` of an autograd function that does not override it, else None."""
    owner = getattr(method, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, Function)):
        return None
    return owner if method == _APPLY.__get__(None, owner) else None
