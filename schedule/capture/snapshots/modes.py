"""Restoring of torch modes switched by a forward."""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore gradient mode, default dtype, determinism, autocast and the context of ``decimal`` on exit."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    try:
        with decimal.localcontext():
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for device, enabled, autocast_to in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, autocast_to)
