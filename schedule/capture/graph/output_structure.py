"""Structure of the outputs of submodule calls, as the rest of the graph relies on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from schedule.capture.guards.plain_values import is_record
from schedule.capture.recording.structure import attributes_beside, is_plain_dataclass, is_plain_mapping

_VALUES = (str, torch.dtype)


class Field(NamedTuple):
    """Step of a path to an attribute of a dataclass."""

    name: str

    def __repr__(self) -> str:
        return self.name


class Value(NamedTuple):
    """Kind of a string or dtype: the graph is made for this one alone."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


Path = tuple[Any, ...]
Expected = tuple[tuple[Path, Any], ...]
"""Paths in an output, each with its kind: ``"tensor"``, or its dtype if that is relied on, ``"object"``, ``"none"``, a
number of items, names of fields, or a :class:`Value`."""


def structure(value: Any, dtypes: bool = False) -> Expected:
    """Return the kinds of everything in the tracked output ``value``, before its caller may write to it.

    Args:
        value: the output.
        dtypes: whether the rest of the graph relies on the dtypes of its tensors.
    """
    is_checked = isinstance(value, (tuple, list, *_VALUES)) or is_plain_mapping(value) or _is_plain_record(value)
    return tuple(_structure(value, (), dtypes)) if is_checked or (dtypes and isinstance(value, torch.Tensor)) else ()


def _structure(value: Any, path: Path, dtypes: bool) -> Iterator[tuple[Path, Any]]:
    if value is None:
        yield path, "none"
    elif stands_for_tensor(value):
        yield path, value.dtype if dtypes and isinstance(value, torch.Tensor) else "tensor"
    elif isinstance(value, (tuple, list)):
        yield path, len(value)
        for index, item in enumerate(value):
            yield from _structure(item, (*path, index), dtypes)
    elif is_plain_mapping(value) and all(isinstance(key, str) for key in value):
        yield path, tuple(value)
        for key, item in value.items():
            yield from _structure(item, (*path, key), dtypes)
        for name, each in attributes_beside(value).items():
            yield from _structure(each, (*path, Field(name)), dtypes)
    elif _is_plain_record(value):
        for name in value.__dataclass_fields__:
            yield from _structure(getattr(value, name), (*path, Field(name)), dtypes)
    else:
        yield path, Value(value) if isinstance(value, _VALUES) else "object"


def stands_for_tensor(value: Any) -> bool:
    """Check whether ``value`` is a tensor, or an object in the place of one, such as weights that were never made."""
    return isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__")


def _is_plain_record(value: Any) -> bool:
    return is_record(value) and is_plain_dataclass(value)
