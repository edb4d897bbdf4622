"""Folded weights of convolutions in evaluation, cached between calls, and packed for oneDNN.

Folding is a pass over the weights, and oneDNN copies those of each convolution to a layout of its own. Both are done
once for the same parameters. Whether they are the same is decided by their bits, compared with a copy: a change is
noticed by whatever means it was made, such as ``parameter.data.mul_(…)``, which no version counter sees. The comparison
takes 0.5 ns a number, against 1.4 for folding (one core of a Xeon).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fused.backends.selection import requested
from fused.backends.strides import channels_last_of

Tensor = torch.Tensor
Parameters = tuple[Tensor | None, ...]
Fold = Callable[..., tuple[Tensor, Tensor]]
"""Compute the folded weight and bias of the parameters."""

_memcmp = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class _Folded:
    """Folded weight and bias, with copies of the parameters and settings behind them."""

    parameters: Parameters
    settings: Any
    weight: Tensor
    bias: Tensor


_CACHE: WeakKeyDictionary[torch.UntypedStorage, dict[int, _Folded]] = WeakKeyDictionary()
"""Storage of a parameter → its offset there → its last folded weights. They are freed with the storage.

The keys are no parameters: ``torch.utils.swap_tensors`` refuses those with weak references.
"""


def folded(parameters: Parameters, settings: Any, fold: Fold) -> tuple[Tensor, Tensor]:
    """Return ``fold(*parameters)``, from the cache if the parameters and settings are those of the last call.

    Args:
        parameters: on the CPU; the first is the weight, to the lifetime of whose storage the cache is bound.
        settings: what the results depend on besides the parameters, compared by ``==``.
        fold: computes the results; it gets copies of the parameters.
    """
    weight: Any = parameters[0]
    cached = _CACHE.setdefault(weight.untyped_storage(), {})
    known = cached.get(weight.storage_offset())
    if known is None or known.settings != settings or not all(map(same_bits, known.parameters, parameters)):
        with torch.inference_mode(False), torch.no_grad():  # later calls may save the results for backward
            copies = tuple(None if each is None else each.clone() for each in parameters)
            known = cached[weight.storage_offset()] = _Folded(copies, settings, *fold(*copies))
    return known.weight, known.bias


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Check whether two tensors on the CPU have the same layout and the same bits, NaN and zeros included."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


@dataclass(frozen=True)
class Packing:
    """Settings of a convolution of two dimensions, computed by oneDNN with packed weights.

    Attributes:
        stride, padding, dilation: for each dimension.
        groups: number of groups.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, settings: Sequence[Any], channels_last: bool = False) -> Packing | None:
        """Return the settings if packed weights compute the same as torch, else None.

        oneDNN's results have the channels last, as torch's have if those of the image or the weight are last. It
        copies an image of another layout.

        Args:
            x, weight: plain tensors, for which autograd needs no gradient.
            settings: stride, padding, dilation and groups as for ``F.conv2d``.
            channels_last: whether the result may have the channels last in any case.
        """
        *pairs, groups = settings
        is_fit = x.ndim == 4 and x.is_cpu and x.dtype == weight.dtype == torch.float32 and x.numel() > 0
        if not is_fit or requested() is not None or torch.is_autocast_enabled("cpu") or not _has_onednn():
            return None
        if isinstance(pairs[1], str):
            return None
        if not channels_last and channels_last_of(x) is None and channels_last_of(weight) is None:
            return None
        stride, padding, dilation = ((each,) * 2 if isinstance(each, int) else tuple(each) for each in pairs)
        return cls(stride, padding, dilation, groups)

    def pack(self, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return a weight in oneDNN's layout, the best one for images of these sizes."""
        packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._arguments(), list(sizes))
        return packed

    def fits(self, residual: Tensor | None, x: Tensor, weight: Tensor) -> bool:
        """Check whether a residual has the shape, the dtype and the layout of the result."""
        if residual is None or residual.dtype != x.dtype or channels_last_of(residual) is None:
            return False
        per_dim = zip(x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = [(size + 2 * pad - reach * (width - 1) - 1) // step + 1 for size, width, step, pad, reach in per_dim]
        return residual.shape == (x.shape[0], weight.shape[0], *sizes)

    def convolve(
        self, x: Tensor, packed: Tensor, bias: Tensor, residual: Tensor | None, overwrite: bool = False
    ) -> Tensor:
        """Compute the convolution, and the sum with a residual of the shape and dtype of the result.

        An activation is not computed with it: oneDNN's ReLU of NaN is 0.

        Args:
            x, bias: the image and the bias of the convolution.
            packed: its weight, by `pack`.
            residual: see `fits`.
            overwrite: write the sum to the residual, if it has no gaps, and return that.
        """
        ops, given = torch.ops.mkldnn, (packed, bias, *self._arguments())
        result: Tensor
        if residual is None:
            result = ops._convolution_pointwise(x, *given, "none", [], None)
        elif overwrite and residual.is_contiguous(memory_format=torch.channels_last):
            result = ops._convolution_pointwise_.binary(residual, x, *given, "add", 1.0, None, [], None)
        else:
            result = ops._convolution_pointwise.binary(x, residual, *given, "add", 1.0, None, [], None)
        return result

    def _arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        return self.padding, self.stride, self.dilation, self.groups


def _has_onednn() -> bool:
    flags: Any = torch.backends.mkldnn
    return bool(flags.is_available() and flags.enabled and hasattr(torch.ops.mkldnn, "_convolution_pointwise"))
