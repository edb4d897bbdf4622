"""Batch norm by given statistics, folded into the convolution or the linear layer before it: for inference.

The folded weights are computed in each call, so a change of a parameter or statistic, by whatever means, is never
missed. That takes one pass over the weights; where they have more numbers than the result, it is normalized instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from fused.backends.reference.activations import activated, activated_over
from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import differentiated, needs_reference, transformed
from fused.batch_norm import batch_norm
from fused.checks import check_activation, check_eps, check_float, check_row, shape

Tensor = torch.Tensor
Layer = Callable[[Tensor, Tensor | None], Tensor]
"""The convolution or linear layer as a function of its weight and bias."""

Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The running mean and variance, the weight and the bias of the norm."""

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``act(F.batch_norm(conv(x), running_mean, running_var, norm_weight, norm_bias, eps=eps) + residual)``.

    Args:
        x: ``[samples, inputs, ...]`` with one to three further dimensions.
        weight: ``[channels, inputs / groups, ...]``.
        bias: of the convolution, ``[channels]``, or None.
        running_mean, running_var: ``[channels]``, not changed.
        norm_weight, norm_bias: of the norm, ``[channels]``, or None.
        eps: added to the variance.
        stride, padding, dilation, groups: as for ``torch.nn.functional.conv2d``.
        activation: a name of `bias_activation`, or None for none.
        residual: broadcastable with the result of the norm, or None.

    Returns:
        A tensor of the shape, dtype and strides of the expression. Where a gradient with respect to a parameter is
        needed, nothing is folded.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: if the shapes do not fit, or there is no such activation.

    Source: Markuš 2018, "Fusing batch normalization and convolution in runtime"; ``torch.nn.utils.fusion``.
    """
    check_float("conv_batch_norm", "input", x, min_ndim=3)
    check_float("conv_batch_norm", "weight", weight)
    if x.ndim > 5 or weight.ndim != x.ndim:
        raise ValueError(f"conv_batch_norm: no convolution of {shape(x)} with weights {shape(weight)}")
    convolution = _CONVOLUTIONS[x.ndim - 2]

    def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolution(x, weight, bias, stride, padding, dilation, groups)

    steps = (stride,) * (x.ndim - 2) if isinstance(stride, int) else stride
    results = x.numel() // max(x.shape[1], 1) // math.prod(steps) * weight.shape[0]
    norm = (running_mean, running_var, norm_weight, norm_bias)
    return _folded("conv_batch_norm", layer, weight, bias, norm, eps, results, activation, residual)


def linear_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `conv_batch_norm` of a linear layer: x is ``[samples, inputs]``, its weight ``[channels, inputs]``."""
    check_float("linear_batch_norm", "input", x, min_ndim=2)
    check_float("linear_batch_norm", "weight", weight)
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError(f"linear_batch_norm: needs matrices, got {shape(x)} and weights {shape(weight)}")

    def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    norm, results = (running_mean, running_var, norm_weight, norm_bias), x.shape[0] * weight.shape[0]
    return _folded("linear_batch_norm", layer, weight, bias, norm, eps, results, activation, residual)


def _folded(
    op: str,
    layer: Layer,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    eps: float,
    results: int,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """Compute the layer with folded weights, or normalize its result.

    Args:
        results: about how many numbers the layer computes.
    """
    check_eps(op, eps)
    if activation is not None:
        check_activation(op, activation)
    names = ("bias", "running_mean", "running_var", "norm_weight", "norm_bias")
    for name, row in zip(names, (bias, *norm), strict=True):
        check_row(op, weight, name, row, dim=0)
    if transformed() or differentiated(weight, bias, *norm) or weight.numel() > results:
        return batch_norm(layer(weight, bias), *norm, eps=eps, activation=activation, residual=residual)
    compute = compute_dtype(weight.dtype)
    mean, variance, gamma, beta = norm
    slope = torch.rsqrt(variance.to(compute) + eps)
    slope = slope if gamma is None else slope * gamma.to(compute)
    start = -mean.to(compute) if bias is None else bias.to(compute) - mean.to(compute)
    shift = start * slope if beta is None else torch.addcmul(beta.to(compute), start, slope)
    factor = slope.reshape(-1, *(1,) * (weight.ndim - 1))
    z = layer((weight.to(compute) * factor).to(weight.dtype), shift.to(weight.dtype))
    if differentiated(z, residual) or needs_reference((z, residual)):
        return activated(activation, z if residual is None else z + residual)
    if residual is not None:
        fits = residual.shape == z.shape and residual.dtype == z.dtype
        z = z.add_(residual) if fits else z + residual
    return activated_over(activation, z)
