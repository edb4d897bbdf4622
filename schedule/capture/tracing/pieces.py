"""Guards on the number of tensors returned by ``unbind``, ``split`` and ``chunk``, because the graph unpacks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNBINDING, _CHUNKING = ("unbind", "__iter__"), ("chunk", "unsafe_chunk")
_SPLITTING = ("split", "unsafe_split")


def guard_number(
    shape: Callable[[torch.Tensor], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Guard on the number of tensors returned by ``x.unbind()``, ``x.split(n)`` or ``x.chunk(n)``."""
    name = getattr(func, "__name__", "")
    if name not in (*_UNBINDING, *_CHUNKING, *_SPLITTING):
        return
    tensor, *rest = args if args else (kwargs.get("input", kwargs.get("tensor")),)
    given: Any = None
    if name not in _UNBINDING:
        names = ("split_size", "split_size_or_sections") if name in _SPLITTING else ("chunks",)
        given = rest.pop(0) if rest else next(kwargs[key] for key in names if key in kwargs)
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if isinstance(given, (int, torch.SymInt)) or name in _UNBINDING:
        int(_number(name, shape(tensor)[dim], given))


def _number(name: str, size: Any, given: Any) -> Any:
    if name in _UNBINDING or size == 0:
        return size
    length = given if name in _SPLITTING else _pieces(size, given)
    return _pieces(size, length)


def _pieces(size: Any, length: Any) -> Any:
    """Return the number of pieces of ``length`` to cover ``size``."""
    return (size + length - 1) // length
