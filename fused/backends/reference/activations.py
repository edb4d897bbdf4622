"""Table of the activations, with the value and the gradient of each.

Tanh and erf GELU are two activations: they differ by up to 4.7e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fused.backends.reference.numbers import compute_dtype, sum_over_rows
from fused.backends.tracing import transformed

Tensor = torch.Tensor
_aten = torch.ops.aten

QUICK = 1.702


@dataclass(frozen=True)
class Activation:
    """Activation in torch's own kernels, with more precise forms for kernels with cancellation.

    Args:
        value, gradient: ``value(z)``, and ``gradient(g, z)`` at z for the incoming gradient g.
        precise_value, precise_gradient: the same for results in float32, if the kernel is off by more
            than a few units in the last place.
        result_gradient: ``result_gradient(g, y)`` at y = value(z), for activations that can save for the backward
            pass their result, which the next layer saves as well, instead of their input.
        survives_rounding: whether a result rounded to 16 bits gives the same gradient.
        has_kernels: whether value and gradient are one kernel of torch each, which rounds 16-bit numbers once.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    precise_value: Callable[[Tensor], Tensor] | None = None
    precise_gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    result_gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    survives_rounding: bool = False
    has_kernels: bool = False

    def saves_result(self, dtype: torch.dtype) -> bool:
        """Check whether the backward pass starts from a result of this dtype, not from x of this dtype."""
        return self.result_gradient is not None and (self.survives_rounding or dtype.itemsize >= 4)

    def is_one_pass(self, dtype: torch.dtype) -> bool:
        """Check whether plain torch computes the value, and the gradient from the saved tensor, in one pass each."""
        return self.has_kernels and (self.result_gradient is None or self.saves_result(dtype))


def _silu_gradient(g: Tensor, z: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(g, z)
    # The kernel has no derivative.
    s = torch.sigmoid(z)
    return g * s * (1 + z * (1 - s))


def _mish_gradient(g: Tensor, z: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.mish_backward(g, z)
    # The kernel has no derivative.
    t = torch.tanh(F.softplus(z))
    return g * (t + z * torch.sigmoid(z) * (1 - t * t))


def _quick_gelu_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(QUICK * z)
    return g * s * (1 + QUICK * z * (1 - s))


def _erf_gelu(z: Tensor) -> Tensor:
    # The one-pass kernel approximates erf on the CPU, and is 1e-6 off if 1 + erf cancels.
    half = 0.5 * z
    return torch.addcmul(half, half, torch.erf(z * math.sqrt(0.5)))


def _tanh_gelu_gradient(g: Tensor, z: Tensor) -> Tensor:
    # 1 + tanh and 1 - tanh² cancel: in float32 the kernel is up to 6e-6 off.
    return _aten.gelu_backward(g.double(), z.double(), approximate="tanh").to(z.dtype)


def _relu_gradient(g: Tensor, z: Tensor) -> Tensor:
    return _aten.threshold_backward(g, z, 0)


def _relu6_gradient(g: Tensor, z: Tensor) -> Tensor:
    return _aten.hardtanh_backward(g, z, 0.0, 6.0)


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu, _relu_gradient, result_gradient=_relu_gradient, survives_rounding=True, has_kernels=True
    ),
    "relu6": Activation(
        F.relu6, _relu6_gradient, result_gradient=_relu6_gradient, survives_rounding=True, has_kernels=True
    ),
    "relu2": Activation(lambda z: torch.relu(z).square(), lambda g, z: 2 * g * torch.relu(z)),
    "hard_swish": Activation(F.hardswish, lambda g, z: _aten.hardswish_backward(g, z), has_kernels=True),
    "silu": Activation(F.silu, _silu_gradient, has_kernels=True),
    "mish": Activation(F.mish, _mish_gradient),
    "quick_gelu": Activation(lambda z: z * torch.sigmoid(QUICK * z), _quick_gelu_gradient),
    "gelu": Activation(F.gelu, lambda g, z: _aten.gelu_backward(g, z), precise_value=_erf_gelu),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
        precise_gradient=_tanh_gelu_gradient,
    ),
    "tanh": Activation(
        torch.tanh,
        lambda g, z: _aten.tanh_backward(g, torch.tanh(z)),
        result_gradient=lambda g, y: _aten.tanh_backward(g, y),
    ),
    "sigmoid": Activation(
        torch.sigmoid,
        lambda g, z: _aten.sigmoid_backward(g, torch.sigmoid(z)),
        result_gradient=lambda g, y: _aten.sigmoid_backward(g, y),
        has_kernels=True,
    ),
}


