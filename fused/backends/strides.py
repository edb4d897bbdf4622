"""Strides of elementwise results, by the rule of torch's ``TensorIterator``: those of the operands, without gaps.

Kernels read rows and write rows. To give their results the strides of eager torch, the dimensions of their inputs are
permuted to the order in memory first, and those of the results back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused.backends.tracing import PLAIN

Tensor = torch.Tensor
Operands = Sequence[Any]
"""Operands in the order of the formula; those that are not tensors do not count."""
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def memory_order(operands: Operands) -> tuple[int, ...]:
    """Return the dimensions of the elementwise result of these operands, from the slowest to the fastest."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    layouts = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
    if torch.compiler.is_compiling() or any(type(tensor) not in PLAIN for tensor in tensors):
        return _order(layouts)  # sizes may be symbols
    return _known_order(layouts)


def _order(layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    shape = torch.broadcast_shapes(*(shape for shape, _ in layouts))
    strides = [_broadcast_strides(layout, shape) for layout in layouts]
    fastest_first = list(reversed(range(len(shape))))
    for start in range(1, len(shape)):
        # Insertion sort as torch does it: dimensions that no operand tells apart are skipped, not a reason to stop.
        at = start
        for before in range(start - 1, -1, -1):
            compared = _compared(fastest_first[before], fastest_first[at], shape, strides)
            if compared < 0:
                break
            if compared > 0:
                fastest_first[before], fastest_first[at] = fastest_first[at], fastest_first[before]
                at = before
    return tuple(fastest_first[::-1])


_known_order = functools.lru_cache(maxsize=4096)(_order)


def _broadcast_strides(layout: Layout, shape: Sequence[int]) -> list[int]:
    leading = len(shape) - len(layout[0])
    sizes = zip(layout[0], shape[leading:], layout[1], strict=True)
    return [0] * leading + [0 if size == 1 and size != whole else stride for size, whole, stride in sizes]


def _compared(fast: int, slow: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Return −1 if the dimension `fast` is the faster one, 1 if `slow` is, by the first operand that tells, else 0."""
    for stride in strides:
        if stride[fast] == 0 or stride[slow] == 0:
            continue
        if stride[fast] != stride[slow]:
            return -1 if stride[fast] < stride[slow] else 1
        if shape[fast] > shape[slow]:
            return 1
    return 0


def in_memory_order(
    args: Sequence[Any], operands: Operands, *, last: bool = True
) -> tuple[Sequence[Any], Callable[[Any], Any] | None]:
    """Permute inputs to the order in memory of the elementwise result of the operands.

    Args:
        args: tensors, numbers and None; the rank of the first counts. Vectors are left as they are.
        operands: see `memory_order`; at least one is a tensor.
        last: whether the last dimension stays the last.

    Returns:
        The inputs, and a function that permutes results of their rank back, and copies them if the last dimension is
        not the fastest in memory; or None if the operands are contiguous.
    """
    for operand in operands:
        if isinstance(operand, Tensor) and not operand.is_contiguous():
            break
    else:
        return args, None
    rank = args[0].ndim
    wanted = memory_order(operands)
    order = [*(dim for dim in wanted if dim != rank - 1), rank - 1] if last else list(wanted)

    def permuted(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or arg.ndim < 2:
            return arg
        return arg.reshape((1,) * (rank - arg.ndim) + arg.shape).permute(order)

    def one(result: Tensor | None) -> Tensor | None:
        if result is None or result.ndim != rank:
            return result
        return _permuted_back(_permuted_back(result, order).permute(wanted).contiguous(), wanted)

    def finish(results: Any) -> Any:
        return tuple(map(one, results)) if isinstance(results, tuple) else one(results)

    return [permuted(arg) for arg in args], finish


def _permuted_back(tensor: Tensor, order: Sequence[int]) -> Tensor:
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def owned(results: Any) -> Any:
    """Return new results of kernels as tensors that are no views.

    They may then be changed in place after an autograd function has returned them.
    """
    if isinstance(results, tuple):
        return tuple([one if one is None or one._base is None else one.data for one in results])
    return results if results._base is None else results.data


def channels_last_of(x: Tensor) -> torch.memory_format | None:
    """Return the channels-last format if torch suggests it for the strides of x (``c10/core/MemoryFormat.h``)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats[x.ndim] if x.ndim in formats and _has_channels_last(x) else None


def _has_channels_last(x: Tensor) -> bool:
    sizes, strides, least = x.shape, x.stride(), 0
    if strides[1] == 0:
        return False
    for dim in (1, *range(x.ndim - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * sizes[dim]
    return True
