"""Strides and gradients of results after a rewrite: views, changes through views, and returned tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused
import schedule
from tests.adversary.rewritten import assert_same, results, rewritten

R = torch.randn


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, 3, 8).transpose(1, 2)


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = heads(q), heads(k)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def rotary_viewed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary(q, k, cos, sin)[0].transpose(1, 2).view(2, 5, 24)


def rotary_changed_through_reshape(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, _ = rotary(q, k, cos, sin)
    q.transpose(1, 2).reshape(2, 5, 24).mul_(2.0)
    return q * 1


def layer_norm_viewed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    c = x - x.mean(-1, keepdim=True)
    return (c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b).transpose(0, 1).view(-1)


def layer_norm_called(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x.transpose(0, 1) + r.transpose(0, 1)
    return F.layer_norm(total, (8,), w, b).view(-1), (total * 2).transpose(0, 1).view(-1)


def rms_norm_called(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x.transpose(0, 1), (8,), w, 1e-6).view(-1)


def rms_norm_written(x: Tensor, w: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return (w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).transpose(0, 1).view(-1)


def dropout_and_residual(x: Tensor, r: Tensor) -> Tensor:
    return (r + F.dropout(x.transpose(0, 1), 0.3, True)).view(-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (heads(q) @ heads(k).transpose(-1, -2) * 0.5).softmax(-1) @ heads(v)


ROTARY = (R(2, 5, 24), R(2, 5, 24), R(5, 8), R(5, 8))
ATTENTION = (R(2, 5, 24), R(2, 5, 24), R(2, 5, 24))

FORMS: list[tuple[Callable[..., Any], tuple[Tensor, ...], str]] = [
    (rotary_viewed, ROTARY, "default"),
    (rotary_changed_through_reshape, ROTARY, "default"),
    (layer_norm_viewed, (R(2, 5, 8), R(8), R(8)), "default"),
    (layer_norm_called, (R(2, 5, 8), R(2, 5, 8), R(8), R(8)), "default"),
    (rms_norm_called, (R(2, 5, 8), R(8)), "default"),
    (rms_norm_written, (R(2, 5, 8), R(8)), "default"),
    (dropout_and_residual, (R(2, 5, 8), R(5, 2, 8)), "default"),
    (lambda *t: attended(*t).view(2, -1), ATTENTION, "attention"),
    (lambda *t: attended(*t)[0].view(-1), ATTENTION, "attention"),
    (lambda *t: (attended(*t) * 2).view(-1), ATTENTION, "attention"),
    (lambda *t: torch.as_strided(attended(*t), (4,), (8,)), ATTENTION, "attention"),
]


@pytest.mark.parametrize(("form", "tensors", "rules"), FORMS)
def test_views_of_a_replacement(form: Callable[..., Any], tensors: tuple[Tensor, ...], rules: str) -> None:
    module, count = rewritten(form, tensors, rules)
    assert count == 1
    with fused.backend("reference"):
        assert_same(results(module, tensors), results(form, tensors), torch.float32)


class Child(nn.Module):
    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, *tensors: Tensor) -> Any:
        return self.form(*tensors)


@pytest.mark.parametrize(
    ("form", "tensors", "rules"), [(lambda *t: rotary(*t)[0], ROTARY, "default"), (attended, ATTENTION, "attention")]
)
def test_what_a_module_returns_has_the_strides_of_eager(
    form: Callable[..., Any], tensors: tuple[Tensor, ...], rules: str
) -> None:
    module = Child(form)
    assert schedule.optimize(module, tensors, rules=rules, cost_guard=False).count() == 1
    assert module(*tensors).stride() == form(*tensors).stride()


def test_attention_is_not_copied_where_no_reader_can_tell() -> None:
    def merged(*tensors: Tensor) -> Tensor:
        return attended(*tensors).transpose(1, 2).contiguous().view(2, 5, 24) * 1

    module = Child(merged)
    assert schedule.optimize(module, ATTENTION, rules="attention", cost_guard=False).count() == 1
    targets = [node.target for node in schedule.create_schedule(module).graph.nodes]
    assert targets.count("contiguous") == 1


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda q: q[0].view(-1),
    "function": lambda q: torch.unsqueeze(q, 0).view(-1),
    "detached": lambda q: q.detach().view(-1),
    "changed": lambda q: q.add_(1.0).view(-1),
    "as strided": lambda q: torch.as_strided(q, (4,), (8,)),
    "change of a reshape": lambda q: (q.reshape(-1).mul_(2.0), q)[1],
    "change of a contiguous": lambda q: (q.contiguous().mul_(2.0), q)[1],
}


@pytest.mark.parametrize("name", READS)
def test_merged_projections_are_declined_where_rows_with_gaps_can_be_told(name: str) -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x), self.k(x).view(2, -1, 2, 4) * 1
            return READS[name](q) * 1 + 0 * k.sum()

    module, x = Projections(), R(2, 3, 8)
    expected = module(x)
    assert schedule.optimize(module, x, rules="qkv_merge", cost_guard=False).count() == 0
    torch.testing.assert_close(module(x), expected)


class Frozen(nn.Module):
    """Two results, the second of which needs no gradient in eager torch."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k, self.form = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), form

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.form(self.q(x), self.k(x), *others)


def rotated_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def split(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.view(2, -1, 2, 4).transpose(1, 2), k.view(2, -1, 2, 4).transpose(1, 2)


@pytest.mark.parametrize(
    ("form", "others", "rules"),
    [
        (rotated_both, (R(3, 8), R(3, 8)), "default"),
        (split, (), "qkv_merge"),
    ],
)
def test_results_of_frozen_parameters_need_no_gradient(
    form: Callable[..., Any], others: tuple[Tensor, ...], rules: str
) -> None:
    module, inputs = Frozen(form), (R(2, 3, 8), *others)
    assert schedule.optimize(module, inputs, rules=rules, cost_guard=False).count() == 1
    first, second = module(*inputs)
    assert first.requires_grad and not second.requires_grad
    (first.sum() + second.sum()).backward()
    assert module.q.weight.grad is not None and module.k.weight.grad is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_without_strides(when: str) -> None:
    """Sparse weights of a model, or of a scheduled one, as for inference with pruned weights."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU()).eval()
    ours = copy.deepcopy(plain)

    def prune(model: nn.Sequential) -> None:
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(layer.weight.detach().relu().to_sparse_csr(), requires_grad=False)

    if when == "before":
        prune(ours)
    schedule.optimize(schedule.create_schedule(ours, (R(4, 6),)), rules="inference", cost_guard=False)
    if when == "after":
        prune(ours)
    prune(plain)
    with torch.no_grad():
        x = R(4, 6)
        torch.testing.assert_close(ours(x), plain(x))
