"""The layout of DTensors, and states of optimizers for them. Imported when needed: it takes time to import."""

from torch.distributed.checkpoint.state_dict import _init_optim_state as initialize_state
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "compute_local_shape_and_global_offset", "initialize_state"]
