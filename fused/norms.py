"""RMS and layer norms in one pass, with an optional residual sum before the norm.

They save the input of the norm (the sum, if there is one), the weight, and one or two numbers per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from fused.backends.reference import norms as formulas
from fused.backends.reference.norms import Casting
from fused.backends.reference.numbers import autocast_norm_dtype
from fused.backends.tracing import differentiated, transformed
from fused.checks import (
    MismatchError,
    broadcast_shape,
    check_eps,
    check_float,
    check_row,
    check_same_device,
    has_one_feature,
    shape,
)
from fused.norms_autograd import LayerNorm, RMSNorm, formatted, layer_norm_forward, rms_norm_forward
from fused.sharding import localise, sharded

Tensor = torch.Tensor
Parameters = dict[str, Tensor | None]
"""Rows of features by their names."""
Result = tuple[Tensor, Tensor | None]
Apply = Callable[..., Result]
"""Computes the norm of x, the residual and the values of the parameters."""

CASTINGS = ("llama", "gemma", "torch")


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Compute ``x / √(mean(x²) + eps) · weight`` over the last dimension.

    Args:
        x: ``[..., hidden]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor may be
            sharded on any dimension; if sharded on the last, it is gathered.
        weight: ``[hidden]``, or None for no weight. May have another dtype than x. A single feature, of the weight or
            of x, broadcasts.
        eps: added to the mean square.
        casting: ``"llama"``: normalized in float32, cast to x's dtype, then times the weight (LlamaRMSNorm, T5,
            Mistral, Qwen); ``"gemma"``: times (1 + weight) in float32, then cast; ``"torch"``: times the weight in
            float32, then cast, as ``F.rms_norm`` and OLMo.
        memory_format: ``torch.preserve_format`` for the strides of the formula written out, or
            ``torch.contiguous_format`` for those of ``F.rms_norm``.

    Returns:
        ``[..., hidden]`` in x's dtype; with Llama's casting in the dtype of ``weight * x``. Compiled code may skip
        the first of Llama's two roundings. Saves x, the weight, and 1/RMS of each row in float32. The gradient
        of the weight is summed in float32 and has the weight's dtype.

    Raises:
        TypeError: if x or the weight is not a floating-point tensor, or eps not a number.
        ValueError: for a weight that is not ``[hidden]``, tensors on two devices, or another casting.

    Source: Zhang and Sennrich 2019; transformers ``LlamaRMSNorm`` and ``GemmaRMSNorm``.
    """
    return _rms_norm("rms_norm", x, None, weight, eps, casting, memory_format)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    casting: Casting = "llama",
    memory_format: torch.memory_format = torch.preserve_format,
) -> tuple[Tensor, Tensor]:
    """Compute ``rms_norm(x + residual, weight, eps)`` and ``x + residual``, in one pass.

    Args:
        x, weight, eps, casting, memory_format: as `rms_norm`.
        residual: broadcastable with x; may have another dtype.

    Returns:
        The norm as from `rms_norm` of the sum, and the sum in the dtype that it has in torch. Both are differentiable,
        but the norm not with respect to the sum: gradients flow from both to x and the residual. Saves the sum, the
        weight, and 1/RMS of each row.

    Raises:
        TypeError, ValueError: as `rms_norm`, also for the residual.
    """
    op = "add_rms_norm"
    total = _broadcast_sum(op, x, residual, weight)
    if total is not None:
        return _rms_norm(op, total, None, weight, eps, casting, memory_format)[0], total
    return cast("tuple[Tensor, Tensor]", _rms_norm(op, x, residual, weight, eps, casting, memory_format))


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Compute ``(x − mean) / √(variance + eps) · weight + bias`` over the last dimension, as ``F.layer_norm``.

    Args:
        x: ``[..., hidden]``, as `rms_norm`.
        weight, bias: ``[hidden]``, or None. May have another dtype than x.
        eps: added to the variance.
        memory_format: ``torch.contiguous_format`` for the strides of ``F.layer_norm``, or ``torch.preserve_format`` for
            those of the formula written out.

    Returns:
        ``[..., hidden]`` in x's dtype (float32 for 16-bit x under CUDA autocast, as in torch). Saves x, the weight, and
        mean and 1/deviation of each row in float32. The gradients of weight and bias are summed in float32.

    Raises:
        TypeError: if a tensor is not floating point, or eps not a number.
        ValueError: for a weight or bias that is not ``[hidden]``, or tensors on two devices.

    Source: Ba, Kiros and Hinton 2016; ``torch.nn.functional.layer_norm``.
    """
    return _layer_norm("layer_norm", x, None, weight, bias, eps, memory_format)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[Tensor, Tensor]:
    """Compute ``layer_norm(x + residual, weight, bias, eps)`` and ``x + residual``, in one pass.

    Args:
        x, weight, bias, eps, memory_format: as `layer_norm`.
        residual: broadcastable with x; may have another dtype.

    Returns:
        The norm as from `layer_norm` of the sum, and the sum in the dtype that it has in torch. Both are
        differentiable, but the norm not with respect to the sum: gradients flow from both to x and the residual. Saves
        the sum, the weight, and mean and 1/deviation of each row.

    Raises:
        TypeError, ValueError: as `layer_norm`, also for the residual.
    """
    op = "add_layer_norm"
    total = _broadcast_sum(op, x, residual, weight, bias)
    if total is not None:
        return _layer_norm(op, total, None, weight, bias, eps, memory_format)[0], total
    return cast("tuple[Tensor, Tensor]", _layer_norm(op, x, residual, weight, bias, eps, memory_format))


def _broadcast_sum(op: str, x: Tensor, residual: Tensor, *rows: Tensor | None) -> Tensor | None:
    """Return the sum of tensors of two shapes, or None if the pass of the norm can compute the sum."""
    check_float(op, "input", x)
    check_float(op, "residual", residual)
    if sharded(x, residual) or (x.shape == residual.shape and not has_one_feature(x, *rows)):
        return None
    broadcast_shape(op, x, "residual", residual)
    return x + residual


def _of_one_width(x: Tensor, parameters: Parameters) -> tuple[Tensor, Parameters]:
    """Expand x or rows with a single feature, as in the product with a weight that broadcasts."""
    tensors = (x, *parameters.values())
    width = max(tensor.shape[-1:] for tensor in tensors if tensor is not None and tensor.shape[-1:] != (1,))
    expanded = {name: row if row is None else row.expand(width) for name, row in parameters.items()}
    return x.expand(*x.shape[:-1], *width), expanded


def _rms_norm(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: Casting,
    memory_format: torch.memory_format,
) -> Result:
    if casting not in CASTINGS:
        raise ValueError(f"{op}: there is no casting {casting!r}; there are {', '.join(CASTINGS)}")
    check_eps(op, eps)

    def apply(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> Result:
        return _rms_apply(x, residual, weight, eps, casting, memory_format)

    return _applied(op, x, residual, {"weight": weight}, apply)


def _rms_apply(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    casting: Casting,
    memory_format: torch.memory_format,
) -> Result:
    if transformed(x, residual, weight):
        normed, total, _ = formulas.rms_norm(x, residual, weight, eps=eps, casting=casting)
        return formatted(normed, memory_format), total
    if not differentiated(x, residual, weight):
        return rms_norm_forward(x, residual, weight, eps, casting, memory_format)[:2]
    result: Result = RMSNorm.apply(x, residual, weight, eps, casting, memory_format)
    return result


def _layer_norm(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_format: torch.memory_format,
) -> Result:
    check_eps(op, eps)
    if x.shape[-1:] == (1,) and has_one_feature(x, weight, bias) and not sharded(x, residual, weight, bias):
        normed = _layer_norm(op, x, residual, None, None, eps, memory_format)[0]  # a mean over copies would be rounded
        scaled = normed if weight is None else normed * weight
        return (scaled if bias is None else scaled + bias).to(normed.dtype), None

    def apply(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Result:
        return _layer_apply(x, residual, weight, bias, eps, memory_format)

    return _applied(op, x, residual, {"weight": weight, "bias": bias}, apply)


def _layer_apply(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_format: torch.memory_format,
) -> Result:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out_dtype = autocast_norm_dtype(dtype, x.device)
    if transformed(x, residual, weight, bias):
        normed, total, *_ = formulas.layer_norm(x, residual, weight, bias, eps=eps, out_dtype=out_dtype)
        return formatted(normed, memory_format), total
    if not differentiated(x, residual, weight, bias):
        return layer_norm_forward(x, residual, weight, bias, eps, out_dtype, memory_format)[:2]
    result: Result = LayerNorm.apply(x, residual, weight, bias, eps, out_dtype, memory_format)
    return result


def _applied(op: str, x: Tensor, residual: Tensor | None, parameters: Parameters, apply: Apply) -> Result:
    """Check the operands and run `apply` on them or on their local shards."""
    if sharded(x, residual, *parameters.values()):
        return _on_shards(op, x, residual, parameters, apply)
    if has_one_feature(x, *parameters.values()):
        x, parameters = _of_one_width(x, parameters)
    _check_operands(op, x, residual, parameters)
    return apply(x, residual, *parameters.values())


def _on_shards(op: str, x: Tensor, residual: Tensor | None, parameters: Parameters, apply: Apply) -> Result:
    """Run `apply` on local shards with full rows, and partial gradients for replicated parameters."""
    check_float(op, "input", x, min_ndim=1)
    if sharded(x):
        _check_operands(op, x, residual, parameters)
    local = localise(op, x, [residual, *parameters.values()], whole=[-1])
    local_residual, *given = local.others
    _check_operands(op, local.x, local_residual, dict(zip(parameters, given, strict=True)))
    normed, total = apply(local.x, local_residual, *given)
    return local.wrap(normed), None if total is None else local.wrap(total)


def _check_operands(op: str, x: Tensor, residual: Tensor | None, parameters: Parameters) -> None:
    check_float(op, "input", x, min_ndim=1)
    if residual is not None:
        if residual.shape != x.shape:
            raise MismatchError(f"{op}: residual of shape {shape(residual)} has not the shape of the input {shape(x)}")
        check_same_device(op, x, "residual", residual)
    for name, tensor in parameters.items():
        check_row(op, x, name, tensor)
