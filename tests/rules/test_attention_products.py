"""Attention written with ``einsum``, in several orders of dimensions, becomes torch's own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import schedule
from fused.attention import attention
from schedule.rules.attention import SDPA
from schedule.rules.attention_products import ATTENDED, SCORES, orders
from schedule.rules.proof import failures_of


class Einsum(nn.Module):
    def __init__(self, scores: str, attended: str, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scores, self.attended, self.after = scores, attended, after

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum(self.scores, q, k) * 0.5).softmax(-1)
        return self.after(torch.einsum(self.attended, weights, v))


def merged(x: Tensor) -> Tensor:
    return x.flatten(2) * 2


CASES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "as matmul": ("b h i d, b h j d -> b h i j", "b h i j, b h j d -> b h i d", merged, ""),
    "heads after tokens": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", merged, ""),
    "heads first": ("bqhd,bkhd->hbqk", "hbqk,bkhd->bqhd", merged, ""),
    "strides that are returned": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", lambda x: x, "strides of the result"),
    "one head of the keys": ("bqhd,bkcd->bhqk", "bhqk,bkhd->bqhd", merged, "is not the product"),
    "heads summed": ("bhid,bhjd->bhij", "bhij,bhjd->bid", lambda x: x * 2, "is not the product"),
    "dots": ("b...id,b...jd->b...ij", "b...ij,b...jd->b...id", merged, "is not the product"),
}


@pytest.mark.parametrize("name", CASES)
def test_equations(name: str) -> None:
    scores, attended, after, reason = CASES[name]
    module = Einsum(scores, attended, after)
    twin = copy.deepcopy(module)

    def given(*sizes: int) -> list[Tensor]:
        torch.manual_seed(sum(sizes))
        return [torch.randn(*sizes, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    report = schedule.optimize(module, tuple(given(2, 6, 6)), rules="attention", cost_guard=False)
    assert report.applied == ({} if reason else {"sdpa": 1})
    assert reason in " ".join(entry.reason for entry in report.entries)
    for sizes in ((2, 6, 6), (3, 5, 4)):
        inputs = given(*sizes)
        ours, eager = module(*inputs), twin(*inputs)
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()
        mine, other = (torch.autograd.grad(out.square().sum(), inputs) for out in (ours, eager))
        torch.testing.assert_close(mine, other)


def test_two_dimensions_of_features_are_no_attention() -> None:
    for scores in ("bhicd,bhjcd->bhij", "bd,d->b", "bhid,bhjd->bhji", "bhid,bhjd"):
        assert orders({SCORES: scores}) is None
    assert orders({ATTENDED: "bhij,bhjcd->bhicd"}) is None
    assert orders({SCORES: "bhid,bhjd->bhij"}) == {"q": (0, 1, 2, 3), "k": (0, 1, 2, 3)}


def test_the_proof_catches_another_order_of_the_result() -> None:
    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return SDPA.build(graph, inputs, {**scalars, ATTENDED: "bhqk,bkhd->bhqd"})

    assert SDPA.proof is not None
    proof = dataclasses.replace(SDPA.proof, dtypes=(torch.float64,), forms=SDPA.proof.forms[-1:], refused=())
    assert any(failures_of(dataclasses.replace(SDPA, build=build_wrongly, proof=proof)))


def test_the_call_takes_permuted_operands() -> None:
    module = Einsum(*CASES["heads after tokens"][:3])
    sch = schedule.create_schedule(module, tuple(torch.randn(2, 6, 4, 8) for _ in range(3)))
    sch.optimize(rules="attention", cost_guard=False)
    (call,) = (node for node in sch.graph.nodes if node.target is attention)
    assert [operand.args[1] for operand in call.args] == [(0, 2, 1, 3)] * 3
