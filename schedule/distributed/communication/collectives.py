"""Collectives with the gradients that tensor parallelism gives them (Megatron-LM's f and g, and their kin).

Each function takes a plain local tensor and the name of a process group, so that a graph holds it as it is::

    x = copy_to_tensor_parallel(x, "tp")                # forward: x          backward: all-reduce
    y = reduce_from_tensor_parallel(F.linear(x, w), "tp")  # forward: all-reduce  backward: as it is

A dimension that the ranks cannot share evenly is cut as ``torch.chunk`` cuts it, the way DTensor does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import handle_torch_function, has_torch_function_unary

from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.communication.groups import exchanged, group_rank, group_size, stacked, summed, summed_part
from schedule.util.errors import ShardError

# -- without gradients --------------------------------------------------------------------------------------


def _own(x: Tensor, group: str, axis: int) -> Tensor:
    begin, end = chunk_bounds(x.shape[axis], group_size(group), group_rank(group))
    return x.narrow(axis, begin, end - begin).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, group: str, axis: int, size: int | None) -> Tensor:
    """Every rank's part of a dimension of ``size``; of equal parts if None."""
    own = x.shape[axis]
    step = own if size is None else -(-size // group_size(group))
    first = x.movedim(axis, 0)
    if own < step:
        first = torch.cat((first, first.new_zeros((step - own, *first.shape[1:]))))
    first = stacked(first, group)
    whole = first if size is None else first.narrow(0, 0, size)
    return whole.movedim(0, axis).contiguous()


def _sum_scattered(x: Tensor, group: str, axis: int) -> Tensor:
    divided_evenly(x.shape[axis], group_size(group), axis)
    return summed_part(x.movedim(axis, 0), group).movedim(0, axis).contiguous()


def _moved(x: Tensor, group: str, source: int, target: int) -> Tensor:
    """Shared out along ``source``; comes back shared out along ``target``."""
    ranks = group_size(group)
    divided_evenly(x.shape[target], ranks, target)
    parts = torch.stack(x.chunk(ranks, target))
    return torch.cat(exchanged(parts, group).unbind(), source).contiguous()


def divided_evenly(size: int, ranks: int, axis: int) -> int:
    """``size / ranks``.

    Raises:
        ShardError: it is not whole.
    """
    if size % ranks:
        raise ShardError(
            f"size {size} of axis {axis} cannot be shared evenly by {ranks} ranks",
            fix="pad that axis to a multiple of the ranks, or use all_reduce, which needs no even parts",
        )
    return size // ranks


# -- with gradients -----------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Reduce.apply(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Copy.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, axis: int, size: int | None) -> Tensor:
        return _gathered(x, group, axis, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.group, ctx.axis, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Scatter.apply(grad, ctx.group, ctx.axis), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, axis: int) -> Tensor:
        return _own(x, group, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.group, ctx.axis = inputs
        ctx.size = x.shape[ctx.axis]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Gather.apply(grad, ctx.group, ctx.axis, ctx.size), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, axis: int) -> Tensor:
        return _gathered(x, group, axis, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.group, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ReduceScatter.apply(grad, ctx.group, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, axis: int) -> Tensor:
        return _sum_scattered(x, group, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.group, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _GatherSequence.apply(grad, ctx.group, ctx.axis), None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, source: int, target: int) -> Tensor:
        return _moved(x, group, source, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.group, ctx.source, ctx.target = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Move.apply(grad, ctx.group, ctx.target, ctx.source), None, None, None


class _OnGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.function(grad), None


# -- as graphs name them ------------------------------------------------------------------------------------


def _leaf(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as one node of any trace that it is called in."""

    @functools.wraps(function)
    def called(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(x):
            result: Tensor = handle_torch_function(called, (x,), x, *args, **kwargs)
            return result
        return function(x, *args, **kwargs)

    return called


@_leaf
def copy_to_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """``x``, whole on every rank; its gradient is the sum over the ranks."""
    result: Tensor = _Copy.apply(x, group)
    return result


@_leaf
def reduce_from_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``; the gradient passes as it is."""
    result: Tensor = _Reduce.apply(x, group)
    return result


@_leaf
def gather_from_tensor_parallel(x: Tensor, group: str, axis: int = -1, size: int | None = None) -> Tensor:
    """Every rank's part of ``axis`` side by side; the gradient is this rank's part of it.

    Args:
        x: this rank's part.
        group: name of the process group.
        axis: the dimension that is shared out.
        size: of the whole dimension; None if all parts are equal.
    """
    result: Tensor = _Gather.apply(x, group, axis, size)
    return result


@_leaf
def scatter_to_tensor_parallel(x: Tensor, group: str, axis: int = -1) -> Tensor:
    """This rank's part of ``axis`` of ``x``, which is whole on every rank; gradients are gathered."""
    result: Tensor = _Scatter.apply(x, group, axis)
    return result


@_leaf
def gather_from_sequence_parallel(x: Tensor, group: str, axis: int) -> Tensor:
    """Every rank's part of ``axis`` side by side, for ranks that go on to compute different things.

    The gradient is the sum over the ranks of this rank's part (a reduce-scatter). Parts must be equal.
    """
    result: Tensor = _GatherSequence.apply(x, group, axis)
    return result


@_leaf
def reduce_scatter_to_sequence_parallel(x: Tensor, group: str, axis: int) -> Tensor:
    """This rank's part of ``axis`` of the sum over the ranks; gradients are gathered.

    Raises:
        ShardError: the ranks cannot share ``axis`` evenly.
    """
    result: Tensor = _ReduceScatter.apply(x, group, axis)
    return result


@_leaf
def move_in_tensor_parallel(x: Tensor, group: str, source: int, target: int) -> Tensor:
    """``x``, of which each rank has a part of dimension ``source``, with a part of ``target`` instead (all-to-all).

    Raises:
        ShardError: the ranks cannot share ``target`` evenly.
    """
    result: Tensor = _Move.apply(x, group, source, target)
    return result


@_leaf
def replicated_part(x: Tensor, group: str, axis: int, replicas: int, common: int = 0) -> Tensor:
    """This rank's part of ``axis`` of what every rank has whole.

    Args:
        x: whole.
        group: name of the process group.
        axis: the dimension that is shared out.
        replicas: how many ranks after one another have the same.
        common: how many of the last are every rank's.
    """
    size, rank, shared = group_size(group) // replicas, group_rank(group) // replicas, x.shape[axis] - common
    begin, end = chunk_bounds(shared, size, rank)
    own = x.narrow(axis, begin, end - begin)
    return torch.cat((own, x.narrow(axis, shared, common)), axis) if common else own


@_leaf
def left_in_tensor_parallel(x: Tensor, weight: Tensor, group: str, size: int) -> Tensor:
    """This rank's part of the last dimension, as it is, in a DTensor that knows of the others'.

    Args:
        x: this rank's part.
        weight: a DTensor on the mesh that shares it out; simulated ranks have none, and gather.
        group: name of the process group.
        size: of the whole dimension.
    """
    if not isinstance(weight, DTensor):
        return gather_from_tensor_parallel(x, group, -1, size)
    shape = torch.Size((*x.shape[:-1], size))
    stride = tuple(torch.empty(shape, device="meta").stride())
    how = [Shard(x.ndim - 1)]
    return DTensor.from_local(x, weight.device_mesh, how, run_check=False, shape=shape, stride=stride)


@_leaf
def on_gradient(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``x``; its gradient goes through ``function``."""
    result: Tensor = _OnGradient.apply(x, function)
    return result
