"""Parts of the values that a trace sees: items of containers, fields of dataclasses."""

from __future__ import annotations

from typing import Any

import torch

from schedule.capture.recording.structure import attributes_beside, is_dataclass_value


class Placeholder:
    """Base of placeholders for objects. They have no parts: what is read of them becomes a node."""


class Tracked:
    """Base of the forms of lists and dicts in objects.

    Attributes:
        replaces: the class that the forward sees.
    """

    replaces: type

    def copy(self) -> Any:
        """Return a plain container of the forward's own, with guards on what it holds."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == (other.copy() if isinstance(other, Tracked) else other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return repr(self.copy())

    __hash__ = None  # type: ignore[assignment]


def is_record(value: Any) -> bool:
    """Check whether ``value`` is an instance of a dataclass, and no placeholder for one."""
    return not isinstance(value, Placeholder) and is_dataclass_value(value)


def parts(value: Any) -> list[Any]:
    """Return the items of a container or the fields set in a dataclass, or none."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, dict):
        return [*value.values(), *attributes_beside(value).values()]
    fields = value.__dataclass_fields__ if is_record(value) else ()
    return [getattr(value, name) for name in fields if hasattr(value, name)]
