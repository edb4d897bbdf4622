"""Several Linears of one input as one product.

The parameters are not changed: every call concatenates their current values, and only the parameters themselves and the
input are kept for the backward pass. So parameters may be moved, replaced or sharded at any time, and an in-place
change between forward and backward raises as it does in ``F.linear``. The concatenation is not cached: a write through
``.data`` does not bump the version counter, so a stale cache could not be detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused.backends.tracing import differentiated, watched
from fused.linear import linear, linear_backward
from fused.torch_internals.modes import count_function_modes


def merged_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Compute ``F.linear(x, weight, bias)`` for each weight, in one product.

    The products are computed one by one if a single product could differ or would hide something: for tensor subclasses
    (DTensors), autocast, compilers, ``torch.func``, forward-mode differentiation, torch modes, such as one that counts
    operations, and operands that do not fit each other.

    Args:
        x: ``[..., in]``.
        weights: each ``[out_i, in]``; the widths may differ (grouped queries).
        biases: each ``[out_i]`` or None; None if there are no biases.

    Returns:
        ``[..., out_i]`` for each weight: slices of one tensor, so their rows have gaps. Saves the same tensors as
        ``F.linear``, the input and the weights; differentiable any number of times.
    """
    every = tuple(biases or [None] * len(weights))
    if not _mergeable(x, weights, every):
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, every, strict=True))
    if not differentiated(x, *weights, *every):
        return _product(x, weights, every)
    results: tuple[Tensor, ...] = _MergedLinear.apply(len(weights), x, *weights, *every)
    return results


def _mergeable(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    given = [x, *weights, *(bias for bias in biases if bias is not None)]
    if watched(given) or count_function_modes() or torch.is_autocast_enabled(x.device.type):
        return False
    if any((each.dtype, each.device, each.layout) != (x.dtype, x.device, torch.strided) for each in given):
        return False
    return all(
        weight.ndim == 2 and weight.shape[1:] == x.shape[-1:] and (bias is None or bias.shape == weight.shape[:1])
        for weight, bias in zip(weights, biases, strict=True)
    )


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    bias = None
    if any(each is not None for each in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if each is None else each for weight, each in pairs])
    product = linear(x, torch.cat(list(weights)), bias)
    # Each part may be changed in place on its own, like the results of separate calls.
    return tuple(torch.unsafe_split_with_sizes(product, [len(weight) for weight in weights], -1))


class _MergedLinear(torch.autograd.Function):
    """One product in forward, separate gradients for each Linear in backward.

    The gradients own their memory.
    """

    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.by_rows = [weight.is_contiguous() for weight in weights]  # type: ignore[union-attr]
        ctx.set_materialize_grads(False)  # the weight of a result that no loss depends on has no gradient
        of_x, *of_parameters = ctx.needs_input_grad[1:]
        ctx.save_for_backward(x if any(of_parameters[:count]) else None, *(weights if of_x else [None] * count))
        results = _product(x, weights, biases)  # type: ignore[arg-type]  # None is among the biases only
        needed = zip(results, of_parameters[:count], of_parameters[count:], strict=True)
        ctx.mark_non_differentiable(*(result for result, *needs in needed if not of_x and not any(needs)))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, *of_parameters = ctx.needs_input_grad[1:]
        dx: Tensor | None = None
        dtype = torch.float32
        found: list[Tensor | None] = [None] * len(of_parameters)
        for index, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is None:
                continue
            bias = len(weights) + index
            part, found[index], found[bias] = linear_backward(
                gradient, x, weight, ctx.by_rows[index], (of_x, of_parameters[index], of_parameters[bias])
            )
            if part is not None:
                dx = _widened(part) if dx is None else dx + part  # summed as in one product, at least in float32
                dtype = part.dtype
        return None, None if dx is None else dx.to(dtype), *found


def _widened(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 if it has 16 bits, else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
