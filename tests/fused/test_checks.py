"""Errors of the ops for tensors of misfitting shapes or devices, of the types expected by users of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fused

X = torch.randn(2, 4, 6)
MISFITS: dict[str, Callable[[], object]] = {
    "a bias of another size": lambda: fused.bias_activation(X, torch.randn(5), "relu"),
    "a weight on another device": lambda: fused.rms_norm(X, torch.randn(6, device="meta")),
    "a residual of another shape": lambda: fused.add_layer_norm(X, torch.randn(2, 3, 6), torch.ones(6), torch.ones(6)),
    "a mask that does not broadcast": lambda: fused.scaled_masked_softmax(X, torch.randn(2, 4, 3), 1.0),
    "a gate that does not broadcast": lambda: fused.gated_residual(X, X, torch.randn(5)),
    "groups that do not divide": lambda: fused.group_norm(X, 3, None, None),
    "a sink for other heads": lambda: fused.scaled_masked_softmax(X, None, 1.0, sink=torch.randn(3)),
    "targets for other rows": lambda: fused.cross_entropy(X, torch.zeros(2, 3, dtype=torch.long)),
    "a weight for other features": lambda: fused.linear_cross_entropy(
        X, torch.randn(9, 5), torch.zeros(2, 4, dtype=torch.long)
    ),
    "cos wider than q": lambda: fused.rotary_embedding(X[None], X[None], torch.ones(4, 8), torch.ones(4, 8)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_tensors_that_do_not_fit_raise_what_torch_raises_and_a_value_error(what: str) -> None:
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=r"2, 4, 6"):
            MISFITS[what]()