_IN_PLACE = {
    "relu": _aten.relu_,
    "relu6": _aten.relu6_,
    "silu": _aten.silu_,
    "hard_swish": _aten.hardswish_,
    "mish": _aten.mish_,
}
_OVER_INPUT = {
    "relu": lambda d, z: _aten.threshold_backward.grad_input(d, z, 0, grad_input=z),
    "silu": lambda d, z: _aten.silu_backward.grad_input(d, z, grad_input=z),
}


def activated(name: str | None, z: Tensor) -> Tensor:
    """Return act(z), or z itself without an activation."""
    if name is None:
        return z
    entry = ACTIVATIONS[name]
    return (entry.precise_value or entry.value)(z) if z.dtype == torch.float32 else entry.value(z)


def activated_over(name: str | None, z: Tensor) -> Tensor:
    """Return act(z), over z if torch has a kernel for this: a new tensor of this size costs as much as the pass."""
    return _IN_PLACE[name](z) if name in _IN_PLACE else activated(name, z)


def activation_gradient(name: str | None, d: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of z for the gradient d of act(z)."""
    if name is None:
        return d
    entry = ACTIVATIONS[name]
    precise = entry.precise_gradient if z.dtype == torch.float32 else None
    return (precise or entry.gradient)(d, z)


def activation_gradient_over(name: str | None, d: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of z, over z if torch has a kernel for this."""
    return _OVER_INPUT[name](d, z) if name in _OVER_INPUT else activation_gradient(name, d, z)


def bias_activation(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Compute act(x + bias), in float32 for 16-bit numbers, and return it in the dtype of x + bias."""
    entry = ACTIVATIONS[activation]
    if bias is None and entry.is_one_pass(x.dtype):
        return entry.value(x)
    z, dtype = biased(x, bias)
    precise = entry.precise_value
    if precise is not None and dtype == torch.float32 and not transformed():
        return precise(z)
    return entry.value(z).to(dtype)


def bias_activation_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and the bias in the dtypes of these, or None if not needed.

    x is the result of the forward pass for activations that save the result.
    """
    entry = ACTIVATIONS[activation]
    from_result = entry.result_gradient if entry.saves_result(x.dtype) else None
    if bias is None and entry.is_one_pass(x.dtype) and g.dtype == x.dtype and not torch.is_grad_enabled():
        return (from_result or entry.gradient)(g, x) if needs[0] else None, None
    z, dtype = biased(x, bias if from_result is None else None)
    precise = entry.precise_gradient if dtype == torch.float32 else None
    dz = (precise or from_result or entry.gradient)(g.to(z.dtype), z)
    dx = dz.to(x.dtype) if needs[0] else None
    return dx, sum_over_rows(dz).to(bias.dtype) if needs[1] and bias is not None else None


def biased(x: Tensor, bias: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """Return x + bias in the compute dtype, and the dtype of the result."""
    if bias is None:
        return x.to(compute_dtype(x.dtype)), x.dtype
    dtype = x.dtype if x.dtype == bias.dtype else torch.promote_types(x.dtype, bias.dtype)
    compute = compute_dtype(dtype)
    return x.to(compute) + bias.to(compute), dtype


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """Compute relu(x)² · weights in x's dtype."""
    compute = compute_dtype(torch.promote_types(x.dtype, weights.dtype))
    return (torch.relu(x.to(compute)).square() * weights.to(compute)).to(x.dtype)


def weighted_squared_relu_backward(
    g: Tensor, x: Tensor, weights: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx = 2·relu(x)·g·w, and dw = the sum of relu(x)²·g over the last dimension."""
    compute = compute_dtype(torch.promote_types(x.dtype, weights.dtype))
    r, g = torch.relu(x.to(compute)), g.to(compute)
    dx = (2 * r * g * weights.to(compute)).to(x.dtype) if needs[0] else None
    dweights = (r.square() * g).sum(-1, keepdim=True).to(weights.dtype) if needs[1] else None
    return dx, dweights
