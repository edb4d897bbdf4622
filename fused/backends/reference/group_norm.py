"""Reference formulas of a group norm, an optional scale and shift of each sample, and an activation.

With x̂ the normalized groups, z = x̂·γ + β where γ = weight·(1 + scale) and β = bias·(1 + scale) + shift, and d the
gradient of z: the sums A = Σ d and B = Σ d·x̂ over each channel of a sample give all gradients. With h = d·γ, the
gradient of x is rstd·(h − mean(h) − x̂·mean(h·x̂)), with means over the group. Statistics are float32 for 16-bit
numbers.
"""

from __future__ import annotations

import math

import torch

from fused.backends.reference.activations import (
    activated,
    activated_over,
    activation_gradient,
    activation_gradient_over,
)
from fused.backends.reference.numbers import beside, compute_dtype, reduce_to
from fused.backends.strides import channels_last_of
from fused.backends.tracing import computed_first, is_compiled, needs_reference, watched

Tensor = torch.Tensor
_aten = torch.ops.aten
Needs = tuple[bool, bool, bool, bool, bool]


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    groups: int,
    eps: float,
    activation: str | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, and mean and 1/deviation of the groups, ``[samples, groups]``.

    Args:
        x: ``[samples, channels, ...]``.
        weight, bias: ``[channels]`` or None.
        scale, shift: ``[samples or 1, channels, 1, ...]`` or None.
    """
    compute = compute_dtype(x.dtype)
    gamma, beta = _affine(weight, bias, scale, shift, compute)
    if is_compiled():
        rows, mean, rstd = _statistics_of_rows(x.to(compute), groups, eps)
        slope, start = map(_of_rows, _line(x, gamma, beta, mean, rstd))
        return activated(activation, rows * slope + start).to(out_dtype).reshape(x.shape), mean, rstd
    in_place = not needs_reference((x, weight, bias, scale, shift))
    is_uncast = in_place and x.dtype == out_dtype and _suits_kernel(x, gamma, beta, activation)
    z, mean, rstd = _normalized(x if is_uncast else x.to(compute), gamma, beta, groups, eps)
    z = activated_over(activation, z) if in_place else activated(activation, z)
    return z.to(out_dtype), mean, rstd


def _suits_kernel(x: Tensor, gamma: Tensor | None, beta: Tensor | None, activation: str | None) -> bool:
    """Check whether torch's kernel computes the result of 16-bit numbers as they are, in float32 and rounded once.

    It does on the CPU beside γ and β in float32; numbers of the samples' own beside channels last are applied after it.
    """
    is_shared = all(each is None or each.ndim == 1 for each in (gamma, beta))
    return x.is_cpu and activation is None and (is_shared or layout_of(x) == torch.contiguous_format)


def _affine(
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return γ and β, ``[channels]`` or ``[samples, channels]``, or None for 1 and 0."""
    weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    scale, shift = (None if each is None else each.to(dtype).flatten(1) for each in (scale, shift))
    if scale is not None:
        weight = 1 + scale if weight is None else weight * (1 + scale)
        bias = None if bias is None else bias * (1 + scale)
    return weight, shift if bias is None else bias if shift is None else bias + shift


