"""Lock for one trace at a time: like modules share graphs, and a graph changes while it is built."""

from __future__ import annotations

import threading

TRACING = threading.RLock()
"""Held while a forward is traced, a module adapts, or a graph is compiled. Reentrant."""
