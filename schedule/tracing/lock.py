"""One trace at a time: the patches that are active while tracing are process-wide, and must be undone in reverse."""

from __future__ import annotations

import threading

TRACING = threading.RLock()
"""Held while a forward is traced, a module adapts, or a graph is compiled. Reentrant."""
