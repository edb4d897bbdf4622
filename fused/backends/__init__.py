"""Backends of the fused ops: plain torch, compiled, hand-written; and what decides between them."""

from fused.backends.registry import OPS, Choice, Op, backends
from fused.backends.selection import backend, requested

__all__ = ["OPS", "Choice", "Op", "backend", "backends", "requested"]
