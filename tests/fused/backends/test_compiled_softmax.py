"""What compiled code of the masked softmax is given for a bool mask."""

from __future__ import annotations

import pytest
import torch

from fused.backends.compiled_softmax import widened


@pytest.mark.parametrize("shape, dtype", [((1, 1, 8, 8), torch.int32), ((2, 4, 8, 8), torch.bool)], ids=str)
def test_masks_that_rows_share_become_integers_and_whole_ones_stay(shape, dtype):
    mask = torch.rand(shape) < 0.5
    found = widened(mask, torch.randn(2, 4, 8, 8))
    assert found.dtype == dtype and torch.equal(found != 0, mask)


def test_masks_that_are_added_stay():
    mask = torch.randn(1, 1, 8, 8)
    assert widened(mask, torch.randn(2, 4, 8, 8)) is mask
