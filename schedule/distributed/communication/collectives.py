"""Differentiable collectives for tensor parallelism, such as Megatron-LM's f and g.

Each function takes a plain local tensor and the name of a process group, so it can be a node of a graph directly::

    x = copy_to_tensor_parallel(x, "tp")                # forward: x          backward: all-reduce
    y = reduce_from_tensor_parallel(F.linear(x, w), "tp")  # forward: all-reduce  backward: as it is

A dimension that does not divide evenly is split as by ``torch.chunk``, like DTensor does.
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
from schedule.patterns.ops import declare_view
from schedule.util.errors import ShardError

# -- without gradients --------------------------------------------------------------------------------------


def _own(x: Tensor, group: str, axis: int) -> Tensor:
    begin, end = chunk_bounds(x.shape[axis], group_size(group), group_rank(group))
    return x.narrow(axis, begin, end - begin).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, group: str, axis: int, size: int | None) -> Tensor:
    """All-gather the shards of a dimension of ``size``, or equal shards if None."""
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
    """Reshard ``x`` from dimension ``source`` to dimension ``target`` by an all-to-all."""
    ranks = group_size(group)
    divided_evenly(x.shape[target], ranks, target)
    parts = torch.stack(x.chunk(ranks, target))
    return torch.cat(exchanged(parts, group).unbind(), source).contiguous()


def divided_evenly(size: int, ranks: int, axis: int) -> int:
    """Return ``size / ranks``.

    Raises:
        ShardError: ``size`` is not divisible by ``ranks``.
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


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, sent: list[int], received: list[int]) -> Tensor:
        return exchanged(x, group, sent, received)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.group, ctx.sent, ctx.received = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _ExchangeRows.apply(grad, ctx.group, ctx.received, ctx.sent), None, None, None


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


# -- targets of graph nodes ---------------------------------------------------------------------------------


def leaf(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``function`` to be recorded as one node by any trace."""

    @functools.wraps(function)
    def called(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(x):
            result: Tensor = handle_torch_function(called, (x,), x, *args, **kwargs)
            return result
        return function(x, *args, **kwargs)

    return called


@leaf
def copy_to_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """Return the replicated ``x`` unchanged, and all-reduce its gradient."""
    result: Tensor = _Copy.apply(x, group)
    return result


declare_view(copy_to_tensor_parallel)  # it communicates in the backward pass only


@leaf
def reduce_from_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """All-reduce ``x``, and pass the gradient through unchanged."""
    result: Tensor = _Reduce.apply(x, group)
    return result


@leaf
def gather_from_tensor_parallel(x: Tensor, group: str, axis: int = -1, size: int | None = None) -> Tensor:
    """All-gather ``x`` along ``axis``, and slice this rank's shard of the gradient.

    Args:
        x: this rank's shard.
        group: name of the process group.
        axis: the sharded dimension.
        size: size of the whole dimension; None if all shards are equal.
    """
    result: Tensor = _Gather.apply(x, group, axis, size)
    return result


@leaf
def scatter_to_tensor_parallel(x: Tensor, group: str, axis: int = -1) -> Tensor:
    """Return this rank's shard of the replicated ``x`` along ``axis``, and all-gather the gradient."""
    result: Tensor = _Scatter.apply(x, group, axis)
    return result


@leaf
def gather_from_sequence_parallel(x: Tensor, group: str, axis: int) -> Tensor:
    """All-gather ``x`` along ``axis``, and reduce-scatter the gradient.

    For use before computations that differ between ranks. The shards must be equal.
    """
    result: Tensor = _GatherSequence.apply(x, group, axis)
    return result


@leaf
def reduce_scatter_to_sequence_parallel(x: Tensor, group: str, axis: int) -> Tensor:
    """Reduce-scatter ``x`` along ``axis``, and all-gather the gradient.

    Raises:
        ShardError: ``axis`` does not divide evenly over the ranks.
    """
    result: Tensor = _ReduceScatter.apply(x, group, axis)
    return result


@leaf
def move_in_tensor_parallel(x: Tensor, group: str, source: int, target: int) -> Tensor:
    """Reshard ``x`` from dimension ``source`` to dimension ``target`` by an all-to-all.

    Raises:
        ShardError: ``target`` does not divide evenly over the ranks.
    """
    result: Tensor = _Move.apply(x, group, source, target)
    return result


@leaf
def exchange_rows(x: Tensor, group: str, sent: list[int], received: list[int]) -> Tensor:
    """Send consecutive rows of ``x`` to each rank by an all-to-all, and return the received rows, in rank order.

    Args:
        x: the rows for rank 0, then those for rank 1, and so on.
        group: name of the process group.
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    result: Tensor = _ExchangeRows.apply(x, group, sent, received)
    return result


@leaf
def replicated_part(x: Tensor, group: str, axis: int, replicas: int, common: int = 0) -> Tensor:
    """Return this rank's part of the replicated ``x`` along ``axis``, without communication.

    Args:
        x: the whole tensor.
        group: name of the process group.
        axis: the dimension to split.
        replicas: number of consecutive ranks that get the same part.
        common: number of trailing entries that every rank gets.
    """
    size, rank, shared = group_size(group) // replicas, group_rank(group) // replicas, x.shape[axis] - common
    begin, end = chunk_bounds(shared, size, rank)
    own = x.narrow(axis, begin, end - begin)
    return torch.cat((own, x.narrow(axis, shared, common)), axis) if common else own


@leaf
def left_in_tensor_parallel(x: Tensor, weight: Tensor, group: str, size: int) -> Tensor:
    """Wrap ``x`` in a DTensor sharded along the last dimension, without communication.

    Args:
        x: this rank's shard.
        weight: a DTensor on the mesh over which ``x`` is sharded. If it is a plain tensor (simulated ranks), ``x`` is
            all-gathered instead.
        group: name of the process group.
        size: size of the whole last dimension.
    """
    if not isinstance(weight, DTensor):
        return gather_from_tensor_parallel(x, group, -1, size)
    shape = torch.Size((*x.shape[:-1], size))
    stride = tuple(torch.empty(shape, device="meta").stride())
    how = [Shard(x.ndim - 1)]
    return DTensor.from_local(x, weight.device_mesh, how, run_check=False, shape=shape, stride=stride)


@leaf
def on_gradient(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``x`` unchanged, and apply ``function`` to its gradient."""
    result: Tensor = _OnGradient.apply(x, function)
    return result
