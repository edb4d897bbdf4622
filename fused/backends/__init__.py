"""Backends of the fused ops (plain torch, compiled, hand-written), and the choice between them.

``fused.backends()`` returns the backend of each op on this machine, with the reason.
"""

import sys
import types

from fused.backends.backend_registry import OPS, Op, backends
from fused.backends.selection import Choice, backend, requested

__all__ = ["OPS", "Choice", "Op", "backend", "backends", "requested"]


class _CallablePackage(types.ModuleType):
    def __call__(self, device: str | None = None) -> dict[str, Choice]:
        return backends(device)


sys.modules[__name__].__class__ = _CallablePackage
