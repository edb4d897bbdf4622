"""Layers that do not save their input where it can be computed again (:func:`fused.recomputed_input`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fused import recomputed_input
from fused.linear import linear as _linear

Sizes = int | Sequence[int]
"""For all dimensions of a convolution, or for each."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`fused.linear`."""
    return recomputed_input(_linear, input, weight, bias)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``F.conv1d``."""
    return recomputed_input(F.conv1d, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``F.conv2d``."""
    return recomputed_input(F.conv2d, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``F.conv3d``."""
    return recomputed_input(F.conv3d, input, weight, bias, stride, padding, dilation, groups)


CONVOLUTIONS = (conv1d, conv2d, conv3d)
