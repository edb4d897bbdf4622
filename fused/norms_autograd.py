"""Norms as ops and as autograd functions, for checked plain tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fused.backends import Op, compiled_norms, requested
from fused.backends.reference import norms as formulas
from fused.backends.reference.norms import Casting
from fused.backends.rows import as_rows
from fused.backends.strides import owned
from fused.recomputation import Recomputation, saved_tensors

Tensor = torch.Tensor
RMSResults = tuple[Tensor, Tensor | None, Tensor]
LayerResults = tuple[Tensor, Tensor | None, Tensor, Tensor]

RMS_NORM = Op(
    "rms_norm",
    forward=formulas.rms_norm,
    backward=formulas.rms_norm_backward,
    canonical=as_rows,
    operands=lambda args: args[:2],
    kernels="fused.backends.triton.norms",
)
RMS_NORM.register(
    "inductor",
    forward=compiled_norms.rms_norm,
    backward=formulas.rms_norm_backward,
    finish_forward=compiled_norms.rms_norm_statistics,
)
LAYER_NORM = Op(
    "layer_norm",
    forward=formulas.layer_norm,
    backward=formulas.layer_norm_backward,
    canonical=as_rows,
    operands=lambda args: args[:2],
    kernels="fused.backends.triton.norms",
)


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: Casting,
    memory_format: torch.memory_format,
) -> RMSResults:
    """Run the forward formula on the requested backend."""
    normed, *others = RMS_NORM.run("forward", (x, residual, weight), requested(), eps=eps, casting=casting)
    return formatted(normed, memory_format), *others


def layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> LayerResults:
    """Run the forward formula on the requested backend."""
    # On the CPU torch's own kernel is faster, even with a separate sum before it.
    backend = requested() or ("reference" if x.is_cpu else None)
    if backend == "reference" and residual is None and memory_format == torch.contiguous_format:
        x = x.contiguous()  # as torch's kernel does by itself, whose result would be permuted back and forth
    args = (x, residual, weight, bias)
    normed, *others = LAYER_NORM.run("forward", args, backend, eps=eps, out_dtype=out_dtype)
    return formatted(normed, memory_format), *others


def formatted(normed: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return the norm, which has the strides of an elementwise result, contiguous if that is wanted."""
    return normed.contiguous() if memory_format == torch.contiguous_format else normed


def _gradients_of_sum(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Cast the gradient of the sum to the gradients of x and of the residual."""
    if dx is None:
        return None, None
    (of_x, of_residual, *_), (x_dtype, residual_dtype) = ctx.needs_input_grad, ctx.dtypes
    return dx.to(x_dtype) if of_x else None, dx.to(residual_dtype) if of_residual else None


def _rms_norm_again(x: Tensor, weight: Tensor | None, rstd: Tensor, **settings: Any) -> Tensor:
    return rms_norm_forward(x, None, weight, **settings)[0]


class RMSNorm(torch.autograd.Function):
    """Autograd function of the RMS norm and optional residual sum, saving the sum (or x), the weight and 1/RMS."""

    # `forward` and `setup_context` are not split: torch would look up their signatures at every call.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        casting: Casting,
        memory_format: torch.memory_format,
    ) -> tuple[Tensor, Tensor | None]:
        normed, total, rstd = rms_norm_forward(x, residual, weight, eps, casting, memory_format)
        ctx.set_materialize_grads(False)
        if total is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(x if total is None else total, weight, rstd)
        again = partial(_rms_norm_again, eps=eps, casting=casting, memory_format=memory_format)
        ctx.recomputation = Recomputation(normed, again, requested())
        ctx.dtypes = (x.dtype, x.dtype if residual is None else residual.dtype)
        ctx.eps, ctx.casting, ctx.backend = eps, casting, requested()
        return normed, total

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_total: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return *_gradients_of_sum(ctx, g_total), None, None, None, None
        x, weight, rstd = saved_tensors(ctx)
        if torch.is_grad_enabled():
            rstd = formulas.reciprocal_rms(x, ctx.eps)  # recomputed from x to be differentiable again
        needs = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        args = (g, g_total, x, weight, rstd)
        dx, dweight = RMS_NORM.run("backward", args, ctx.backend, casting=ctx.casting, needs=needs)
        return *_gradients_of_sum(ctx, dx), dweight, None, None, None


def _layer_norm_again(
    x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, bias: Tensor | None, **settings: Any
) -> Tensor:
    return layer_norm_forward(x, None, weight, bias, **settings)[0]


class LayerNorm(torch.autograd.Function):
    """Autograd function of the layer norm and optional residual sum, saving the sum (or x), weight and statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> tuple[Tensor, Tensor | None]:
        results = layer_norm_forward(x, residual, weight, bias, eps, out_dtype, memory_format)
        normed, total, mean, rstd = owned(results)
        ctx.set_materialize_grads(False)
        if total is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(x if total is None else total, weight, mean, rstd)
        again = partial(_layer_norm_again, eps=eps, out_dtype=out_dtype, memory_format=memory_format)
        ctx.recomputation = Recomputation(normed, again, requested(), [None if bias is None else bias.detach()])
        ctx.dtypes = (x.dtype, x.dtype if residual is None else residual.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = requested()
        return normed, total

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_total: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return *_gradients_of_sum(ctx, g_total), None, None, None, None, None
        x, weight, mean, rstd = saved_tensors(ctx)
        # torch's own kernel sums 16-bit numbers in 16 bits, and a gradient of the sum would take one more pass.
        alone = x.is_cpu and g_total is None and x.dtype == mean.dtype
        dx, dweight, dbias = LAYER_NORM.run(
            "backward",
            (g, g_total, x, weight, mean, rstd),
            ctx.backend or ("reference" if alone else None),
            bias_dtype=ctx.bias_dtype if ctx.needs_input_grad[3] else None,
            needs=(any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]),
        )
        return *_gradients_of_sum(ctx, dx), dweight, dbias, None, None, None
