"""Process groups by name, their store and time limit."""

from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _get_group_size_by_name as group_size_by_name
from torch.distributed.distributed_c10d import _resolve_process_group as process_group_by_name
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

__all__ = ["default_store", "group_size_by_name", "process_group_by_name", "set_timeout"]
