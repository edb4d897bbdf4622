"""Compiled code of cross entropy reads each row of the logits while it is in the cache."""

from __future__ import annotations

import pytest
import torch

import fused
from fused.backends import kernel_compiler, kernel_store, kernels


@pytest.fixture
def sources(monkeypatch):
    """The sources of the kernels compiled from now on."""
    seen, parts = [], kernel_compiler._parts

    def remembering(made):
        seen.append(made.source_code)
        return parts(made)

    monkeypatch.setattr(kernel_compiler, "_parts", remembering)
    monkeypatch.setattr(kernel_store, "load", lambda *args: None)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_by_sizes", {})
    return seen


@pytest.mark.usefixtures("warm_inductor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}], ids=str)
def test_one_loop_over_the_rows(sources, dtype, settings):
    torch.manual_seed(0)
    logits, targets = torch.randn(64, 300).to(dtype), torch.randint(300, (64,))
    with fused.backend("inductor"):
        loss = fused.cross_entropy(logits, targets, **settings)
    with fused.backend("reference"):
        torch.testing.assert_close(loss, fused.cross_entropy(logits, targets, **settings))
    assert len(sources) == 1 and sources[0].count("for(int64_t x0=") == 1
