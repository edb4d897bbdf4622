"""Bias + activation in one pass, with one tensor and the bias saved."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, cast

import torch

from fused.backends import Op, compiled, requested
from fused.backends.reference import activations as formulas
from fused.backends.reference.activations import ACTIVATIONS
from fused.backends.rows import as_rows
from fused.backends.tracing import differentiated, transformed
from fused.checks import check_activation, check_bias, check_float, check_weights, has_one_feature
from fused.recomputation import Recomputation, saved_tensors
from fused.sharding import localise, sharded

Tensor = torch.Tensor


# Number of elements from which compiled code is faster on the CPU, forward and backward together. Below it, the
# fixed cost of about 100 µs per call outweighs the gain.
_COMPILED_FROM = {
    "relu": 2**18,
    "relu2": 2**16,
    "relu6": 2**18,
    "hard_swish": 2**18,
    "silu": 2**18,
    "mish": 2**16,
    "quick_gelu": 2**16,
    "gelu": 2**17,
    "gelu_tanh": 2**15,
    "tanh": 2**20,
    "sigmoid": 2**18,
}


def _compiled_from(activation: str, **statics: Hashable) -> int:
    return _COMPILED_FROM[activation]


BIAS_ACTIVATION = Op(
    "bias_activation",
    forward=formulas.bias_activation,
    backward=formulas.bias_activation_backward,
    canonical=as_rows,
    operands=lambda args: args[:1],
    pointwise=lambda args: args[-1] is None,  # the bias
    small_on_cpu=_compiled_from,
    kernels="fused.backends.triton.activations",
)
BIAS_ACTIVATION.register(
    "inductor",
    forward=compiled.bias_activation,
    backward=compiled.bias_activation_backward,
)
WEIGHTED_SQUARED_RELU = Op(
    "weighted_squared_relu",
    forward=formulas.weighted_squared_relu,
    backward=formulas.weighted_squared_relu_backward,
    canonical=as_rows,
    operands=lambda args: args[:1],
    kernels="fused.backends.triton.activations",
)


def _backend(inp: Tensor, bias: Tensor | None, activation: str) -> str | None:
    """Return the requested backend, or "reference" if none is requested and plain torch is as fast."""
    asked = requested()
    if asked is None and bias is None and inp.is_cpu and ACTIVATIONS[activation].is_one_pass(inp.dtype):
        return "reference"
    return asked


def _forward(inp: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    backend = _backend(inp, bias, activation)
    result: Tensor = BIAS_ACTIVATION.run("forward", (inp, bias), backend, activation=activation)
    return result


def _save(ctx: Any, inp: Tensor, bias: Tensor | None, result: Tensor, activation: str) -> None:
    ctx.save_for_backward(result if ACTIVATIONS[activation].saves_result(result.dtype) else inp, bias)
    ctx.dtype = inp.dtype
    ctx.activation = activation
    ctx.backend = _backend(inp, bias, activation)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
    dx, dbias = BIAS_ACTIVATION.run(
        "backward", (g, *saved_tensors(ctx)), ctx.backend, activation=ctx.activation, needs=needs
    )
    return dx if dx is None else dx.to(ctx.dtype), dbias


class _BiasActivation(torch.autograd.Function):
    """Autograd function of act(inp + bias) for plain tensors, saving inp or the result, and the bias.

    Does not split `forward` and `setup_context`: torch would look up their signatures at every call, which takes
    as long as a small op.
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        result = _forward(inp, bias, activation)
        _save(ctx, inp, bias, result, activation)
        if not ACTIVATIONS[activation].saves_result(result.dtype):
            ctx.recomputation = Recomputation(result, partial(_forward, activation=activation), requested())
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_output), None


class BiasGeLUFunction:
    """Megatron's and Slapo's fused bias + GELU in the tanh form, called as ``BiasGeLUFunction.apply(inp, bias)``.

    Args:
        inp: ``[..., hidden]``, floating point.
        bias: ``[hidden]``, or None.

    Returns:
        ``[..., hidden]`` in the dtype of ``inp + bias``. Saves `inp` and `bias`.

    Raises:
        TypeError, ValueError: as `bias_activation`.

    Source: Megatron-LM ``fused_bias_gelu``, Slapo ``fused_bias``; with exact constants.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply `bias_gelu` with ``approximate="tanh"``."""
        return bias_gelu(*args)


GeLUFunction = BiasGeLUFunction


def _weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = WEIGHTED_SQUARED_RELU.run("forward", (x, weights), requested())
    return result


