"""torch.compile tags ``nn.Module`` for good when it is first used; that must not count as a test's doing."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    torch.compile(torch.sin, backend="eager")(torch.zeros(1))
