"""The layout of DTensors, and states of optimizers for them. Imported when needed: it takes time to import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Placement

from fused.assumptions import private, unavailable

__all__ = ["StridedShard", "compute_local_shape_and_global_offset", "initialize_state", "with_literal_placements"]


class _Unavailable(Placement):
    """Placement that no tensor has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unavailable("strided shards")()


StridedShard: Any = private("strided shards", "torch.distributed.tensor.placement_types._StridedShard", _Unavailable)
compute_local_shape_and_global_offset: Callable[..., Any] = private(
    "offsets of shards",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    unavailable("offsets of shards"),
)
initialize_state: Callable[..., None] = private(
    "states of optimizers",
    "torch.distributed.checkpoint.state_dict._init_optim_state",
    unavailable("states of optimizers"),
)


def with_literal_placements(tensor: DTensor) -> DTensor:
    """Return a DTensor whose strided shards are no code for an order of mesh dimensions, as torch 2.11 reads them."""
    spec: Any = tensor._spec
    if getattr(spec, "use_strided_shard_as_shard_order", False):
        tensor._spec = dataclasses.replace(spec, use_strided_shard_as_shard_order=False, shard_order=None)
    return tensor
