"""Kernels have tests of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fused


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield
