"""Fused ops as modules, with the parameters and names of ``torch.nn``.

A model that you write can hold them; a model that you have is scheduled instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fused.backends.reference.norms import Casting
from fused.cross_entropy import cross_entropy
from fused.gated import gated_activation, gated_halves
from fused.linear_cross_entropy import linear_cross_entropy
from fused.norms import layer_norm, rms_norm

Tensor = torch.Tensor


class RMSNorm(nn.RMSNorm):
    """`rms_norm` over the last dimension, with a weight.

    Args:
        hidden: features of the last dimension.
        eps: added to the mean square.
        casting: as for `rms_norm`; with ``"gemma"`` the weight starts at 0, else at 1.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.

    Takes ``[..., hidden]`` of any floating dtype, and returns the same shape, as `rms_norm`.

    Raises:
        TypeError, ValueError: as `rms_norm`.

    Source: transformers ``LlamaRMSNorm``; Liger-Kernel ``LigerRMSNorm``.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        *,
        casting: Casting = "llama",
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.casting = casting
        super().__init__(hidden, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Set the weight to the factor 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 0.0 if self.casting == "gemma" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x."""
        return rms_norm(x, self.weight, self.eps or 0.0, casting=self.casting)

    def extra_repr(self) -> str:
        """Return the settings as text."""
        return f"{super().extra_repr()}, casting={self.casting!r}"


class LayerNorm(nn.LayerNorm):
    """`layer_norm` over the last dimension, as ``torch.nn.LayerNorm`` with one number of features.

    Args:
        hidden: features of the last dimension.
        eps: added to the variance.
        elementwise_affine, bias, device, dtype: as for ``torch.nn.LayerNorm``.

    Takes ``[..., hidden]`` of any floating dtype, and returns the same shape, as `layer_norm`.

    Raises:
        TypeError, ValueError: as `layer_norm`.

    Source: torch ``nn.LayerNorm``.
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class _Gated(nn.Module):
    activation: str

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Return ``act(gate)·up``; with one tensor, of its halves."""
        return gated_halves(gate, self.activation) if up is None else gated_activation(gate, up, self.activation)


class SwiGLU(_Gated):
    """``silu(gate)·up``, without parameters.

    Takes gate and up, ``[..., hidden]`` each, or both in one tensor ``[..., 2·hidden]``, the gate first, and returns
    ``[..., hidden]``, as `gated_activation`.

    Raises:
        TypeError, ValueError: as `gated_activation`.

    Source: Shazeer 2020, "GLU variants improve Transformer"; Liger-Kernel ``LigerSiLUMulFunction``.
    """

    activation = "silu"


class GEGLU(_Gated):
    """``gelu(gate)·up``, without parameters, as `SwiGLU`.

    Args:
        approximate: ``"tanh"`` or ``"none"`` (erf), the two forms of GELU.

    Takes and returns what `SwiGLU` does.

    Raises:
        ValueError: for another `approximate`; TypeError, ValueError: as `gated_activation`.

    Source: Shazeer 2020, "GLU variants improve Transformer"; Liger-Kernel ``LigerGELUMulFunction``.
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        if approximate not in ("tanh", "none"):
            raise ValueError(f"GEGLU: approximate must be 'tanh' or 'none', got {approximate!r}")
        self.activation = "gelu_tanh" if approximate == "tanh" else "gelu"

    def extra_repr(self) -> str:
        """Return the settings as text."""
        return f"activation={self.activation!r}"


class _Loss(nn.Module):
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "reduction": reduction,
        }

    def extra_repr(self) -> str:
        """Return the settings as text."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class CrossEntropyLoss(_Loss):
    """`cross_entropy` with fixed settings.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, reduction: as for `cross_entropy`.

    Takes logits ``[..., vocab]`` and targets ``[...]``, as `cross_entropy`.

    Raises:
        TypeError, ValueError, IndexError: as `cross_entropy`.

    Source: torch ``nn.CrossEntropyLoss``; Liger-Kernel ``LigerCrossEntropyLoss``.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        return cross_entropy(logits, targets, **self.settings)


class LinearCrossEntropyLoss(_Loss):
    """`linear_cross_entropy` with fixed settings; the weight is an argument, as a head shares it with an embedding.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, reduction: as for `cross_entropy`.

    Takes hidden states ``[..., features]``, the weight ``[vocab, features]`` of the head, targets ``[...]`` and maybe
    a bias ``[vocab]``, as `linear_cross_entropy`.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`.

    Source: Liger-Kernel ``LigerFusedLinearCrossEntropyLoss``, which takes the weight first.
    """

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the loss."""
        return linear_cross_entropy(hidden, weight, targets, bias, **self.settings)
