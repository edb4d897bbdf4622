"""Names of all tensors inside the inputs or outputs of a model.

Outputs are tensors, tuples, mappings (``ModelOutput`` is one), dataclasses, and opaque objects such as caches. All are
flattened into one mapping, with paths such as ``past_key_values.layers.0.keys`` as its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from schedule.util.copying import copied_where_possible

Plain = int | float | bool | str | None
"""A value compared exactly. Tensors are compared within a tolerance."""


def named_values(value: object) -> dict[str, torch.Tensor | Plain]:
    """Return all tensors and plain values inside ``value`` by path.

    Objects other than containers are searched for tensors only: their flags and counters are internal.
    """
    return dict(_walk(value, "", set(), opaque=False))


def named_tensors(value: object) -> dict[str, torch.Tensor]:
    """Return only the tensors of :func:`named_values`."""
    return {name: leaf for name, leaf in named_values(value).items() if isinstance(leaf, torch.Tensor)}


def container_types(value: object) -> str:
    """Return the nested container types without the values, such as ``tuple[Tensor, dict[...]]``."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {container_types(item)}" for key, item in value.items())
        return f"{type(value).__name__}[{inner}]"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(container_types(item) for item in value)}]"
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _walk(value: object, path: str, seen: set[int], *, opaque: bool) -> Iterator[tuple[str, torch.Tensor | Plain]]:
    if isinstance(value, torch.Tensor):
        yield path or "output", value
        return
    if value is None or isinstance(value, bool | int | float | str):
        if not opaque:
            yield path or "output", value
        return
    if isinstance(value, nn.Module | type) or callable(value) or id(value) in seen:
        return
    seen.add(id(value))  # caches may point back at themselves
    items, opaque = _children(value, opaque)
    for name, item in items:
        yield from _walk(item, f"{path}.{name}" if path else str(name), seen, opaque=opaque)


def _children(value: object, opaque: bool) -> tuple[list[tuple[Any, object]], bool]:
    """Return the named parts of a container, and whether to collect only tensors from here on."""
    if isinstance(value, Mapping):
        return list(value.items()), opaque
    if isinstance(value, list | tuple):
        return list(enumerate(value)), opaque
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)], opaque
    attributes = dict(getattr(value, "__dict__", {}))
    for slot in getattr(type(value), "__slots__", ()):
        if isinstance(slot, str) and hasattr(value, slot):
            attributes[slot] = getattr(value, slot)
    return list(attributes.items()), True


_HUGE = 1e-3
"""Fraction of a dtype's largest number above which a value means "masked", like HF's ``finfo.min``."""


def limit_of(dtype: torch.dtype) -> float:
    """Return the absolute limit of ordinary numbers of ``dtype``: not masked, infinite or NaN."""
    return torch.finfo(dtype).max * _HUGE


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor on every rank, differentiably.

    Any other tensor is returned unchanged.
    """
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def copied(batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a copy of ``batch`` with gradients enabled on its floating tensors, and their leaves.

    The leaves receive the gradients. The copy holds a clone of each leaf, because models change inputs in place and
    a leaf does not allow that. Containers and caches keep their types.
    """
    memo: dict[int, Any] = {}
    leaves: dict[str, torch.Tensor] = {}
    with torch.enable_grad():
        for name, tensor in named_tensors(batch).items():
            leaf = tensor.detach().clone()
            if leaf.is_floating_point() or leaf.is_complex():
                leaves[name] = leaf.requires_grad_()
                leaf = leaf.clone()
            memo.setdefault(id(tensor), leaf)
    return copied_where_possible(batch, memo), leaves


def call(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` with a mapping as keywords, a tuple or list as positional arguments, or a single value."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def shapes_of(batch: Any) -> str:
    """Return the shapes of a batch on one line, such as ``input_ids [2, 16], attention_mask [2, 16]``."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named_tensors(batch).items())


def batch_text(batch: Any) -> str:
    """Return the dtypes and shapes of a batch on one line, such as ``input_ids int64 [2, 16], use_cache False``."""
    if isinstance(batch, torch.Tensor):
        shape = f"nested, {batch.size(0)} rows" if batch.is_nested else list(batch.shape)
        return f"{dtype_text(batch)} {shape}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {batch_text(value)}" for name, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return ", ".join(map(batch_text, batch))
    return repr(batch) if isinstance(batch, (bool, int, float, str, type(None))) else type(batch).__name__


def dtype_text(tensor: torch.Tensor) -> str:
    """Return the name of the dtype of ``tensor``, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")
