"""Gated activations under Megatron-LM's names and with Megatron's signatures."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fused.activations import bias_activation
from fused.gated import gated, settings

Tensor = torch.Tensor


class _GatedFunction:
    """Gated activation, called like an autograd function, with the positional arguments in `names`.

    No subclass of `torch.autograd.Function`: compilers would inline that in place of `apply`.
    """

    activation: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the gated activation to Megatron's positional arguments."""
        named = dict(zip(cls.names, args, strict=False))
        offset = named.get("linear_offset", 0.0)
        how = settings(
            cls.__name__,
            cls.activation,
            None,
            named.get("fp8_input_store", False),
            offset.item() if isinstance(offset, Tensor) else offset,
            named.get("cpu_offload_input", False),
        )
        return gated(cls.__name__, named["input"], named.get("bias"), named.get("weights"), how)


class SwiGLUFunction(_GatedFunction):
    """`swiglu` as ``SwiGLUFunction.apply(input, fp8_input_store, cpu_offload_input)``."""

    activation = "silu"
    names = ("input", "fp8_input_store", "cpu_offload_input")


class BiasSwiGLUFunction(_GatedFunction):
    """`bias_swiglu` as ``BiasSwiGLUFunction.apply(input, bias, fp8_input_store, cpu_offload_input)``."""

    activation = "silu"
    names = ("input", "bias", "fp8_input_store", "cpu_offload_input")


class WeightedSwiGLUFunction(_GatedFunction):
    """`weighted_swiglu` as ``WeightedSwiGLUFunction.apply(input, weights, fp8_input_store)``."""

    activation = "silu"
    names = ("input", "weights", "fp8_input_store")


class GeGLUFunction(_GatedFunction):
    """`geglu` in the tanh form as ``GeGLUFunction.apply(input)``."""

    activation = "gelu_tanh"
    names = ("input",)


class BiasGeGLUFunction(_GatedFunction):
    """`bias_geglu` in the tanh form as ``BiasGeGLUFunction.apply(input, bias)``."""

    activation = "gelu_tanh"
    names = ("input", "bias")


class WeightedQuickGeGLUFunction(_GatedFunction):
    """`weighted_quick_geglu` as ``WeightedQuickGeGLUFunction.apply(input, weights, fp8_input_store, linear_offset)``.

    The offset may be a tensor without dimensions, as in Megatron; it has no gradient.
    """

    activation = "quick_gelu"
    names = ("input", "weights", "fp8_input_store", "linear_offset")


class WeightedBiasQuickGeGLUFunction(_GatedFunction):
    """`weighted_bias_quick_geglu` as ``.apply(input, bias, weights, fp8_input_store, linear_offset)``.

    The offset may be a tensor without dimensions, as in Megatron; it has no gradient.
    """

    activation = "quick_gelu"
    names = ("input", "bias", "weights", "fp8_input_store", "linear_offset")


def quick_gelu(y: Tensor) -> Tensor:
    """Compute ``y·σ(1.702·y)``, as `bias_activation` with ``"quick_gelu"`` and no bias."""
    return bias_activation(y, None, "quick_gelu")


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """Compute `bias_swiglu` under Megatron's name, with the same shapes (any rank from 1), dtypes and errors.

    `cpu_offload_input` sets ``activation_offloading`` on the saved tensors, for Transformer Engine's offloader.
    """
    op = "bias_swiglu_impl"
    how = settings(op, "silu", clamp_value, fp8_input_store, offload=cpu_offload_input)
    return gated(op, input, bias, None, how)


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """Compute `weighted_bias_swiglu` under Megatron's name, with the same shapes, dtypes and errors."""
    op = "weighted_bias_swiglu_impl"
    return gated(op, input, bias, weights, settings(op, "silu", clamp_value, fp8_input_store))


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `bias_geglu` in the tanh form under Megatron's name, with the same shapes, dtypes and errors."""
    op = "bias_geglu_impl"
    return gated(op, input, bias, None, settings(op, "gelu_tanh", None, False))


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
) -> Tensor:
    """Compute `weighted_bias_quick_geglu` under Megatron's name, with the same shapes, dtypes and errors.

    The clamp is applied after the bias is added; Megatron clamps before.
    """
    op = "weighted_bias_quick_geglu_impl"
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, input, bias, weights, how)
