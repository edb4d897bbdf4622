"""Gated activations under Megatron-LM's names and with Megatron's signatures."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fused.activations import bias_activation
from fused.backends import requested
from fused.gated import gated, settings
from fused.gated_autograd import Gated, forward, gradients, save

Tensor = torch.Tensor

_OPERANDS = ("input", "bias", "weights")


class _GatedFunction(torch.autograd.Function):
    """Gated activation as an autograd function, with the positional arguments in `names`."""

    activation: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the gated activation to Megatron's positional arguments."""
        y, bias, weights, how = cls._arguments(args)
        return gated(cls.__name__, y, bias, weights, how)

    @classmethod
    def _arguments(cls, args: tuple[Any, ...]) -> tuple[Any, Any, Any, Gated]:
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
        return named["input"], named.get("bias"), named.get("weights"), how

    def __init_subclass__(cls) -> None:
        # Tracers that inline an autograd function call these instead of `apply`. They are functions and not class
        # methods, because every access to a class method makes a new object.
        def forward_of(*args: Any) -> Tensor:
            y, bias, weights, how = cls._arguments(args)
            return forward(y, None, bias, weights, how, requested())

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            y, bias, weights, how = cls._arguments(inputs)
            ctx.positions = [cls.names.index(name) if name in cls.names else None for name in _OPERANDS]
            ctx.arguments = len(inputs)
            save(ctx, y, None, bias, weights, how)

        cls.forward = staticmethod(forward_of)  # type: ignore[method-assign]
        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        y, bias, weights = (position is not None and ctx.needs_input_grad[position] for position in ctx.positions)
        dy, _, dbias, dweights = gradients(ctx, grad_output, (y, False, bias, weights))
        results: list[Tensor | None] = [None] * ctx.arguments
        for position, gradient in zip(ctx.positions, (dy, dbias, dweights), strict=True):
            if position is not None:
                results[position] = gradient
        return tuple(results)


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
