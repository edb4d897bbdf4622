"""Softmax of attention under Megatron's names: three functions, called like autograd functions, and a module."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fused.backends.reference.softmax import Window, out_of_window
from fused.checks import shape
from fused.softmax import CAUSAL, checked_softmax, checked_window, scaled_masked_softmax

Tensor = torch.Tensor


class ScaledSoftmax:
    """Megatron's ``ScaledSoftmax.apply(inputs, scale)``: softmax(scale·x) over the last dimension.

    Args:
        inputs: ``[..., keys]``, floating point.
        scale: a number; None is 1.

    Returns:
        The shape and dtype of `inputs`; accumulated in float32. Saves the probabilities.

    Raises:
        TypeError, ValueError: as `scaled_masked_softmax`.

    Source: Megatron-LM ``fused_softmax``.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the softmax, as described in the class docstring."""
        inputs, scale = args
        return checked_softmax("ScaledSoftmax", inputs, None, scale)


class ScaledMaskedSoftmax:
    """Megatron's ``ScaledMaskedSoftmax.apply(inputs, mask, scale)``: softmax(scale·x) over the unmasked keys.

    Args:
        inputs: ``[b, np, sq, sk]`` (or any rank), floating point.
        mask: bool or uint8, True (1) = masked, broadcastable to `inputs`; or None.
        scale: a number; None is 1.

    Returns:
        The shape and dtype of `inputs`; masked entries are exactly 0, and so is a completely masked row.
        Saves the probabilities.

    Raises:
        TypeError: for a mask of another dtype (`scaled_masked_softmax` takes additive masks).
        TypeError, ValueError: as `scaled_masked_softmax`.

    Source: Megatron-LM ``fused_softmax``.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the softmax, as described in the class docstring."""
        inputs, mask, scale = args
        if mask is not None and mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(
                f"ScaledMaskedSoftmax: mask must be bool or uint8, True = masked, got {mask.dtype} of shape "
                f"{shape(mask)}; scaled_masked_softmax takes additive masks"
            )
        return checked_softmax("ScaledMaskedSoftmax", inputs, mask, scale)


class ScaledUpperTriangMaskedSoftmax:
    """Megatron's ``ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)``: causal softmax(scale·x).

    Args:
        inputs: ``[b·np, sq, sk]`` or ``[b, np, sq, sk]``, floating point. If sq ≠ sk, the last query is
            aligned to the last key.
        scale: a number; None is 1.

    Returns:
        The shape and dtype of `inputs`; masked entries are exactly 0. Saves the probabilities.

    Raises:
        TypeError, ValueError: as `scaled_masked_softmax`.

    Source: Megatron-LM ``fused_softmax``.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the softmax, as described in the class docstring."""
        inputs, scale = args
        return checked_softmax("ScaledUpperTriangMaskedSoftmax", inputs, None, scale, window=CAUSAL)


class AttnMaskType(enum.Enum):
    """Megatron's types of attention mask, with the causal ones applied in addition to a given mask."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


_CAUSAL_TYPES = ("causal", "padding_causal", "causal_bottom_right")


class FusedScaleMaskSoftmax(nn.Module):
    """Megatron's module for scale, mask and softmax of attention scores.

    Args:
        input_in_fp16, input_in_bf16: the dtype of the results; with neither, the dtype of the input.
        attn_mask_type: an `AttnMaskType` (Megatron's own type or a name is accepted). The causal types hide later
            keys, with the last query aligned to the last key, in addition to a given mask.
        scaled_masked_softmax_fusion: one pass; else `mask_func` and softmax one after the other.
        mask_func: ``mask_func(scores, mask)`` of the path that is not fused. It gets a separate tensor, which it may
            modify. Not called by the fused path, in which masked entries are exactly 0.
        softmax_in_fp32: must be True with a scale. As in `scaled_masked_softmax`.
        scale: number, or None for 1.
        window_size: ``(left, right)`` keys that a query sees on both sides of its position, −1 for all; in addition
            to the mask.

    Raises:
        ValueError: if both dtype flags are set, or a scale is given without `softmax_in_fp32`.

    Source: Megatron-LM ``fused_softmax``; corrected: Megatron drops the caller's mask for a window or for the
    causal path, and the latter needs sq = sk.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType | enum.Enum | str,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: Window | None = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise ValueError("softmax should be in fp32 when scaled")
        name = attn_mask_type if isinstance(attn_mask_type, str) else attn_mask_type.name
        if name not in AttnMaskType.__members__:
            names = ", ".join(AttnMaskType.__members__)
            raise ValueError(f"FusedScaleMaskSoftmax: there is no mask type {name!r}; there are {names}")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.attn_mask_type = AttnMaskType[name]
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size
        self._window = checked_window("FusedScaleMaskSoftmax", name in _CAUSAL_TYPES, window_size)

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Compute the probabilities of attention scores.

        Args:
            input: ``[b, np, sq, sk]``, floating point; never modified.
            mask: broadcastable to it, True = masked, or None.
            softmax_offset: ``[np]`` logits of a sink, or None.

        Returns:
            ``[b, np, sq, sk]``.

        Raises:
            ValueError: if the input does not have four dimensions; else as `scaled_masked_softmax`.
        """
        if input.ndim != 4:
            raise ValueError(f"FusedScaleMaskSoftmax: the input must be [b, np, sq, sk], got {shape(input)}")
        out_dtype = torch.float16 if self.input_in_fp16 else input.dtype
        out_dtype = torch.bfloat16 if self.input_in_bf16 else out_dtype
        if self.mask_func is None or self.is_kernel_available(mask, *input.shape):
            return checked_softmax(
                "FusedScaleMaskSoftmax",
                input,
                mask,
                self.scale,
                self._window,
                softmax_offset,
                out_dtype=out_dtype,
                softmax_in_fp32=self.softmax_in_fp32,
            )
        scores = self._masked(input, mask, self.mask_func)
        return scaled_masked_softmax(scores, sink=softmax_offset, out_dtype=out_dtype)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Check whether `forward` takes one pass for scores of ``[b, np, sq, sk]`` and this mask.

        Unlike in Megatron this depends on the settings alone: any sizes, dtypes and masks are fused.
        """
        return self.scaled_masked_softmax_fusion or self.mask_func is None

    def _masked(self, input: Tensor, mask: Tensor | None, mask_func: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        scores = input.float() if input.dtype.itemsize < 4 else input
        if self.scale is not None:
            scores = scores * self.scale
        if scores is input:
            scores = scores.clone()
        if mask is not None:
            scores = mask_func(scores, mask)
        if self._window is not None:
            sq, sk = input.shape[-2:]
            scores = mask_func(scores, out_of_window(sq, sk, self._window, 0, input.device))
        return scores
