"""Reference formulas of a batch norm, an optional residual sum, and an activation.

With x̂ the normalized channels, z = x̂·weight + bias + residual, d the gradient of z, and n numbers in each channel: the
sums A = Σ d and B = Σ d·x̂ over each channel are the gradients of bias and weight. The gradient of x is
weight·rstd·(d − A/n − x̂·B/n) if the statistics are those of x, and weight·rstd·d if they are given.
"""

from __future__ import annotations

from typing import Any

import torch

from fused.backends.reference.activations import (
    ACTIVATIONS,
    activated,
    activated_over,
    activation_gradient,
    activation_gradient_over,
)
from fused.backends.reference.numbers import beside, compute_dtype, sum_over
from fused.backends.tracing import computed_first, is_compiled, needs_reference, watched
from fused.torch_internals.batch_norm_gradients import strided_like

Tensor = torch.Tensor
_aten = torch.ops.aten
Needs = tuple[bool, bool, bool, bool]


def batch_norm(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    activation: str | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return act(x̂·weight + bias + residual) from the statistics ``[channels]``, in the compute dtype and rounded once.

    Args:
        x: ``[samples, channels, ...]``; the residual has its shape.
    """
    z = _summed(x.to(compute_dtype(x.dtype)), mean, rstd, weight, bias, residual)
    return activated(activation, z).to(out_dtype)


def batch_norm_of_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    momentum: float,
    eps: float,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize by the statistics of x with torch's kernel, and update the running mean and variance in place.

    Returns:
        The result, mean and 1/deviation.
    """
    z, mean, rstd = _aten.native_batch_norm(x, weight, bias, *running, True, momentum, eps)
    if needs_reference((x, weight, bias, residual)):
        z = z if residual is None else z + residual
        return activated(activation, z), mean, rstd
    if residual is not None:
        z = z.add_(residual) if torch.promote_types(z.dtype, residual.dtype) == z.dtype else z + residual
    return activated_over(activation, z), mean, rstd


def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute mean and 1/deviation of the channels from x, to differentiate them again."""
    wide = x.to(compute_dtype(x.dtype))
    dims = _all_but_channels(x)
    mean = wide.mean(dims)
    return mean, torch.rsqrt((wide - beside(mean, x)).square().mean(dims) + eps)


def statistics_by_kernel(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the results of `statistics` by torch's kernel, without a cast of 16-bit numbers."""
    ignored = x.new_zeros((2, x.shape[1]), dtype=compute_dtype(x.dtype))
    mean, variance = torch.batch_norm_update_stats(x, ignored[0], ignored[1], 0.0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_backward(
    x: Tensor,
    g: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kept: Tensor | None,
    *,
    activation: str | None,
    of_batch: bool,
    from_result: bool,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and residual, or None if not needed.

    Args:
        kept: the result if ``from_result``, else the residual, or None.
        of_batch: whether mean and rstd are statistics of x, and not given ones.
    """
    compute = compute_dtype(x.dtype)
    wide, d = x.to(compute), g.to(compute)
    plain = torch.is_grad_enabled() or is_compiled() or watched((g, x)) or not x.numel()
    by_result = ACTIVATIONS[activation].result_gradient if from_result and activation is not None else None
    if by_result is not None and kept is not None:
        d = by_result(d, kept.to(compute))
    elif activation is not None:
        through = activation_gradient if plain else activation_gradient_over
        d = through(activation, d, _summed(wide, mean, rstd, weight, bias, kept))
        d = computed_first(d)
    found: list[Tensor | None] = [None, None, None, d.to(g.dtype) if needs[3] else None]
    if any(needs[:3]):
        of_inputs = _through_norm if plain else _by_kernel
        found[:3] = of_inputs(d, wide, mean, rstd, weight, of_batch, needs)
    types = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    for index, dtype in enumerate(types):
        gradient = found[index]
        found[index] = gradient.to(dtype) if needs[index] and gradient is not None and dtype is not None else None
    return tuple(found)


def _through_norm(
    d: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, of_batch: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias for the gradient d of z."""
    dims = _all_but_channels(x)
    mean, rstd, weight = _in_dtype(x.dtype, mean, rstd, weight)
    normed = (x - beside(mean, x)) * beside(rstd, x)
    has_sums = of_batch and needs[0]
    of_bias = sum_over(d, dims) if needs[2] or has_sums else None
    of_weight = sum_over(d * normed, dims) if needs[1] or has_sums else None
    if not needs[0]:
        return None, of_weight, of_bias
    if of_batch and of_bias is not None and of_weight is not None:
        count = x.numel() // x.shape[1]
        d = d - beside(of_bias / count, x) - normed * beside(of_weight / count, x)
    return d * beside(_slope(rstd, weight), x), of_weight, of_bias


def _by_kernel(
    d: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, of_batch: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the results of `_through_norm` by torch's kernel, by which given statistics have sums too."""
    mean, rstd, weight = _in_dtype(x.dtype, mean, rstd, weight)
    wanted = [needs[0] and of_batch, *needs[1:3]]
    of_x = of_weight = of_bias = None
    if any(wanted):
        d = strided_like(d, x) if x.shape[0] == 1 else d
        kernel = _aten.native_batch_norm_backward
        of_x, of_weight, of_bias = kernel(d, x, weight, None, None, mean, rstd, True, 0.0, wanted)
    if needs[0] and not of_batch:
        of_x = d * beside(_slope(rstd, weight), x)
    return of_x, of_weight, of_bias


def _slope(rstd: Tensor, weight: Tensor | None) -> Tensor:
    return rstd if weight is None else rstd * weight


def _summed(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Compute x̂·weight + bias + residual in x's dtype."""
    mean, rstd, weight, bias, residual = _in_dtype(x.dtype, mean, rstd, weight, bias, residual)
    slope = _slope(rstd, weight)
    start = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
    z = torch.addcmul(beside(start, x), x, beside(slope, x))
    return z if residual is None else z + residual


def _in_dtype(dtype: torch.dtype, *tensors: Any) -> list[Any]:
    return [None if each is None else each.to(dtype) for each in tensors]


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]
