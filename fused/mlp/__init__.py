"""Megatron's MLP built from specs: interfaces of its parts (`protocols`), parts on plain torch, and the module."""

from fused.mlp.config import TransformerConfig
from fused.mlp.mlp import MLP, MLPSubmodules
from fused.mlp.mlp_linear import Linear, column_parallel_linear, row_parallel_linear
from fused.mlp.protocols import (
    LinearFc1Builder,
    LinearFc1Interface,
    LinearFc2Builder,
    LinearFc2Interface,
    ProcessGroup,
    TEActivationFunctionBuilder,
    TEActivationFunctionInterface,
)
from fused.mlp.split_checkpoint import ShardedTensorFactory, apply_swiglu_sharded_factory

__all__ = [
    "MLP",
    "Linear",
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "MLPSubmodules",
    "ProcessGroup",
    "ShardedTensorFactory",
    "TEActivationFunctionBuilder",
    "TEActivationFunctionInterface",
    "TransformerConfig",
    "apply_swiglu_sharded_factory",
    "column_parallel_linear",
    "row_parallel_linear",
]
