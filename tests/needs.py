"""Marks for tests of what old releases of torch and transformers lack. On the newest ones, nothing is skipped."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

IS_OLD = Version(transformers.__version__).release < (5, 23)
"""Whether a test may be skipped: between 5.0 and this release, no row of ``tests/versions`` runs the tests."""


def needs(has: bool, what: str) -> pytest.MarkDecorator:
    """Skip a test if the release of transformers is old and does not have ``what``."""
    return pytest.mark.skipif(IS_OLD and not has, reason=f"transformers {transformers.__version__} has no {what}")


def needs_architectures(*names: str) -> pytest.MarkDecorator:
    """Skip a test if the release of transformers is old and lacks one of these architectures."""
    missing = [name for name in names if name not in CONFIG_MAPPING]
    return needs(not missing, ", ".join(missing))


needs_default_qwen2_vl = needs(
    hasattr(transformers.Qwen2VLTextConfig, "ignore_keys_at_rope_validation"),
    "qwen2_vl that runs with its default config",
)


def needs_torch(release: str, instead: str) -> pytest.MarkDecorator:
    """Skip a test before a release of torch; ``instead`` is what those before have."""
    is_before = Version(torch.__version__).release < Version(release).release
    return pytest.mark.skipif(is_before, reason=f"torch {torch.__version__} has {instead}")