def _statistics_of_rows(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as a row for each channel of a sample, and mean and 1/deviation of the groups, by one loop over rows.

    The sums are of differences from the mean of the first channel of the group, whose square is at most the variance
    times the channels of a group: so few digits cancel, whatever the numbers are.
    """
    samples, channels = x.shape[:2]
    rows = x.reshape(samples * channels, -1)
    near = x.reshape(samples, groups, channels // groups, *x.shape[2:])[:, :, 0].flatten(2).mean(-1)
    apart = rows - _of_rows(_of_channels(near, x))
    count = channels // groups * rows.shape[-1]

    def mean_of_groups(of_rows: Tensor) -> Tensor:
        return of_rows.sum(-1).view(samples, groups, -1).sum(-1) / count

    off = mean_of_groups(apart)
    variance = (mean_of_groups(apart.square()) - off * off).clamp(min=0)
    return rows, near + off, torch.rsqrt(variance + eps)


def _normalized(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x̂·γ + β, the mean and 1/deviation by torch's kernel, in which a sample's own channels are its channels."""
    samples, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    x = x.contiguous(memory_format=layout_of(x))
    gamma, beta = (None if each is None else each.contiguous() for each in (gamma, beta))
    if gamma is None and (beta is not None or x.dtype.itemsize < 4):
        # torch's kernel takes no bias alone, and rounds statistics to the dtype of γ.
        gamma = x.new_ones(channels, dtype=compute_dtype(x.dtype))
    if all(each is None or each.ndim == 1 for each in (gamma, beta)):
        normed, mean, rstd = _aten.native_group_norm(x, gamma, beta, samples, channels, size, groups, eps)
        return normed, mean, rstd
    if not x.is_contiguous():  # the kernel takes no other layout of one sample
        normed, mean, rstd = _aten.native_group_norm(x, None, None, samples, channels, size, groups, eps)
        normed = normed if gamma is None else normed.mul_(beside(gamma, x))
        return normed if beta is None else normed.add_(beside(beta, x)), mean, rstd
    gamma, beta = (None if each is None else each.expand(samples, channels).flatten() for each in (gamma, beta))
    whole = x.reshape(1, samples * channels, size)
    results = _aten.native_group_norm(whole, gamma, beta, 1, samples * channels, size, samples * groups, eps)
    normed, mean, rstd = results
    return normed.view_as(x), mean.view(samples, groups), rstd.view(samples, groups)


def statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Compute mean and 1/deviation of the groups from x, to differentiate them again."""
    rows = x.to(compute_dtype(x.dtype)).reshape(x.shape[0], groups, -1)
    mean = rows.mean(-1)
    return mean, torch.rsqrt((rows - mean[..., None]).square().mean(-1) + eps)


def group_norm_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    groups: int,
    activation: str | None,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias, scale and shift, or None if not needed."""
    compute = mean.dtype
    samples, channels = x.shape[:2]
    gamma, beta = _affine(weight, bias, scale, shift, compute)
    if scale is not None or shift is not None:
        gamma = (mean.new_ones(channels) if gamma is None else gamma).expand(samples, channels)
    by_kernel = not (torch.is_grad_enabled() or is_compiled() or watched((g, x)) or not x.numel())
    is_uncast = by_kernel and g.dtype == x.dtype and _suits_kernel(x, gamma, beta, activation)
    wide, d = (x, g) if is_uncast else (x.to(compute), g.to(compute))
    if not by_kernel:
        sums = _written_out(d, wide, gamma, beta, mean, rstd, activation)
    else:
        if activation is not None:
            slope, start = _line(wide, gamma, beta, mean, rstd)
            z = torch.addcmul(beside(start, x), wide, beside(slope, x))
            d = activation_gradient_over(activation, d, z)
        sums = _by_kernel(d, wide, mean.new_ones(channels) if gamma is None else gamma, mean, rstd, groups)
    return _gradients(x, weight, bias, scale, shift, *sums, needs)


def _of_channels(of_groups: Tensor, x: Tensor) -> Tensor:
    """Return a number of each group for each of its channels, ``[samples, channels]``."""
    (samples, groups), channels = of_groups.shape, x.shape[1]
    return of_groups[..., None].expand(samples, groups, channels // groups).reshape(samples, channels)


def _of_rows(of_channels: Tensor) -> Tensor:
    """Return numbers of channels, ``[samples, channels]``, as a column beside the rows of the channels."""
    return computed_first(of_channels.reshape(-1, 1))


def _line(x: Tensor, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return slope and start of x̂·γ + β as a line in x, ``[samples, channels]``, from the statistics of the groups."""
    mean, slope = _of_channels(mean, x), _of_channels(rstd, x)
    slope = slope if gamma is None else slope * gamma
    return slope, -mean * slope if beta is None else torch.addcmul(beta, mean, slope, value=-1)


def _written_out(
    g: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of x, and B and A, ``[samples, channels]``, from the gradient g of the result.

    This compiles to a loop over the rows for d and its sums, and one for the gradient of x, a sum of d and x with a
    factor for each row, which is all of one channel.
    """
    (samples, channels), groups = x.shape[:2], mean.shape[1]
    rows, g = (each.reshape(samples * channels, -1) for each in (x, g))

    slope, start = map(_of_rows, _line(x, gamma, beta, mean, rstd))
    d = activation_gradient(activation, g, rows * slope + start)
    mean, rstd = _of_channels(mean, x), _of_channels(rstd, x)
    factor = (mean.new_ones(channels) if gamma is None else gamma).expand(samples, channels)
    normed = rows * _of_rows(rstd) - _of_rows(mean * rstd)
    of_start, of_slope = (each.sum(-1).view(samples, channels) for each in (d, d * normed))

    def mean_over_group(sums: Tensor) -> Tensor:
        total = (sums * factor).view(samples, groups, -1).sum(-1) / (channels // groups * rows.shape[-1])
        return _of_channels(total, x)

    along = mean_over_group(of_slope) * rstd * rstd
    dx = d * slope - rows * _of_rows(along) + _of_rows(along * mean - mean_over_group(of_start) * rstd)
    return dx.reshape(x.shape), of_slope, of_start


def _by_kernel(
    d: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `_written_out` by torch's kernel from the gradient d of z.

    B and A are summed over samples that share γ.
    """
    samples, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    gamma = gamma.contiguous()
    kernel, wanted, layout = _aten.native_group_norm_backward, [True, True, True], layout_of(x)
    if gamma.ndim == 2 and layout != torch.contiguous_format:
        return _of_samples(d, x, gamma, mean, rstd, groups)
    if gamma.ndim == 1:
        d, x = d.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
        dx, of_slope, of_start = kernel(d, x, mean, rstd, gamma, samples, channels, size, groups, wanted)
        return dx, of_slope[None], of_start[None]
    whole = (1, samples * channels, size)
    d, x_whole = d.contiguous().view(whole), x.contiguous().view(whole)
    statistics = (mean.reshape(1, -1), rstd.reshape(1, -1), gamma.flatten())
    dx, *sums = kernel(d, x_whole, *statistics, *whole, samples * groups, wanted)
    of_slope, of_start = (each.view(samples, channels) for each in sums)
    return dx.view_as(x), of_slope, of_start


def _of_samples(
    d: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_by_kernel` does if samples have a γ of their own and channels are last: with sums of their own."""
    samples, channels, size = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    layout, rest = layout_of(x), list(range(2, x.ndim))
    of_start = d.sum(rest)
    of_slope = ((d * x).sum(rest) - _of_channels(mean, x) * of_start) * _of_channels(rstd, x)
    h = (d * beside(gamma, x)).contiguous(memory_format=layout)
    args = (h, x.contiguous(memory_format=layout), mean, rstd, x.new_ones(channels), samples, channels, size, groups)
    return _aten.native_group_norm_backward(*args, [True, False, False])[0], of_slope, of_start


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of torch's group norm of x."""
    return (channels_last_of(x) if x.is_cpu else None) or torch.contiguous_format


def _gradients(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    dx: Tensor,
    of_slope: Tensor,
    of_start: Tensor,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Return the gradients that are needed, from the one of x and the sums B and A of the channels."""
    dtype = of_slope.dtype
    factor = None if scale is None else 1 + scale.to(dtype).flatten(1)
    found: list[Tensor | None] = [dx.to(x.dtype) if needs[0] else None, None, None, None, None]
    for position, (tensor, sums) in enumerate(((weight, of_slope), (bias, of_start)), 1):
        if needs[position] and tensor is not None:
            found[position] = (sums if factor is None else sums * factor).sum(0).to(tensor.dtype)
    if needs[3] and scale is not None:
        of_scale = of_slope if weight is None else of_slope * weight.to(dtype)
        of_scale = of_scale if bias is None else of_scale + of_start * bias.to(dtype)
        found[3] = _of_factor(of_scale, scale)
    if needs[4] and shift is not None:
        found[4] = _of_factor(of_start, shift)
    return tuple(found)


def _of_factor(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return the gradient of a scale or shift from ``[samples, channels]``."""
    return reduce_to(gradient, factor.shape[:2]).reshape(factor.shape).to(factor.dtype)
