"""Several Linears of one input as one product, on the parameters that they have.

The merged weight is no parameter of its own: it is the memory of the others, which lie side by side in it. The first
call lays them so, as ``nn.RNN.flatten_parameters`` does for cuDNN, and so does the first one after they moved
(``model.to``, ``load_state_dict(assign=True)``). The parameters stay the objects they are, with their names, values and
gradients, so that state dicts and optimizers know nothing of it. Only a tensor that shared their memory from before,
such as ``weight.data`` or an older ``state_dict()``, does not follow them any more, as after ``model.to``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused.backends.tracing import transformed
from fused.linear import linear


def merged_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """``F.linear(x, weight, bias)`` for each weight, in one product.

    Parameters that cannot be moved (shards, memory shared with another process or with a larger tensor, the meta
    device) are multiplied one by one, and so are all where a compiler or a ``torch.func`` transform is watching.
    Under a mode of torch, such as one that counts operations, none is moved.

    Args:
        x: ``[..., in]``.
        weights: each ``[out_i, in]``; the widths may differ (grouped queries). What is no parameter is copied.
        biases: each ``[out_i]`` or None; None for none at all.

    Returns:
        ``[..., out_i]`` for each weight: parts of one tensor, so that their rows have gaps.
    """
    weight = None if transformed() else _joined(weights)
    bias = None if weight is None or biases is None else _joined_bias(weights, biases)
    if weight is None or (bias is None and biases is not None):
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True))
    # Parts that may be changed in place one by one, as the products of several calls may be.
    return tuple(torch.unsafe_split_with_sizes(linear(x, weight, bias), [len(w) for w in weights], -1))


def _joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    zeros = weights[0].new_zeros
    return _joined([zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)])


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The rows of all, without a copy if they are parameters; None if they cannot be moved."""
    if not _side_by_side(parts):
        distinct = len({id(part) for part in parts}) == len(parts)
        if not distinct or not all(type(part) is Tensor or _is_movable(part) for part in parts):
            return None
        if not all(isinstance(part, nn.Parameter) for part in parts):
            return torch.cat(list(parts))
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None  # a mode may give anything in place of the rows: those of a trace have no data
        _lay_side_by_side(parts)
    if torch.is_grad_enabled():
        joined: Tensor = _Joined.apply(*parts)
        return joined
    return _as_one(parts, sum(map(len, parts)))


def _is_movable(part: Tensor) -> bool:
    if type(part) is not nn.Parameter or part.is_meta or part.is_inference() or not part.is_contiguous():
        return False
    with_others = part.device.type == "cpu" and part.is_shared()
    return not with_others and part.untyped_storage().nbytes() == part.nbytes


def _side_by_side(parts: Sequence[Tensor]) -> bool:
    end = parts[0].data_ptr()
    for part in parts:
        if type(part) is not nn.Parameter or part.data_ptr() != end or not part.is_contiguous():
            return False
        end += part.nbytes
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1


def _lay_side_by_side(parts: Sequence[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.cat([part.detach() for part in parts])
        for part, own in zip(parts, rows.split([len(part) for part in parts]), strict=True):
            part.data = own


def _as_one(parts: Sequence[Tensor], rows: int) -> Tensor:
    first = parts[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


class _Joined(torch.autograd.Function):
    """Parameters that lie side by side, as one tensor on their memory; each gets its rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return _as_one(parts, sum(ctx.sizes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0].split(ctx.sizes)
