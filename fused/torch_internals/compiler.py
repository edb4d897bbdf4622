"""Dynamo and inductor. Imported when something is compiled: it takes seconds, and not every torch has them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch._dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

__all__ = [
    "INDUCTOR",
    "FailOnRecompileLimitHit",
    "TorchDynamoException",
    "compile_fx",
    "compile_fx_inner",
    "many_recompilations",
]

INDUCTOR = "torch._inductor"
"""Package of what generated kernels import."""


def many_recompilations() -> AbstractContextManager[Any]:
    """Let torch.compile compile one function a thousand times before it gives up."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=1_000, accumulated_recompile_limit=10_000
    )
    return patched
