"""Base classes and calls of :mod:`torch.nn` modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

__all__ = ["MODULE_CALLS", "BatchNormBase", "ConvolutionBase", "DropoutBase", "NormBase", "has_global_hooks"]

MODULE_CALLS: tuple[Callable[..., Any], ...] = (
    nn.Module.__call__,
    nn.Module._call_impl,
    nn.Module._wrapped_call_impl,
)
"""Functions that run a module with its hooks."""
