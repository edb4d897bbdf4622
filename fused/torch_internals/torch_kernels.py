"""Kernels of torch without a public name."""

from __future__ import annotations

from typing import Any

import torch

from fused.assumptions import holds

__all__ = ["NATIVE_MODULES", "choose_attention_kernel"]

NATIVE_MODULES = ("torch._tensor", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft")
"""Modules of the functions and methods that public modules hand on as they are."""


def choose_attention_kernel(*args: Any, **kwargs: Any) -> int | None:
    """Return torch's choice among its kernels of attention for these operands; None if it cannot be asked."""
    return torch._fused_sdp_choice(*args, **kwargs) if holds("choice of attention kernels") else None
