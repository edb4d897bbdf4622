"""Repair of batches with the sizes in a model's error messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch

Batch = dict[str, torch.Tensor]


def repaired(batch: Batch, error: Exception) -> Iterator[Batch]:
    """Yield copies of ``batch`` with its sizes replaced by the sizes expected in the message of ``error``.

    Yields none if no known message matches, or if no size would change.
    """
    for pattern, repair in _REPAIRS:
        found = pattern.search(str(error))
        if found is not None:
            changed = repair(batch, *(int(number) for number in re.findall(r"\d+", " ".join(found.groups()))))
            if any(value.shape != batch[name].shape for name, value in changed.items()):
                yield {**batch, **changed}


def resized(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    """Return ``tensor`` truncated or repeated to ``size`` along ``dimension``."""
    indices = torch.arange(size, device=tensor.device) % tensor.shape[dimension]
    return tensor.index_select(dimension, indices)


def _everywhere(batch: Batch, old: int, new: int, *, whole: bool | None = None, only: int | None = None) -> Batch:
    """Resize all dimensions of size ``old`` to ``new``, except the batch dimension.

    Args:
        whole: resize only non-floating tensors if True, only floating ones if False.
        only: resize only this dimension.
    """
    changed = {}
    for name, value in batch.items():
        if whole in (None, not value.is_floating_point()):
            for dimension in range(1, value.ndim):
                if value.shape[dimension] == old and only in (None, dimension, dimension - value.ndim):
                    value = resized(value, dimension, new)
        changed[name] = value
    return changed


def _product(batch: Batch, rows: int, values: int, wanted: int, width: int) -> Batch:
    """Resize the last dimension for a matrix product."""
    return _everywhere(batch, values, wanted, whole=False, only=-1)


def _normalized(batch: Batch, wanted: int, *given: int) -> Batch:
    """Resize the last dimension for a norm."""
    return _everywhere(batch, given[-1], wanted, whole=False, only=-1)


def _channels(batch: Batch, wanted: int, given: int) -> Batch:
    """Resize the channel dimension for a convolution."""
    return _everywhere(batch, given, wanted, whole=False, only=1)


def _multiple(batch: Batch, of: int, given: int) -> Batch:
    return _everywhere(batch, given, math.ceil(given / of) * of)


def _given_first(batch: Batch, given: int, of: int) -> Batch:
    return _multiple(batch, of, given)


def _divided(batch: Batch, *numbers: int) -> Batch:
    """Extend a long signal to a multiple of the frame size.

    The frame size and the number of elements are the last two numbers of the message.
    """
    *_, frame, size = numbers
    longest = {name: value for name, value in batch.items() if value.numel() == size and value.is_floating_point()}
    return {
        name: resized(value, -1, math.ceil(value.shape[-1] / frame) * frame) if name in longest else value
        for name, value in batch.items()
    }


def _added(batch: Batch, given: int, wanted: int, dimension: int) -> Batch:
    """Resize text, or images, to the size of the other operand of an addition.

    A size of 1 broadcasts already.
    """
    if 1 in (given, wanted):
        return batch
    if dimension == 1:
        return _everywhere(batch, given, wanted, whole=True, only=1)
    return _everywhere({n: v for n, v in batch.items() if v.ndim > dimension}, given, wanted, whole=False)


def _scaled(batch: Batch, *numbers: int) -> Batch:
    """Resize images in proportion to the expected and given sizes.

    The model may combine several images before it checks their size.
    """
    height, width, wanted_height, wanted_width = numbers
    changed = {}
    for name, value in batch.items():
        if value.ndim >= 4:
            value = resized(value, -2, max(1, value.shape[-2] * wanted_height // height))
            value = resized(value, -1, max(1, value.shape[-1] * wanted_width // width))
        changed[name] = value
    return changed


_REPAIRS: list[tuple[re.Pattern[str], Callable[..., Batch]]] = [
    (re.compile(pattern, re.DOTALL), repair)
    for pattern, repair in (
        (r"cannot be multiplied \((\d+x\d+ and \d+x\d+)\)", _product),
        (r"to have (\d+) channels, but got (\d+) channels", _channels),
        (r"a multiple of [^()]*\(?(\d+)\)?,? but got (\d+)", _multiple),
        (r"(\d+) is not a multiple of (\d+)", _given_first),
        (r"shape '\[\d+, -1, (\d+)\]' is invalid for input of size (\d+)", _divided),
        (r"normalized_shape=\[(\d+)\].* input of size\[([\d, ]+)\]", _normalized),
        (r"image size \((\d+)\*(\d+)\) doesn't match model \((\d+)\*(\d+)\)", _scaled),
        (r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)", _added),
    )
]
