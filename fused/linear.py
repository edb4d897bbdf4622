"""Linear layer on oneDNN or torch's BLAS, the faster of the two on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import onednn, requested
from fused.backends.tracing import differentiated, watched
from fused.torch_internals.modes import is_exporting

Tensor = torch.Tensor

LEAST_PRODUCTS = 2**24
"""Number of multiplications from which a call of oneDNN is faster."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear(input, weight, bias)``, by oneDNN if it is faster than torch's BLAS.

    oneDNN is used in float32 on the CPU. The three products of a training step, forward and backward, then take
    about half of MKL's time on AMD processors. All other calls run ``F.linear``: other dtypes, autocast and
    devices, fewer than 2**24 multiplications, tensor subclasses, `torch.func`, exported programs, and machines on
    which torch's products are as fast. The latter is measured and the result saved on disk; ``FUSED_ONEDNN``
    set to 0 or 1 overrides it.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``; ``w.t()`` for a weight stored as ``[in, out]``, whose gradient then has the same layout.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``. Saves its input and weight, as ``F.linear`` does; differentiable any number of times.

    Raises:
        RuntimeError: for operands that do not fit, as ``F.linear``.
    """
    if not _by_onednn(input, weight, bias):
        return F.linear(input, weight, bias)
    if torch.compiler.is_compiling() or differentiated(input, weight, bias):
        result: Tensor = _Linear.apply(input, weight, bias)
        return result
    return onednn.product(input, weight, bias)


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if weight.ndim != 2 or not input.is_cpu or requested() == "reference":
        return False
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if any(tensor.dtype != torch.float32 for tensor in tensors) or torch.is_autocast_enabled("cpu"):
        return False
    if input.shape[-1:] != weight.shape[1:] or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    if input.numel() * weight.shape[0] < LEAST_PRODUCTS or _watched(tensors):
        return False
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        return False  # weights with gaps take oneDNN a thousand times as long
    return not onednn.why_not()


def _watched(tensors: tuple[Tensor, ...]) -> bool:
    """Check whether the call must run plain torch operations: it is traced or transformed, or has tensor subclasses."""
    if torch.compiler.is_compiling():
        return is_exporting()
    return watched(tensors)


class _Linear(torch.autograd.Function):
    """Autograd function of the three products by oneDNN.

    Saves the input and the weight, each only if the gradient of the other is needed.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.by_rows = weight.is_contiguous()
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        return onednn.product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        return linear_backward(grads[0], input, weight, ctx.by_rows, ctx.needs_input_grad)


def linear_backward(
    g: Tensor, input: Tensor | None, weight: Tensor | None, by_rows: bool, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of :func:`linear`'s input, weight and bias, or None for those not ``wanted``.

    Args:
        g: ``[..., out]``, the gradient of the result.
        input: ``[..., in]``; may be None if the gradient of the weight is not wanted.
        weight: ``[out, in]``; may be None if the gradient of the input is not wanted.
        by_rows: whether the weight is contiguous; its gradient gets the same layout.
        wanted: for the input, the weight and the bias.
    """
    rows = g.reshape(-1, g.shape[-1]).contiguous()
    dinput = dweight = None
    if wanted[0] and weight is not None:
        dinput = linear(rows, weight.t()).view(*g.shape[:-1], weight.shape[1])
    if wanted[1] and input is not None:
        dweight = _outer(rows, input.reshape(-1, input.shape[-1]).contiguous(), by_rows)
    return dinput, dweight, rows.sum(0) if wanted[2] else None


def _outer(g: Tensor, x: Tensor, by_rows: bool) -> Tensor:
    """Compute ``g.t() @ x`` in the layout of the weight, by rows or by columns: autograd would copy any other.

    oneDNN copies its first operand into row order. This is g; if x and the result are much smaller, x is the first
    operand, and the result is copied here.
    """
    if not by_rows:
        return linear(x.t(), g.t()).t()
    if 2 * (x.numel() + g.shape[-1] * x.shape[-1]) < g.numel():
        return linear(x.t(), g.t()).t().contiguous()
    return linear(g.t(), x.t())
