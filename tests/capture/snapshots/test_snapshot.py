"""What is saved of tensors before a forward is tried, and restored after it."""

from __future__ import annotations

import torch
from torch import nn

from schedule.capture.snapshots.saved_tensors import SavedTensor


def test_memory_that_is_freed_and_filled_again() -> None:
    """FSDP2 does so with gathered parameters: their values are neither read nor restored while there are none."""
    gathered = nn.Parameter(torch.ones(4))
    storage = gathered.untyped_storage()
    with_values = SavedTensor(gathered, {})
    storage.resize_(0)
    without = SavedTensor(gathered, {})
    assert with_values.difference() is None and with_values.restore() is None
    storage.resize_(16)
    with torch.no_grad():
        gathered.fill_(2.0)
    assert without.difference() is None and without.restore() is None
    assert gathered.tolist() == [2.0] * 4
    assert with_values.difference() == ("", "other values")
