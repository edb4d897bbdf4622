"""Where the files of this package are, which are not the user's."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES = tuple(f"{Path(__file__).resolve().parents[2] / name}{os.sep}" for name in ("schedule", "fused"))
