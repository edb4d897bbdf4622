"""The layout of DTensors. Imported when the first is seen: it takes time, and not every torch has it."""

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]
