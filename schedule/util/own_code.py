"""Folders of the package's source files, to distinguish them from user code."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("schedule", "fused"))
