"""Normal form of arguments for compiled code, with all dimensions but the last flattened into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def as_rows(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Reshape inputs to [rows, hidden], and return them with a function to reshape the results back.

    One compilation then serves every rank. The first input sets the leading dimensions. Vectors, numbers and None are
    left as they are.
    """
    leading = args[0].shape[:-1]
    flat = [arg.reshape(-1, arg.shape[-1]) if isinstance(arg, torch.Tensor) and arg.ndim > 2 else arg for arg in args]

    def one(result: Any) -> Any:
        if result is None or result.ndim != 2 or len(leading) == 1:
            return result
        return result.reshape(*leading, result.shape[-1])

    def finish(results: Any) -> Any:
        return tuple(map(one, results)) if isinstance(results, tuple) else one(results)

    return flat, finish


def merged_shapes(whole: Sequence[int], part: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge adjacent dimensions of two shapes, of which the second broadcasts to the first, where it does so alike.

    ``[2, 5, 6, 8]`` and ``[2, 1, 1, 8]`` become ``[2, 30, 8]`` and ``[2, 1, 8]``.
    """
    sizes: list[int] = []
    parts: list[int] = []
    for size, own in zip(whole, (1,) * (len(whole) - len(part)) + tuple(part), strict=True):
        if size == 1:
            continue
        if sizes and (own == 1) == (parts[-1] == 1):
            sizes[-1], parts[-1] = sizes[-1] * size, parts[-1] * own
        else:
            sizes.append(size)
            parts.append(own)
    return sizes or [1], parts or [1]
