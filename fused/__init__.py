"""Fused ops: one pass forward, one pass backward, and the least possible saved between them.

Each op is a plain function on tensors of any rank and stride, differentiable any number of times, and seen
through by `torch.compile`, `torch.func` and DTensor. `fused.backend` chooses how they run; `fused.backends()`
tells.
"""

from typing import TYPE_CHECKING

from fused.activations import (
    BiasGeLUFunction,
    GeLUFunction,
    bias_activation,
    bias_gelu,
    bias_gelu_impl,
    bias_new_gelu,
    new_gelu,
    weighted_squared_relu,
)
from fused.backends import Choice, backend
from fused.megatron_softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
)
from fused.softmax import scaled_masked_softmax

if TYPE_CHECKING:
    from fused.backends import backends
else:
    # The package and the function have one name: calling the package calls the function.
    import fused.backends as backends

__all__ = [
    "AttnMaskType",
    "BiasGeLUFunction",
    "Choice",
    "FusedScaleMaskSoftmax",
    "GeLUFunction",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "backend",
    "backends",
    "bias_activation",
    "bias_gelu",
    "bias_gelu_impl",
    "bias_new_gelu",
    "new_gelu",
    "scaled_masked_softmax",
    "weighted_squared_relu",
]
