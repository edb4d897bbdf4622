"""The gated activations under Megatron-LM's names, called as Megatron calls them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fused.activations import bias_activation
from fused.gated import gated, settings
from fused.gated_autograd import Gated, forward, gradients, save

Tensor = torch.Tensor

_OPERANDS = ("input", "bias", "weights")


class _GatedFunction(torch.autograd.Function):
    """A gated activation as an autograd function, with positional arguments of the names in `names`."""

    activation: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As the function of the same formula, with Megatron's arguments."""
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
        # Tracers that open an autograd function by its parts see these and not `apply`. They are functions and not
        # class methods, of which there would be a new one at every look.
        def forward_of(*args: Any) -> Tensor:
            y, bias, weights, how = cls._arguments(args)
            return forward(y, None, bias, weights, how)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            y, bias, weights, how = cls._arguments(inputs)
            ctx.places = [cls.names.index(name) if name in cls.names else None for name in _OPERANDS]
            ctx.arguments = len(inputs)
            save(ctx, y, None, bias, weights, how)

        cls.forward = staticmethod(forward_of)  # type: ignore[method-assign]
        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        y, bias, weights = (place is not None and ctx.needs_input_grad[place] for place in ctx.places)
        dy, _, dbias, dweights = gradients(ctx, grad_output, (y, False, bias, weights))
        results: list[Tensor | None] = [None] * ctx.arguments
        for place, gradient in zip(ctx.places, (dy, dbias, dweights), strict=True):
            if place is not None:
                results[place] = gradient
        return tuple(results)


class SwiGLUFunction(_GatedFunction):
    """``SwiGLUFunction.apply(input, fp8_input_store, cpu_offload_input)``: as `swiglu`."""

    activation = "silu"
    names = ("input", "fp8_input_store", "cpu_offload_input")


class BiasSwiGLUFunction(_GatedFunction):
    """``BiasSwiGLUFunction.apply(input, bias, fp8_input_store, cpu_offload_input)``: as `bias_swiglu`."""

    activation = "silu"
    names = ("input", "bias", "fp8_input_store", "cpu_offload_input")


class WeightedSwiGLUFunction(_GatedFunction):
    """``WeightedSwiGLUFunction.apply(input, weights, fp8_input_store)``: as `weighted_swiglu`."""

    activation = "silu"
    names = ("input", "weights", "fp8_input_store")


class GeGLUFunction(_GatedFunction):
    """``GeGLUFunction.apply(input)``: as `geglu`, the tanh form."""

    activation = "gelu_tanh"
    names = ("input",)


class BiasGeGLUFunction(_GatedFunction):
    """``BiasGeGLUFunction.apply(input, bias)``: as `bias_geglu`, the tanh form."""

    activation = "gelu_tanh"
    names = ("input", "bias")


class WeightedQuickGeGLUFunction(_GatedFunction):
    """``WeightedQuickGeGLUFunction.apply(input, weights, fp8_input_store, linear_offset)``: as `weighted_quick_geglu`.

    The offset may be a tensor without dimensions, as in Megatron; it has no gradient.
    """

    activation = "quick_gelu"
    names = ("input", "weights", "fp8_input_store", "linear_offset")


class WeightedBiasQuickGeGLUFunction(_GatedFunction):
    """``.apply(input, bias, weights, fp8_input_store, linear_offset)``: as `weighted_bias_quick_geglu`.

    The offset may be a tensor without dimensions, as in Megatron; it has no gradient.
    """

    activation = "quick_gelu"
    names = ("input", "bias", "weights", "fp8_input_store", "linear_offset")


def quick_gelu(y: Tensor) -> Tensor:
    """``y·σ(1.702·y)``: as `bias_activation` with ``"quick_gelu"`` and no bias."""
    return bias_activation(y, None, "quick_gelu")


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """Megatron's name for `bias_swiglu`: its shapes (of any rank from 1), dtypes and errors.

    `cpu_offload_input` marks what is saved with ``activation_offloading``, for Transformer Engine's offloader.
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
    """Megatron's name for `weighted_bias_swiglu`: its shapes, dtypes and errors. Takes a bias, too."""
    op = "weighted_bias_swiglu_impl"
    return gated(op, input, bias, weights, settings(op, "silu", clamp_value, fp8_input_store))


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Megatron's name for `bias_geglu` in the tanh form: its shapes, dtypes and errors."""
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
    """Megatron's name for `weighted_bias_quick_geglu`: its shapes, dtypes and errors.

    The clamp comes after the bias; Megatron clamps before it adds one.
    """
    op = "weighted_bias_quick_geglu_impl"
    how = settings(op, "quick_gelu", clamp_value, fp8_input_store, linear_offset)
    return gated(op, input, bias, weights, how)
