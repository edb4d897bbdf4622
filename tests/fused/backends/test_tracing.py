"""Who needs plain torch operations to look at."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fused
from fused.backends.tracing import needs_reference, transformed


def test_nobody_is_watching():
    assert not transformed()
    assert not needs_reference([torch.ones(2), None, 0.5])
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not needs_reference([leaf, torch.nn.Parameter(leaf)])


def test_transforms_and_modes():
    seen = []

    def watch(x):
        seen.append(transformed())
        return x * 1

    torch.func.vmap(watch)(torch.ones(2))
    torch.func.grad(lambda x: watch(x).sum())(torch.ones(2))
    with forward_ad.dual_level():
        watch(torch.ones(2))
    assert seen == [True] * 3

    class Sub(torch.Tensor):
        pass

    assert needs_reference([torch.ones(2).as_subclass(Sub)])
    assert needs_reference([torch.ones(2, device="meta")])
    assert needs_reference([torch.ones(2, requires_grad=True)])
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert needs_reference([torch.ones(2)])


def test_make_fx_sees_torch_operations():
    with fused.backend("inductor"):
        graph = make_fx(fused.new_gelu)(torch.ones(3))
    assert torch.ops.aten.gelu.default in {node.target for node in graph.graph.nodes}
