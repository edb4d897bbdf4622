"""A linear layer by the faster of the machine's two libraries of products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fused.backends import onednn, requested
from fused.backends.tracing import PLAIN, differentiated, transformed

Tensor = torch.Tensor

LEAST_PRODUCTS = 2**24
"""From how many multiplications on oneDNN is faster, and the call of it pays."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(input, weight, bias)``: in float32 on a CPU where oneDNN multiplies faster than torch's BLAS, by that.

    Three products of a training step, forward and backward, in about half of MKL's time on processors by AMD.
    Everything else is ``F.linear`` itself: other dtypes, autocast and devices, fewer than 2**24 multiplications,
    tensor subclasses, `torch.func`, exported programs, and machines where torch's products are as fast.
    ``FUSED_ONEDNN`` set to 0 or 1 settles the last, instead of a measurement that is made once and kept on disk.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``; ``w.t()`` for a weight stored as ``[in, out]``, whose gradient then lies as it does.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]``. Saves what ``F.linear`` saves, its input and weight; differentiable any number of times.

    Raises:
        RuntimeError: as ``F.linear``, for operands that do not fit.
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
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        return False  # weights with gaps take oneDNN a thousand times as long
    return not _watched(tensors) and input.numel() * weight.shape[0] >= LEAST_PRODUCTS and not onednn.why_not()


def _watched(tensors: tuple[Tensor, ...]) -> bool:
    """Whether somebody wants to see plain torch operations, or tensors do more than be multiplied."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    if transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(type(t) not in PLAIN or torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


class _Linear(torch.autograd.Function):
    """The three products by oneDNN. Saves the input and the weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return onednn.product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        input, weight = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1]).contiguous()
        dinput = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dinput = linear(rows, weight.t()).view(input.shape)
        if ctx.needs_input_grad[1]:
            dweight = _outer(rows, input.reshape(-1, input.shape[-1]).contiguous(), weight)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dinput, dweight, dbias


def _outer(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``g.t() @ x``, in memory as the weight is: autograd would copy it otherwise.

    oneDNN copies what it is given first into rows, unless it lies so: g, or else x and then we the result.
    """
    if not weight.is_contiguous():
        return linear(x.t(), g.t()).t()
    if 2 * (x.numel() + weight.numel()) < g.numel():
        return linear(x.t(), g.t()).t().contiguous()
    return linear(g.t(), x.t())
