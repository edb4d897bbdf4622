"""Parts of inductor for stored kernels, without the compiler. Imported with the first kernel."""

from __future__ import annotations

import torch

from fused.assumptions import holds

__all__ = ["CAN_STORE", "cache_dir", "data_pointer_address"]

CAN_STORE = holds("stored kernels")
"""Whether kernels can be loaded without the compiler."""


def cache_dir() -> str:
    """Return inductor's cache folder, which need not exist."""
    if CAN_STORE:
        from torch._inductor.runtime.cache_dir_utils import cache_dir as own
    else:
        from tempfile import gettempdir as own
    return own()


def data_pointer_address() -> int:
    """Return the address of the function for reading tensor data in a compiled library."""
    address: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    return address
