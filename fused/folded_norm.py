"""Batch norm by given statistics, folded into the convolution or the linear layer before it: for inference.

The folded weights of parameters on the CPU are cached (`fused/backends/folded_weights.py`), and a change of a parameter
or statistic, by whatever means, is never missed. Other weights are folded in each call. That takes one pass over them;
where they have more numbers than the result, it is normalized instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends.folded_weights import Packing, folded
from fused.backends.reference.activations import activated, activated_over
from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import differentiated, needs_reference, transformed, watched
from fused.batch_norm import batch_norm
from fused.checks import MismatchError, check_activation, check_eps, check_float, check_row, shape

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
    channels_last: Sequence[int] | None = None,
    out: Tensor | None = None,
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
        channels_last: shape of images, with one sample or several, whose result may be in channels last, or None.
        out: the residual if the result may be written to it, or None.

    Returns:
        A tensor of the shape, dtype and, unless ``channels_last`` permits others, strides of the expression. Where a
        parameter needs a gradient, nothing is folded. With channels last, oneDNN computes it in float32 on the CPU with
        weights packed once.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: if the shapes do not fit, or there is no such activation.

    Source: Markuš 2018, "Fusing batch normalization and convolution in runtime"; ``torch.nn.utils.fusion``.
    """
    check_float("conv_batch_norm", "input", x, min_ndim=3)
    check_float("conv_batch_norm", "weight", weight)
    if x.ndim > 5 or weight.ndim != x.ndim:
        raise MismatchError(f"conv_batch_norm: no convolution of {shape(x)} with weights {shape(weight)}")
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    layer = partial(_CONVOLUTIONS[x.ndim - 2], x, **settings)
    norm = (running_mean, running_var, norm_weight, norm_bias)
    _check("conv_batch_norm", weight, bias, norm, eps, activation)
    is_written = _is_written(residual, out)
    packing = _packing(x, weight, (bias, *norm), residual, tuple(settings.values()), channels_last)
    if packing is not None:
        return _packed(packing, x, weight, (bias, *norm), eps, activation, residual, is_written)
    return _folded(layer, weight, bias, norm, eps, _results(x, weight, stride), activation, residual)


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
        raise MismatchError(f"linear_batch_norm: needs matrices, got {shape(x)} and weights {shape(weight)}")

    def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    norm, results = (running_mean, running_var, norm_weight, norm_bias), x.shape[0] * weight.shape[0]
    _check("linear_batch_norm", weight, bias, norm, eps, activation)
    return _folded(layer, weight, bias, norm, eps, results, activation, residual)


def _check(op: str, weight: Tensor, bias: Tensor | None, norm: Norm, eps: object, activation: str | None) -> None:
    check_eps(op, eps)
    if activation is not None:
        check_activation(op, activation)
    names = ("bias", "running_mean", "running_var", "norm_weight", "norm_bias")
    for name, row in zip(names, (bias, *norm), strict=True):
        check_row(op, weight, name, row, dim=0)


def _is_cached(weight: Tensor, *rows: Tensor | None) -> bool:
    """Check whether the folded weights are cached: those of parameters, not of tensors that are new in each call."""
    given = [weight, *(row for row in rows if row is not None)]
    if not isinstance(weight, torch.nn.Parameter) or transformed() or differentiated(*given) or watched(given):
        return False
    return all(each.is_cpu for each in given)


def _is_written(residual: Tensor | None, out: Tensor | None) -> bool:
    if out is not None and out is not residual:
        raise ValueError("conv_batch_norm: out is a tensor other than the residual; give the residual or None")
    return out is not None and not torch.is_grad_enabled()  # a backward pass may need it


def _results(x: Tensor, weight: Tensor, stride: int | Sequence[int]) -> int:
    """Return about how many numbers the convolution computes."""
    steps = (stride,) * (x.ndim - 2) if isinstance(stride, int) else stride
    return x.numel() // max(x.shape[1], 1) // math.prod(steps) * weight.shape[0]


def _is_like(x: Tensor, sizes: Sequence[int] | None) -> bool:
    """Check whether x has these sizes, but perhaps another number of samples if there are several."""
    return sizes is not None and tuple(x.shape[1:]) == tuple(sizes[1:]) and (x.shape[0] > 1) == (sizes[0] > 1)


def _packing(
    x: Tensor,
    weight: Tensor,
    rows: Sequence[Tensor | None],
    residual: Tensor | None,
    settings: Sequence[Any],
    channels_last: Sequence[int] | None,
) -> Packing | None:
    """Return how the weight is packed, or None if it is not."""
    others = (x,) if residual is None else (x, residual)
    if not _is_cached(weight, *rows) or differentiated(*others) or watched(others):
        return None
    return Packing.of(x, weight, settings, _is_like(x, channels_last))


def _packed(
    packing: Packing,
    x: Tensor,
    weight: Tensor,
    rows: Sequence[Tensor | None],
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    overwrite: bool,
) -> Tensor:
    """Compute the convolution with folded and packed weights."""
    fold = partial(_fold, eps=eps, pack=partial(packing.pack, sizes=x.shape))
    packed, shift = folded((weight, *rows), (eps, packing), fold)
    added = residual if packing.fits(residual, x, weight) else None
    z = packing.convolve(x, packed, shift, added, overwrite)
    return _finished(z, activation, residual if added is None else None)


def _folded(
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
    is_foldable = weight.layout is torch.strided and weight.numel() <= results
    if transformed(weight, bias, *norm) or differentiated(weight, bias, *norm) or not is_foldable:
        return batch_norm(layer(weight, bias), *norm, eps=eps, activation=activation, residual=residual)
    fold = partial(_fold, eps=eps)
    parameters = (weight, bias, *norm)
    z = layer(*(folded(parameters, eps, fold) if _is_cached(*parameters) else fold(*parameters)))
    return _finished(z, activation, residual)


def _fold(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    eps: float,
    pack: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of the layer and its norm as one layer, the weight packed."""
    compute = compute_dtype(weight.dtype)
    slope = torch.rsqrt(variance.to(compute) + eps)
    slope = slope if gamma is None else slope * gamma.to(compute)
    start = -mean.to(compute) if bias is None else bias.to(compute) - mean.to(compute)
    shift = start * slope if beta is None else torch.addcmul(beta.to(compute), start, slope)
    factor = slope.reshape(-1, *(1,) * (weight.ndim - 1))
    product = (weight.to(compute) * factor).to(weight.dtype)
    return product if pack is None else pack(product), shift.to(weight.dtype)


def _finished(z: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    """Add the residual to a new tensor, and compute the activation."""
    if differentiated(z, residual) or needs_reference((z, residual)):
        return activated(activation, z if residual is None else z + residual)
    if residual is not None:
        fits = residual.shape == z.shape and residual.dtype == z.dtype
        z = z.add_(residual) if fits else z + residual
    return activated_over(activation, z)
