"""Attention of each rank's part of a sequence to the keys and values of the whole sequence.

Keys and values are all-gathered along the sequence, together, and their gradients reduce-scattered. Each rank then
attends from its own queries, under its own rows of the mask, so any mask is exact.

Source: all-gather context parallelism as in section 3.3.2 of arXiv 2407.21783 (Llama 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fused.torch_internals.modes import without_dispatch_modes
from schedule.capture import TensorSpec, leaves, rebuilt_sequence
from schedule.distributed.communication.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    leaf,
    scatter_to_tensor_parallel,
)
from schedule.distributed.communication.groups import group_rank, group_size
from schedule.util.errors import ShardError
from schedule.util.internal_errors import perform

_PLAIN = (Tensor, TensorSpec, torch.dtype, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN += (bool, int, float, str, type(None))  # type: ignore[assignment]


@leaf
def attention_in_context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    group: str,
) -> Tensor:
    """Attend from this rank's queries to the keys and values of all ranks.

    Args:
        query, key, value: this rank's part, ``[..., heads, seq / ranks, features]``.
        attn_mask: whole, ``[..., seq or 1, seq or 1]``; each rank takes its own rows. Its gradient is all-reduced.
        dropout_p, is_causal, scale, enable_gqa: as of ``torch.nn.functional.scaled_dot_product_attention``.
        group: name of the process group.

    Returns:
        this rank's part of the result, ``[..., heads, seq / ranks, features]``.

    Raises:
        ShardError: keys of another length than the queries, or a mask for another sequence.
    """
    own, begin = query.shape[-2], query.shape[-2] * group_rank(group)
    if key.shape[-2] != own:
        raise ShardError(
            f"{own} queries meet {key.shape[-2]} keys on each rank, which are not parts of one sequence",
            fix="context parallelism is for self-attention without a cache of keys",
        )
    width = key.shape[-1]
    whole = gather_from_sequence_parallel(torch.cat((key, value), -1), group, -2)
    key, value = whole[..., :width], whole[..., width:]
    mask: Any = None if attn_mask is None else _own_rows(attn_mask, begin, own, whole.shape[-2], group)
    if is_causal and mask is None:  # later keys are hidden from all of these queries
        is_causal = False
        key, value = key[..., : begin + own, :], value[..., : begin + own, :]
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler

        with without_dispatch_modes():  # under one, this subclass of tensors cannot be made
            mask = causal_lower_right(own, begin + own)
    how: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, mask, **how)


def _own_rows(mask: Tensor, begin: int, own: int, length: int, group: str) -> Tensor:
    if mask.shape[-2] not in (1, length) or mask.shape[-1] not in (1, length):
        raise ShardError(
            f"the mask {list(mask.shape)} is not for the {length} tokens of all ranks",
            fix="pass the mask of the whole sequence to every rank",
        )
    mask = copy_to_tensor_parallel(mask, group) if mask.is_floating_point() else mask
    return mask if mask.shape[-2] == 1 else mask[..., begin : begin + own, :]


class AttentionOverRanks(TorchFunctionMode):
    """Makes every ``scaled_dot_product_attention`` of this thread one over the ranks of a group."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the one function, and run all others as they are."""
        if func is F.scaled_dot_product_attention:
            return attention_in_context_parallel(*args, **(kwargs or {}), group=self.group)
        return perform(func, *args, **(kwargs or {}))


def refuse_objects(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is an object, such as a cache: it would store keys of one rank only.

    Raises:
        ShardError: names the argument.
    """
    for path, value in leaves(dict(arguments)):
        if not isinstance(value, _PLAIN):
            raise ShardError(
                f"{path[0][1]} is a {type(getattr(value, 'snapshot', value)).__name__}, which would have this rank's "
                "part of the sequence only",
                fix="call it without: a cache of keys with use_cache=False",
            )


def own_part(value: Any, steps: Sequence[Any], axis: int | None, group: str) -> Any:
    """Return ``value`` with this rank's part of the tensor at ``steps`` into it.

    Args:
        value: a tensor, or a nesting of tuples and lists.
        steps: the indices that lead to the tensor.
        axis: its dimension along the sequence; None if it stays whole, so that its gradient is a partial sum.
        group: name of the process group.

    Raises:
        ShardError: the dimension cannot be divided evenly.
    """
    if steps and isinstance(value, (tuple, list)):
        items = list(value)
        items[steps[0]] = own_part(items[steps[0]], steps[1:], axis, group)
        return rebuilt_sequence(value, items)
    if not isinstance(value, Tensor):
        return value
    if axis is None:
        return copy_to_tensor_parallel(value, group)
    if value.shape[axis] % group_size(group):
        raise ShardError(
            f"a sequence of {value.shape[axis]} tokens cannot be shared evenly by {group_size(group)} ranks",
            fix="pad it to a multiple of the ranks",
        )
    return scatter_to_tensor_parallel(value, group, axis)
