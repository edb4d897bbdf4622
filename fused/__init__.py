"""Fused ops with one pass forward, one pass backward, and minimal saved tensors.

Each op is a plain function on tensors of any rank and stride. It is differentiable any number of times and
supports `torch.compile`, `torch.func` and DTensor. `fused.backend` sets the backend; `fused.backends()` reports
it for every op.
"""

from typing import TYPE_CHECKING

import fused.versions  # first: it refuses an old torch before anything else is imported
from fused.activations import (
    BiasGeLUFunction,
    GeLUFunction,
    bias_activation,
    bias_gelu,
    bias_gelu_impl,
    bias_new_gelu,
    gelu,
    mish,
    new_gelu,
    weighted_squared_relu,
)
from fused.adaptive_norm import adaptive_layer_norm
from fused.backends import Choice, Op, backend, requested
from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import transformed
from fused.batch_norm import batch_norm
from fused.bias_dropout import bias_dropout, bias_dropout_add, get_bias_dropout_add
from fused.cross_entropy import cross_entropy, cross_entropy_with_metrics
from fused.distillation import distillation_loss, linear_distillation_loss
from fused.folded_norm import conv_batch_norm, linear_batch_norm
from fused.gated import gated_activation
from fused.gated_megatron import (
    BiasGeGLUFunction,
    BiasSwiGLUFunction,
    GeGLUFunction,
    SwiGLUFunction,
    WeightedBiasQuickGeGLUFunction,
    WeightedQuickGeGLUFunction,
    WeightedSwiGLUFunction,
    bias_geglu_impl,
    bias_swiglu_impl,
    quick_gelu,
    weighted_bias_quick_geglu_impl,
    weighted_bias_swiglu_impl,
)
from fused.gated_residual import gated_residual
from fused.glu import (
    bias_geglu,
    bias_quick_geglu,
    bias_reglu,
    bias_swiglu,
    geglu,
    quick_geglu,
    reglu,
    swiglu,
    weighted_bias_geglu,
    weighted_bias_quick_geglu,
    weighted_bias_reglu,
    weighted_bias_swiglu,
    weighted_geglu,
    weighted_quick_geglu,
    weighted_reglu,
    weighted_swiglu,
)
from fused.group_norm import group_norm
from fused.linear import linear
from fused.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_metrics
from fused.loss import CrossEntropyOutput
from fused.megatron_softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
)
from fused.mlp import (
    MLP,
    LinearFc1Builder,
    LinearFc1Interface,
    LinearFc2Builder,
    LinearFc2Interface,
    MLPSubmodules,
    TEActivationFunctionBuilder,
    TransformerConfig,
    apply_swiglu_sharded_factory,
)
from fused.modules import GEGLU, CrossEntropyLoss, LayerNorm, LinearCrossEntropyLoss, RMSNorm, SwiGLU
from fused.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fused.preference import (
    dpo_loss,
    grpo_loss,
    kto_loss,
    orpo_loss,
    sequence_log_probs,
    simpo_loss,
    token_log_probs,
)
from fused.recomputation import Recomputation, recomputed_input, saved_tensors
from fused.rotary import apply_rotary, rotary_embedding
from fused.softmax import causal_softmax, masked_softmax, scaled_masked_softmax
from fused.star_relu import star_relu
from fused.viewless import (
    MakeViewlessTensor,
    assert_viewless_tensor,
    backward_from_deallocated,
    deallocate_output,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)
from fused.vocab_parallel import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from fused.backends import backends
else:
    # The package and the function share a name: calling the package calls the function.
    import fused.backends as backends

__all__ = [
    "GEGLU",
    "MLP",
    "AttnMaskType",
    "BiasGeGLUFunction",
    "BiasGeLUFunction",
    "BiasSwiGLUFunction",
    "Choice",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "FusedScaleMaskSoftmax",
    "GeGLUFunction",
    "GeLUFunction",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "MLPSubmodules",
    "MakeViewlessTensor",
    "Op",
    "RMSNorm",
    "Recomputation",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SwiGLU",
    "SwiGLUFunction",
    "TEActivationFunctionBuilder",
    "TransformerConfig",
    "WeightedBiasQuickGeGLUFunction",
    "WeightedQuickGeGLUFunction",
    "WeightedSwiGLUFunction",
    "adaptive_layer_norm",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rotary",
    "apply_swiglu_sharded_factory",
    "assert_viewless_tensor",
    "backend",
    "backends",
    "backward_from_deallocated",
    "batch_norm",
    "bias_activation",
    "bias_dropout",
    "bias_dropout_add",
    "bias_geglu",
    "bias_geglu_impl",
    "bias_gelu",
    "bias_gelu_impl",
    "bias_new_gelu",
    "bias_quick_geglu",
    "bias_reglu",
    "bias_swiglu",
    "bias_swiglu_impl",
    "causal_softmax",
    "compute_dtype",
    "conv_batch_norm",
    "cross_entropy",
    "cross_entropy_with_metrics",
    "deallocate_output",
    "distillation_loss",
    "dpo_loss",
    "gated_activation",
    "gated_residual",
    "geglu",
    "gelu",
    "get_bias_dropout_add",
    "group_norm",
    "grpo_loss",
    "kto_loss",
    "layer_norm",
    "linear",
    "linear_batch_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "linear_distillation_loss",
    "make_viewless_tensor",
    "masked_softmax",
    "mish",
    "new_gelu",
    "orpo_loss",
    "quick_geglu",
    "quick_gelu",
    "recomputed_input",
    "reglu",
    "requested",
    "rms_norm",
    "rotary_embedding",
    "safely_set_viewless_tensor_data",
    "saved_tensors",
    "scaled_masked_softmax",
    "sequence_log_probs",
    "simpo_loss",
    "star_relu",
    "swiglu",
    "token_log_probs",
    "transformed",
    "vocab_parallel_cross_entropy",
    "weighted_bias_geglu",
    "weighted_bias_quick_geglu",
    "weighted_bias_quick_geglu_impl",
    "weighted_bias_reglu",
    "weighted_bias_swiglu",
    "weighted_bias_swiglu_impl",
    "weighted_geglu",
    "weighted_quick_geglu",
    "weighted_reglu",
    "weighted_squared_relu",
    "weighted_swiglu",
]

__version__ = fused.versions.VERSION


def __dir__() -> list[str]:
    return sorted(__all__)
