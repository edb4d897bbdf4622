"""Kernels run under selective checkpointing, which recomputes their results unless a policy saves them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fused

Tensor = torch.Tensor


def products(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def everything(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save all but the tensors that are filled in place: torch refuses these."""
    written = function in (torch.ops.aten.empty.memory_format, torch.ops.aten.bernoulli_.float)
    return CheckpointPolicy.PREFER_RECOMPUTE if written else CheckpointPolicy.MUST_SAVE


def block(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    hidden = fused.bias_gelu(x @ weight, bias)
    return fused.rms_norm(fused.bias_dropout_add(hidden, bias, x, 0.25, True), scale, 1e-6)


@pytest.mark.parametrize("policy", [products, everything])
def test_kernels_run_in_both_passes(device: str, launches: Counter[str], policy: Any) -> None:
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 16), (16, 16), (16,), (16,))]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    found = []
    with fused.backend("triton"):
        for run in (block, lambda *given: checkpoint(block, *given, use_reentrant=False, context_fn=contexts)):
            torch.manual_seed(0)
            before = launches.total()
            out = run(*inputs)
            forward = launches.total() - before
            found.append((forward, out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
            found[-1] = (launches.total() - before, *found[-1])
    (plain_launches, plain_forward, *plain), (all_launches, forward, *again) = found
    assert forward == plain_forward > 0 and all_launches == plain_launches + forward
    for mine, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_other_modes_still_see_operations(device: str, launches: Counter[str]) -> None:
    x, bias = torch.randn(6, 16, device=device), torch.randn(16, device=device)
    with fused.backend("triton"), FlopCounterMode(display=False), _caching():
        fused.bias_gelu(x, bias)
    assert not launches


def _caching() -> Any:
    return create_selective_checkpoint_contexts(products)[0]
