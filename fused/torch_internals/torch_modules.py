"""Base classes and calls of :mod:`torch.nn` modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

from fused.assumptions import holds

__all__ = [
    "MODULE_CALLS",
    "BatchNormBase",
    "ConvolutionBase",
    "DropoutBase",
    "NormBase",
    "are_parametrizations_cached",
    "has_global_hooks",
]

MODULE_CALLS: tuple[Callable[..., Any], ...] = (
    nn.Module.__call__,
    nn.Module._call_impl,
    nn.Module._wrapped_call_impl,
)
"""Functions that run a module with its hooks."""


def are_parametrizations_cached() -> bool:
    """Check whether ``torch.nn.utils.parametrize.cached()`` is active, for all threads."""
    parametrize: Any = sys.modules.get("torch.nn.utils.parametrize")
    return parametrize is not None and holds("cached parametrizations") and bool(parametrize._cache_enabled)
