"""Batches of other sizes made from one batch, to find rewrites that hold for the recorded sizes only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from schedule.util.copying import copied_where_possible
from schedule.util.named_values import named_tensors, named_values

# Their sizes belong to the architecture (image size, mel bins, axes of a grid), so only the number of rows varies.
_ROWS_ONLY = (
    *("pixel_values", "pixel_mask", "pixel_attention_mask", "spatial_shapes", "image_sizes", "merge_sizes", "bbox"),
    *("grid_thw", "image_grid_thw", "video_grid_thw", "image_grid_hw", "labels_onehot"),
    *("input_features", "input_features_mask", "feature_attention_mask", "input_values"),
)


_PRIMES = [n for n in range(5, 1000) if all(n % divisor for divisor in range(2, n))]


@dataclass(frozen=True)
class _Sizes:
    """Changes of sizes for one new batch: the number of rows, and each sequence length."""

    rows: tuple[int, int]
    lengths: dict[int, int]


def other_shapes(batch: Any, multiple: int = 1) -> list[Any]:
    """Return up to four batches like ``batch`` with other numbers of rows and other sequence lengths.

    In the last one, these sizes are primes, and differ from each other and from all other sizes of the batch, so that
    no two sizes agree by accident. Rows are repeated or dropped. Every dimension with a sequence length changes with
    it, consistently in all tensors of the batch, and positions continue. Sequence lengths are those of token ids, their
    masks and embeddings; of images and audio features, only the number of rows changes.

    Args:
        batch: inputs of the model: a mapping, tuple, list or tensor.
        multiple: of which the sequence lengths are, such as the number of ranks that share a sequence.

    Returns:
        Batches of the same structure. The list is empty for a batch with opaque values such as a cache, which has a
        size of its own.
    """

    def even(length: int) -> int:
        return -(-length // multiple) * multiple

    return _planned(
        batch,
        lambda rows: [
            (rows + 1, lambda n, rank: even(n + 3)),
            (rows - 1 or 2, lambda n, rank: even(max(2, n - 2))),
            (rows + 2, lambda n, rank: even(max(2, n // 2 + 1))),
            _apart(batch, multiple),
        ],
    )


def small_shapes(batch: Any) -> list[Any]:
    """Return two batches like those of :func:`other_shapes`, with few rows and short sequences, for cheap checks.

    Different sequence lengths stay different. In the first batch, they also differ from the number of rows and all
    other sizes.
    """
    taken = _taken(batch)
    return _planned(
        batch,
        lambda rows: [
            (3 if rows != 3 else 2, lambda n, rank: _free(min(n + 3, 13 + 4 * rank), taken | {2, 3})),
            (1 if rows != 1 else 2, lambda n, rank: max(2, min(n - 2, 8 + 3 * rank))),
        ],
    )


def _apart(batch: Any, multiple: int) -> tuple[int, Callable[[int, int], int]]:
    """Return a plan with primes as number of rows and lengths, all different from every size of the batch."""
    rows, *lengths = [n for n in _PRIMES if _taken(batch).isdisjoint((n, n * multiple))]
    return rows, lambda n, rank: lengths[rank + 1] * multiple


def _taken(batch: Any) -> set[int]:
    return {size for tensor in named_tensors(batch).values() for size in tensor.shape}


def _free(number: int, taken: set[int]) -> int:
    """Return the first number from ``number`` on outside ``taken``."""
    return next(n for n in itertools.count(number) if n not in taken)


def cut(batch: Any, rows: int, length: int) -> Any:
    """Return ``batch`` with at most ``rows`` rows and sequences of ``length``, or unchanged if it has opaque values."""
    found = _planned(batch, lambda now: [(min(now, rows), lambda n, rank: min(n, length))])
    return found[0] if found else batch


def _planned(batch: Any, plans: Callable[[int], list[tuple[int, Callable[[int, int], int]]]]) -> list[Any]:
    """Resize ``batch`` by plans: the number of rows, and a length from the old one and its rank among the lengths."""
    tensors = named_tensors(batch)
    if not tensors or _has_opaque(batch):
        return []
    rows = _rows(tensors)
    lengths = sorted(_lengths(tensors, rows))
    sizes = [
        _Sizes((rows, count), {n: change(n, rank) for rank, n in enumerate(lengths)}) for count, change in plans(rows)
    ]
    return [_resized(batch, tensors, each) for each in sizes]


def _has_opaque(batch: Any) -> bool:
    """Check for tensors in objects that are neither containers nor dataclasses."""
    if isinstance(batch, torch.Tensor) or batch is None or isinstance(batch, bool | int | float | str):
        return False
    if isinstance(batch, Mapping):
        return any(_has_opaque(item) for item in batch.values())
    if isinstance(batch, list | tuple):
        return any(_has_opaque(item) for item in batch)
    return any(isinstance(leaf, torch.Tensor) for leaf in named_values(batch).values())


def _rows(tensors: dict[str, torch.Tensor]) -> int:
    """Return the batch size: the first dimension of the first tensor with at least two."""
    return next((t.shape[0] for t in tensors.values() if t.ndim >= 2), next(iter(tensors.values())).numel())


def _lengths(tensors: dict[str, torch.Tensor], rows: int) -> set[int]:
    """Return the sequence lengths: dimension 1 of ids ``[batch, seq]`` and embeddings ``[batch, seq, hidden]``."""
    found = set()
    for name, tensor in tensors.items():
        is_ids = tensor.ndim == 2 and not tensor.is_floating_point()
        is_embedding = tensor.ndim == 3 and tensor.is_floating_point()
        if tensor.shape[:1] == (rows,) and (is_ids or is_embedding) and not _rows_only(name):
            found.add(tensor.shape[1])
    return {n for n in found if n > 1}


def _rows_only(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _ROWS_ONLY


def _resized(batch: Any, tensors: dict[str, torch.Tensor], sizes: _Sizes) -> Any:
    memo: dict[int, Any] = {id(t): _resize(name, t.detach(), sizes) for name, t in tensors.items()}
    return copied_where_possible(batch, memo)


def _resize(name: str, tensor: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
    old, new = sizes.rows
    first = tensor.shape[0] if tensor.ndim else None
    start = 0
    if first == old:
        tensor = tensor.index_select(0, torch.arange(new, device=tensor.device) % old)
        start = 1
    if _rows_only(name):
        return tensor.clone()
    last = 2 if tensor.ndim == 3 and tensor.is_floating_point() else tensor.ndim  # never the hidden size
    for dim in range(start, last):
        if tensor.shape[dim] in sizes.lengths:
            tensor = _resize_sequence(name, tensor, dim, sizes.lengths[tensor.shape[dim]])
    return tensor.clone()


def _resize_sequence(name: str, tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    old = tensor.shape[dim]
    index = torch.arange(length, device=tensor.device)
    if "position" in name and not tensor.is_floating_point() and length > old:
        further = torch.arange(1, length - old + 1, device=tensor.device)
        tail = tensor.narrow(dim, old - 1, 1) + further.view(-1, *(1,) * (tensor.ndim - dim - 1))
        return torch.cat([tensor, tail.to(tensor.dtype)], dim)
    is_mask = "mask" in name and tensor.ndim == 2
    # Padding stays at the end: a mask's last column goes on, content starts over.
    tensor = tensor.index_select(dim, index.clamp(max=old - 1) if is_mask else index % old)
    if is_mask and bool((tensor == 0).all(dim=dim).any()):
        tensor[:, 0] = 1  # trimming must not leave a row without any token
    return tensor
