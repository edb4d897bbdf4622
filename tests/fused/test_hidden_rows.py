"""scaled_masked_softmax of rows in which a mask or a window hides every key, on every backend."""

from __future__ import annotations

import pytest
import torch

import fused

QUERIES, KEYS = 5, 3  # causal: the last query aligned to the last key, so the first two queries see none


def _hidden() -> torch.Tensor:
    """A mask [2, 1, 1, keys] that hides all keys of the second sample."""
    mask = torch.zeros(2, 1, 1, KEYS, dtype=torch.bool)
    mask[0, ..., 0], mask[1] = True, True
    return mask


MASKS = {
    "window": (None, True, None),
    "both sides": (None, False, (0, 0)),
    "mask": (_hidden(), False, None),
    "mask and window": (_hidden(), True, None),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["reference", "inductor", "triton"])
def test_they_are_zeros_and_have_no_gradient(backend, name, warm_inductor):
    mask, causal, window = MASKS[name]
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, QUERIES, KEYS), torch.randn(2, 3, QUERIES, KEYS)
    results = []
    for dtype, used in ((torch.float64, "reference"), (torch.float32, backend)):
        leaf = x.to(dtype).requires_grad_()
        with fused.backend(used):
            out = fused.scaled_masked_softmax(leaf, mask, 0.5, causal=causal, window=window)
            (gradient,) = torch.autograd.grad(out, leaf, g.to(dtype))
        results.append((out.detach().float(), gradient.float()))
    torch.testing.assert_close(results[1], results[0])
    assert (results[0][0].sum(-1) == 0).any()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["reference", "inductor", "triton"])
def test_visible_scores_of_minus_infinity_are_nan_as_in_eager(backend, name, warm_inductor):
    mask, causal, window = MASKS[name]
    x = torch.full((2, 3, QUERIES, KEYS), -torch.inf)
    with fused.backend(backend):
        out = fused.scaled_masked_softmax(x, mask, 0.5, causal=causal, window=window)
        hidden = fused.scaled_masked_softmax(torch.zeros_like(x), mask, 0.5, causal=causal, window=window) == 0
    assert out[~hidden].isnan().all()
    assert (out[hidden.all(-1)] == 0).all()
