"""vocab_parallel_cross_entropy on two gloo processes; the cases are in sharded_losses.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fused
from tests.fused.processes import run_by_two

CASES = Path(__file__).with_name("sharded_losses.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_sharded_logits_give_the_losses_of_whole_ones(tmp_path):
    run_by_two(CASES, tmp_path)


def test_a_group_of_one_needs_no_processes():
    """Megatron's at a tensor-parallel size of 1, which may be any object with a size."""
    logits, targets = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 3, 1])
    losses = fused.vocab_parallel_cross_entropy(logits, targets, 0.0, SimpleNamespace(size=lambda: 1))
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), logits)[0].sum(-1), torch.zeros(3))


def test_errors_say_what_to_do():
    logits, targets = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="no process group"):
        fused.vocab_parallel_cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="label_smoothing must be below 1"):
        fused.vocab_parallel_cross_entropy(logits, targets, 1.0)
    with pytest.raises(TypeError, match="class probabilities"):
        fused.vocab_parallel_cross_entropy(logits, logits)
