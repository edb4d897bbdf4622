"""scaled_masked_softmax of scores that are filled where a bool mask is True, against ``masked_fill`` in eager torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fused
from tests.fused.test_softmax import SCALE, hidden_by, tensors


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -2.5, 3], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_filled_scores_are_as_in_eager(fill, dropout_p, values_and_gradients):
    """As ``masked_fill`` before the softmax, with a row that is masked altogether."""
    x, g = tensors()
    hidden = torch.rand(2, 1, 7, 9) < 0.4
    hidden[0, 0, 2] = True

    def eager(x):
        torch.manual_seed(7)
        return F.dropout(F.softmax((x * SCALE).masked_fill(hidden, fill), -1), dropout_p)

    def ours(x, mask=hidden):
        torch.manual_seed(7)
        return fused.scaled_masked_softmax(x, mask, SCALE, fill=fill, dropout_p=dropout_p)

    theirs = values_and_gradients(eager, g, x)
    for mask in (hidden, hidden.to(torch.uint8)):
        found = values_and_gradients(lambda x, mask=mask: ours(x, mask), g, x)
        torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not theirs[1].isnan().any() and not theirs[1].masked_select(hidden.expand_as(x)).any()


def test_filled_scores_can_be_out_of_a_window(values_and_gradients):
    x, g = tensors()
    hidden = torch.rand(7, 9) < 0.4
    later = hidden_by(7, 9, right=0)
    ours = values_and_gradients(lambda x: fused.scaled_masked_softmax(x, hidden, SCALE, fill=-2.0, causal=True), g, x)
    theirs = values_and_gradients(
        lambda x: F.softmax((x * SCALE).masked_fill(hidden, -2.0).masked_fill(later, -math.inf), -1), g, x
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_filled():
    x, _ = tensors(dtype=torch.float32)
    hidden = torch.rand(7, 9) < 0.4
    for mask in (None, hidden.float()):
        with pytest.raises(ValueError, match="fill replaces the scores where a bool mask is True"):
            fused.scaled_masked_softmax(x, mask, SCALE, fill=-1.0)
    for fill in (math.nan, torch.tensor(-1.0), "-inf"):
        with pytest.raises(TypeError, match="fill must be a number"):
            fused.scaled_masked_softmax(x, hidden, SCALE, fill=fill)
    with pytest.raises(ValueError, match=r"-1e\+300 is beyond the numbers of torch.float32"):
        fused.scaled_masked_softmax(x, hidden, SCALE, fill=-1e300)


@pytest.mark.parametrize("fill", [None, -2.5], ids=["hidden", "filled"])
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (2, 1, 7, 9), (2, 1, 1, 9), (7, 9), (9,)], ids=str)
def test_compiled_code_reads_masks_of_all_shapes(fill, shape, values_and_gradients):
    """Those that several heads share are given to it as integers."""
    torch.manual_seed(0)
    x, g = tensors(dtype=torch.float32)
    hidden = torch.rand(shape) < 0.4

    def ours(x):
        return fused.scaled_masked_softmax(x, hidden, SCALE, fill=fill)

    results = []
    for backend in ("reference", "inductor"):
        with fused.backend(backend):
            results.append(values_and_gradients(ours, g, x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
