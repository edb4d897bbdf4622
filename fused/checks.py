"""Checks of the arguments of the ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused.backends.reference.activations import ACTIVATIONS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class MismatchError(ValueError, RuntimeError):
    """Error for tensors of shapes or devices not fitting each other: a RuntimeError too, as of torch's operations."""


def check_float(op: str, name: str, tensor: object, *, min_ndim: int = 0) -> None:
    """Raise TypeError unless `tensor` is a floating-point tensor, ValueError if it has too few dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype} of shape {shape(tensor)}"
        )
    if tensor.ndim < min_ndim:
        raise ValueError(f"{op}: {name} needs at least {min_ndim} dimension(s), got shape {shape(tensor)}")


def check_activation(op: str, activation: str) -> None:
    """Raise ValueError unless `activation` is the name of one."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: there is no activation {activation!r}; there are {', '.join(ACTIVATIONS)}")


def check_same_device(op: str, x: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Raise MismatchError unless both tensors are on one device."""
    if x.device != other.device:
        raise MismatchError(
            f"{op}: {name} {shape(other)} is on {other.device}, but the input {shape(x)} is on {x.device}"
        )


def check_bias(op: str, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise unless x is ``[..., hidden]`` and the bias ``[hidden]`` or None, both floating point."""
    check_float(op, "input", x, min_ndim=1)
    check_row(op, x, "bias", bias)


def check_row(op: str, x: torch.Tensor, name: str, row: torch.Tensor | None, dim: int = -1) -> None:
    """Raise unless a row is floating point, ``[size]`` of a dimension of x, on the same device, or None."""
    if row is None:
        return
    check_float(op, name, row)
    if row.ndim != 1 or row.shape[0] != x.shape[dim]:
        where = "the last dimension" if dim == -1 else f"dimension {dim}"
        raise MismatchError(
            f"{op}: {name} must have shape [{x.shape[dim]}], {where} of the input {shape(x)}, got {shape(row)}"
        )
    check_same_device(op, x, name, row)


def check_eps(op: str, eps: object) -> None:
    """Raise TypeError unless the number added in a norm is one."""
    if not isinstance(eps, int | float | torch.SymFloat):
        raise TypeError(f"{op}: eps must be a number, got {type(eps).__name__}")


def has_one_feature(x: torch.Tensor, *rows: torch.Tensor | None) -> bool:
    """Check whether x and rows of features are of two widths that broadcast: one of them, and a single feature."""
    if not isinstance(x, torch.Tensor):
        return False
    width = x.shape[-1:]
    other = [row.shape for row in rows if row is not None and row.shape != width]
    if not other:
        return False
    widths = {width, *other}
    return len(widths) == 2 and (1,) in widths and all(len(width) == 1 for width in widths)


def check_weights(op: str, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise MismatchError unless there is one weight for each token of x: ``[..., 1]``, on the same device."""
    if weights.shape != (*x.shape[:-1], 1):
        raise MismatchError(
            f"{op}: weights of shape {shape(weights)} are not one number a token of the input {shape(x)}"
        )
    check_same_device(op, x, "weights", weights)


def check_broadcast(op: str, x: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Raise MismatchError unless `other` broadcasts to the shape of x, on the same device."""
    if not broadcasts_to(other, x):
        raise MismatchError(f"{op}: {name} of shape {shape(other)} does not broadcast to the input {shape(x)}")
    check_same_device(op, x, name, other)


def broadcasts_to(other: torch.Tensor, x: torch.Tensor) -> bool:
    """Check whether ``other + x`` has the shape of x."""
    sizes, others = x.shape, other.shape
    leading = len(sizes) - len(others)
    if leading < 0:
        return False
    return all(size in (1, whole) for size, whole in zip(others, sizes[leading:], strict=True))


def broadcast_shape(op: str, x: torch.Tensor, name: str, other: torch.Tensor, x_name: str = "the input") -> torch.Size:
    """Return the broadcast shape of `other` and x, or raise MismatchError if there is none or for two devices."""
    check_same_device(op, x, name, other)
    if broadcasts_to(other, x):
        return x.shape
    try:
        return torch.broadcast_shapes(x.shape, other.shape)
    except RuntimeError:
        raise MismatchError(
            f"{op}: {name} {shape(other)} and {x_name} {shape(x)} do not broadcast to one shape"
        ) from None


def shape(tensor: torch.Tensor) -> str:
    """Return the shape as a string such as ``[2, 3]``."""
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def agrees(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Check whether sizes as given to a view, with -1 for inferred ones, are the wanted ones."""
    return len(sizes) == len(wanted) and all(a in (-1, b) for a, b in zip(sizes, wanted, strict=True))
