"""Parts of inductor for stored kernels, without the compiler. Imported with the first kernel."""

from __future__ import annotations

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = ["cache_dir", "data_pointer_address"]


def data_pointer_address() -> int:
    """Return the address of the function for reading tensor data in a compiled library."""
    address: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    return address
