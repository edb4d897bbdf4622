"""Layers that do not save their input where it can be computed again (:func:`fused.recomputed_input`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fused import recomputed_input
from fused.linear import linear as _linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`fused.linear`."""
    return recomputed_input(_linear, input, weight, bias)


def _recomputing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return recomputed_input(function, input, *args, **kwargs)

    convolution.__name__ = convolution.__qualname__ = function.__name__  # saved recipes name it so
    convolution.__doc__ = f"Compute ``F.{function.__name__}``."
    return convolution


CONVOLUTIONS = conv1d, conv2d, conv3d = tuple(map(_recomputing, (F.conv1d, F.conv2d, F.conv3d)))
