"""Dynamo and inductor. Imported when something is compiled: it takes seconds, and not every torch has them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo
import torch._inductor.config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

__all__ = [
    "INDUCTOR",
    "FailOnRecompileLimitHit",
    "TorchDynamoException",
    "compile_fx",
    "compile_fx_inner",
    "many_recompilations",
    "without_graph_cache",
]

INDUCTOR = "torch._inductor"
"""Package of what generated kernels import."""


def many_recompilations() -> AbstractContextManager[Any]:
    """Let torch.compile compile one function a thousand times before it gives up."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=1_000, accumulated_recompile_limit=10_000
    )
    return patched


def without_graph_cache() -> AbstractContextManager[Any]:
    """Let inductor compile each graph, and not look for the same one in its cache.

    The cache checks guards on symbolic sizes that are inputs of a graph. A graph of tensors alone has none, so code for
    sizes with one block of rows would be taken for any number of blocks.
    """
    patched: AbstractContextManager[Any] = torch._inductor.config.patch(
        fx_graph_cache=False, fx_graph_remote_cache=False
    )
    return patched