class _WeightedSquaredReLU(torch.autograd.Function):
    """Autograd function of relu(x)² · weights for plain tensors, saving both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.backend = requested()
        result = _weighted_squared_relu(x, weights)
        ctx.recomputation = Recomputation(result, _weighted_squared_relu, ctx.backend)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweights = WEIGHTED_SQUARED_RELU.run(
            "backward",
            (grad_output, *saved_tensors(ctx)),
            ctx.backend,
            needs=tuple(ctx.needs_input_grad),
        )
        return dx, dweights


def bias_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``act(x + bias)``, saving for the backward pass only the bias and either x or the result.

    Relu and relu6 save their result, and so do tanh and sigmoid in float32 and float64: the next layer mostly saves it
    as well.

    Args:
        x: ``[..., hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor
            may be sharded on any dimension; the op runs on its shards.
        bias: ``[hidden]``, or None for no bias. May have another dtype than x. If it or x has one feature only, torch
            computes the broadcasting sum before the pass.
        activation: ``"relu"``, ``"relu2"`` (relu(z)²), ``"relu6"``, ``"hard_swish"``, ``"silu"``, ``"mish"``
            (z·tanh(softplus(z))), ``"quick_gelu"`` (z·σ(1.702z)), ``"gelu"`` (erf), ``"gelu_tanh"``, ``"tanh"`` or
            ``"sigmoid"``.

    Returns:
        ``[..., hidden]`` in the dtype that ``x + bias`` has in torch (bfloat16 with a float32 bias gives
        float32). 16-bit inputs are computed in float32 and rounded once. Each gradient has the dtype of its
        tensor; the bias gradient is summed in float32.

    Raises:
        TypeError: if x or the bias is not a floating-point tensor.
        ValueError: for an unknown activation, a bias that is not ``[hidden]``, or tensors on two devices.

    Source: Megatron-LM ``fused_bias_gelu``, Slapo ``fused_bias``.
    """
    return _bias_activation("bias_activation", x, bias, activation)


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "tanh") -> Tensor:
    """Compute ``gelu(x + bias)``.

    Args:
        x: ``[..., hidden]``, floating point.
        bias: ``[hidden]``, or None.
        approximate: ``"tanh"`` for ½z(1 + tanh(√(2/π)(z + 0.044715z³))), ``"none"`` for z·Φ(z). The two
            differ by up to 4.7e-4.

    Returns:
        ``[..., hidden]``, dtypes and gradients as `bias_activation`.

    Raises:
        TypeError, ValueError: as `bias_activation`; ValueError for another `approximate`.

    Source: Megatron-LM ``fused_bias_gelu`` (tanh form).
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"bias_gelu: approximate must be 'tanh' or 'none', got {approximate!r}")
    return _bias_activation("bias_gelu", x, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `bias_gelu` in the tanh form under Megatron's name, with the same shapes, dtypes and errors."""
    return _bias_activation("bias_gelu_impl", input, bias, "gelu_tanh")


def new_gelu(x: Tensor) -> Tensor:
    """Compute the tanh form of GELU in one pass, as HuggingFace's ``NewGELUActivation``.

    Args:
        x: ``[..., hidden]``, floating point.

    Returns:
        The shape and dtype of x. Saves x.

    Raises:
        TypeError, ValueError: as `bias_activation`.

    Source: transformers ``NewGELUActivation``.
    """
    return _bias_activation("new_gelu", x, None, "gelu_tanh")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``F.gelu(x, approximate=approximate)`` in one pass: `bias_gelu` without a bias."""
    return bias_gelu(x, None, approximate)


def mish(x: Tensor) -> Tensor:
    """Compute ``x · tanh(softplus(x))`` in one pass: `bias_activation` of ``"mish"`` without a bias."""
    return _bias_activation("mish", x, None, "mish")


def bias_new_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``new_gelu(x + bias)``: `bias_gelu` in the tanh form, with the same shapes, dtypes and errors."""
    return _bias_activation("bias_new_gelu", x, bias, "gelu_tanh")


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """Compute ``relu(x)² · weights`` with a weight for each token, as in a mixture of experts.

    Args:
        x: ``[..., hidden]``, floating point.
        weights: ``[..., 1]`` with the leading dimensions of x; may have another dtype.

    Returns:
        The shape and dtype of x. Saves x and the weights. dw = Σ_last relu(x)²·g in the weights' dtype.

    Raises:
        TypeError: if x or the weights are not a floating-point tensor.
        ValueError: for other shapes of the weights, or tensors on two devices.

    Source: Megatron-LM ``weighted_squared_relu_impl``.
    """
    op = "weighted_squared_relu"
    check_float(op, "input", x, min_ndim=1)
    check_float(op, "weights", weights)
    if sharded(x) or not sharded(weights):
        check_weights(op, x, weights)
    local = localise(op, x, [weights])
    x, weights = local.x, local.given(0)
    check_weights(op, x, weights)
    if transformed(x, weights):
        return local.wrap(formulas.weighted_squared_relu(x, weights))
    return local.wrap(_WeightedSquaredReLU.apply(x, weights))


def _bias_activation(op: str, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    check_activation(op, activation)
    if sharded(x, bias):
        return _bias_activation_sharded(op, x, bias, activation)
    if has_one_feature(x, bias):
        check_float(op, "bias", bias)
        return _bias_activation(op, x + cast(Tensor, bias), None, activation)
    check_bias(op, x, bias)
    return _apply(x, bias, activation)


def _bias_activation_sharded(op: str, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    # A plain x is a local shard: the bias is checked against it once the bias is local too.
    check_float(op, "input", x, min_ndim=1)
    if sharded(x):
        check_bias(op, x, bias)
    local = localise(op, x, [bias])
    check_bias(op, local.x, local.others[0])
    return local.wrap(_apply(local.x, local.others[0], activation))


def _apply(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if transformed(x, bias):
        return formulas.bias_activation(x, bias, activation=activation)
    if not differentiated(x, bias):
        return _forward(x, bias, activation)
    result: Tensor = _BiasActivation.apply(x, bias, activation)
    return result
