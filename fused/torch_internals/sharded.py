"""The layout of DTensors. Imported when the first is seen: it takes time, and not every torch has it."""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "compute_local_shape_and_global_offset"]
