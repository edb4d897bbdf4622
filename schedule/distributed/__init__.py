"""Support for several devices: device mesh, sharded parameters, and differentiable collectives."""

from fused.sharding import full_tensor
from schedule.distributed.communication.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)
from schedule.distributed.communication.mesh import TensorParallel, checked_mesh
from schedule.distributed.tensor_parallel.conflicts import missing_syncs
from schedule.distributed.tensor_parallel.training import clip_grad_norm_, mixed_parameters

__all__ = [
    "TensorParallel",
    "checked_mesh",
    "clip_grad_norm_",
    "copy_to_tensor_parallel",
    "full_tensor",
    "gather_from_sequence_parallel",
    "gather_from_tensor_parallel",
    "missing_syncs",
    "mixed_parameters",
    "reduce_from_tensor_parallel",
    "reduce_scatter_to_sequence_parallel",
    "scatter_to_tensor_parallel",
]
