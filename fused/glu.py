"""Gated activations by name: each plain, with a bias, with a weight for each token, and with both.

All take gate and up concatenated, ``[..., 2·hidden]``, the gate first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import torch

from fused.gated import gated, settings

Tensor = torch.Tensor


def swiglu(
    y: Tensor,
    *up: Never,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute ``silu(y₁)·y₂`` with y₁ and y₂ the halves of y, saving only y.

    Args:
        y: ``[..., 2·hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor
            sharded on the last dimension is gathered.
        clamp_value, fp8_input_store: as in `gated_activation`.

    Returns:
        ``[..., hidden]`` in the dtype of y.

    Raises:
        TypeError: if y is not a floating-point tensor, or the clamp not a number.
        ValueError: for an odd last dimension or a negative clamp.

    Source: Megatron-LM ``fused_bias_swiglu``; Liger-Kernel ``LigerSiLUMulFunction``.
    """
    op = "swiglu"
    _refuse_up(op, up, "silu")
    how = settings(op, "silu", clamp_value, fp8_input_store)
    return gated(op, y, None, None, how)


def weighted_swiglu(
    y: Tensor,
    weights: Tensor,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `swiglu` times a weight for each token, ``[..., 1]`` of any floating-point dtype."""
    op = "weighted_swiglu"
    how = settings(op, "silu", clamp_value, fp8_input_store)
    return gated(op, y, None, weights, how)


def bias_swiglu(
    y: Tensor,
    bias: Tensor | None,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `swiglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, of any floating-point dtype."""
    op = "bias_swiglu"
    how = settings(op, "silu", clamp_value, fp8_input_store)
    return gated(op, y, bias, None, how)


def weighted_bias_swiglu(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `swiglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, times the weights ``[..., 1]``."""
    op = "weighted_bias_swiglu"
    how = settings(op, "silu", clamp_value, fp8_input_store)
    return gated(op, y, bias, weights, how)


def geglu(
    y: Tensor,
    approximate: str = "tanh",
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute ``gelu(y₁)·y₂`` with y₁ and y₂ the halves of y, saving only y.

    Args:
        y: ``[..., 2·hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor
            sharded on the last dimension is gathered.
        approximate: ``"tanh"`` or ``"none"`` (erf), the two forms of GELU; they differ by up to 4.7e-4.
        clamp_value, fp8_input_store: as in `gated_activation`.

    Returns:
        ``[..., hidden]`` in the dtype of y.

    Raises:
        TypeError: if y is not a floating-point tensor, or the clamp not a number.
        ValueError: for an odd last dimension, another `approximate` or a negative clamp.

    Source: Megatron-LM ``fused_bias_geglu`` (tanh form); Liger-Kernel ``LigerGELUMulFunction``.
    """
    op = "geglu"
    _refuse_up(op, (approximate,), "gelu_tanh", "approximate must be a text, got Tensor; ")
    how = settings(op, _gelu(op, approximate), clamp_value, fp8_input_store)
    return gated(op, y, None, None, how)


def weighted_geglu(
    y: Tensor,
    weights: Tensor,
    approximate: str = "tanh",
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `geglu` times a weight for each token, ``[..., 1]`` of any floating-point dtype."""
    op = "weighted_geglu"
    how = settings(op, _gelu(op, approximate), clamp_value, fp8_input_store)
    return gated(op, y, None, weights, how)


def bias_geglu(
    y: Tensor,
    bias: Tensor | None,
    approximate: str = "tanh",
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `geglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, of any floating-point dtype."""
    op = "bias_geglu"
    how = settings(op, _gelu(op, approximate), clamp_value, fp8_input_store)
    return gated(op, y, bias, None, how)


def weighted_bias_geglu(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    approximate: str = "tanh",
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `geglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, times the weights ``[..., 1]``."""
    op = "weighted_bias_geglu"
    how = settings(op, _gelu(op, approximate), clamp_value, fp8_input_store)
    return gated(op, y, bias, weights, how)


def _refuse_up(op: str, given: Sequence[object], activation: str, why: str = "") -> None:
    """Raise if a second tensor was given, where these ops take one."""
    if any(isinstance(each, Tensor) for each in given):
        raise TypeError(
            f"{op}: {why}it takes gate and up in one tensor; for two, fused.gated_activation(gate, up, {activation!r})"
        )


def _gelu(op: str, approximate: str) -> str:
    if approximate not in ("tanh", "none"):
        raise ValueError(f"{op}: approximate must be 'tanh' or 'none', got {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def reglu(
    y: Tensor,
    *up: Never,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute ``relu(y₁)·y₂`` with y₁ and y₂ the halves of y, saving only y.

    Args:
        y: ``[..., 2·hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor
            sharded on the last dimension is gathered.
        clamp_value, fp8_input_store: as in `gated_activation`.

    Returns:
        ``[..., hidden]`` in the dtype of y.

    Raises:
        TypeError: if y is not a floating-point tensor, or the clamp not a number.
        ValueError: for an odd last dimension or a negative clamp.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    op = "reglu"
    _refuse_up(op, up, "relu")
    how = settings(op, "relu", clamp_value, fp8_input_store)
    return gated(op, y, None, None, how)


def weighted_reglu(
    y: Tensor,
    weights: Tensor,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `reglu` times a weight for each token, ``[..., 1]`` of any floating-point dtype."""
    op = "weighted_reglu"
    how = settings(op, "relu", clamp_value, fp8_input_store)
    return gated(op, y, None, weights, how)


def bias_reglu(
    y: Tensor,
    bias: Tensor | None,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `reglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, of any floating-point dtype."""
    op = "bias_reglu"
    how = settings(op, "relu", clamp_value, fp8_input_store)
    return gated(op, y, bias, None, how)


def weighted_bias_reglu(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `reglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, times the weights ``[..., 1]``."""
    op = "weighted_bias_reglu"
    how = settings(op, "relu", clamp_value, fp8_input_store)
    return gated(op, y, bias, weights, how)


def quick_geglu(
    y: Tensor,
    linear_offset: float = 0.0,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute ``y₁·σ(1.702·y₁)·(y₂ + linear_offset)`` with y₁ and y₂ the halves of y, saving only y.

    Args:
        y: ``[..., 2·hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor
            sharded on the last dimension is gathered.
        linear_offset: added to y₂, after the clamp.
        clamp_value, fp8_input_store: as in `gated_activation`.

    Returns:
        ``[..., hidden]`` in the dtype of y.

    Raises:
        TypeError: if y is not a floating-point tensor, or the clamp or the offset not a number.
        ValueError: for an odd last dimension or a negative clamp.

    Source: Megatron-LM ``fused_bias_geglu``; the experts of GPT-OSS have an offset of 1 and a clamp of 7.
    """
    op = "quick_geglu"
    _refuse_up(op, (linear_offset,), "quick_gelu", "linear_offset must be a number, got Tensor; ")
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, y, None, None, how)


def weighted_quick_geglu(
    y: Tensor,
    weights: Tensor,
    linear_offset: float = 0.0,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `quick_geglu` times a weight for each token, ``[..., 1]`` of any floating-point dtype."""
    op = "weighted_quick_geglu"
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, y, None, weights, how)


def bias_quick_geglu(
    y: Tensor,
    bias: Tensor | None,
    linear_offset: float = 0.0,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `quick_geglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, of any floating-point dtype."""
    op = "bias_quick_geglu"
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, y, bias, None, how)


def weighted_bias_quick_geglu(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    linear_offset: float = 0.0,
    *,
    clamp_value: float | None = None,
    fp8_input_store: bool = False,
) -> Tensor:
    """Compute `quick_geglu` of ``y + bias`` with a bias ``[2·hidden]`` or None, times the weights ``[..., 1]``."""
    op = "weighted_bias_quick_geglu"
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, y, bias, weights, how)
