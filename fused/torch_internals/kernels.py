"""Kernels of torch without a public name."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["NATIVE_MODULES", "choose_attention_kernel", "grouped_mm"]

NATIVE_MODULES = ("torch._tensor", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft")
"""Modules of the functions and methods that public modules hand on as they are."""

choose_attention_kernel: Callable[..., int] = torch._fused_sdp_choice
grouped_mm: Callable[..., torch.Tensor] | None = getattr(torch, "_grouped_mm", None)
