"""Attention that is torch's own in the recorded run only, by an accident of sizes or a write; and rules that raise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused
import schedule
from schedule.rules.bias_activation import GELU
from tests.adversary.rewritten import Applied, assert_same, results, rewritten

Form = Callable[..., Any]


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(shape) for shape in shapes]


def agrees(form: Form, recorded: Sequence[Tensor], rules: str, *others: Sequence[Tensor]) -> int:
    """Compare the rewritten form with itself, on the recorded inputs and others; return how often it was rewritten."""
    module, count = rewritten(form, recorded, rules)
    for inputs in (recorded, *others):
        with fused.backend("reference"):
            assert_same(results(module, inputs), results(form, inputs), torch.float32)
    return count


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v


# -- grouped queries -----------------------------------------------------------------------------------------


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, dim=1)


def expanded(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d)


def item_changed(repeat: Form) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat(k), repeat(v)
        v[:, 0] = 0.0
        return attended(q, k, v)

    return form


def source_changed(repeat: Form) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * 1, v * 1
        many = repeat(k), repeat(v)
        k.zero_()
        return attended(q, *many)

    return form


def source_changed_through_a_view(repeat: Form) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * 1, v * 1
        many = repeat(k), repeat(v)
        k.view(-1).mul_(3.0)
        return attended(q, *many)

    return form


@pytest.mark.parametrize("repeat", [interleaved, expanded])
@pytest.mark.parametrize("change", [item_changed, source_changed, source_changed_through_a_view])
def test_what_is_written_to_repeated_heads_or_their_source(repeat: Form, change: Callable[[Form], Form]) -> None:
    agrees(change(repeat), drawn((2, 6, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "attention")


def test_heads_repeated_by_a_tensor() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = torch.tensor([1, 3])
        return attended(q, k.repeat_interleave(counts, dim=1), v.repeat_interleave(counts, dim=1))

    agrees(form, drawn((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), "attention")


def by_accident(x: Tensor) -> Tensor:
    wide = x[:, :, None].expand(x.shape[0], x.shape[1], 3, x.shape[2], x.shape[3])
    return wide.reshape(x.shape[0], x.shape[3], x.shape[2], x.shape[1] * 3)


def to_the_batch_of_another(q: Tensor, x: Tensor) -> Tensor:
    wide = x[:, :, None].expand(q.shape[0] * q.shape[2] // 4, x.shape[1], 3, x.shape[2], x.shape[3])
    return wide.reshape(-1, x.shape[1] * 3, x.shape[2], x.shape[3])


REPEATED: dict[str, tuple[Form, list[tuple[tuple[int, ...], ...]]]] = {
    "one head of q": (
        lambda q, k, v: attended(q, expanded(k), expanded(v)),
        [((2, 3, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8)), ((2, 1, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8))],
    ),
    "one head of q, interleaved": (
        lambda q, k, v: attended(q, interleaved(k), interleaved(v)),
        [((2, 3, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8)), ((2, 1, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8))],
    ),
    "another reshape": (
        lambda q, k, v: attended(q, by_accident(k), by_accident(v)),
        [((2, 6, 4, 6), (2, 2, 4, 6), (2, 2, 4, 6)), ((2, 4, 4, 6), (2, 2, 4, 4), (2, 2, 4, 4))],
    ),
    "values only": (
        lambda q, k, v: attended(q, k, expanded(v)),
        [((2, 6, 4, 8), (2, 6, 4, 8), (2, 2, 4, 8)), ((3, 6, 5, 8), (3, 6, 5, 8), (3, 2, 5, 8))],
    ),
    "the batch of the queries": (
        lambda q, k, v: attended(q, to_the_batch_of_another(q, k), to_the_batch_of_another(q, v)),
        [((1, 6, 4, 8), (1, 2, 8, 8), (1, 2, 8, 8)), ((1, 6, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8))],
    ),
    "one key for all": (
        lambda q, k, v: attended(q, *(x[:, :, None].expand(-1, -1, 3, q.shape[2], -1).flatten(1, 2) for x in (k, v))),
        [((2, 6, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), ((2, 6, 5, 8), (2, 2, 1, 8), (2, 2, 1, 8))],
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_sizes_of_repeated_heads_that_agree_by_accident(name: str) -> None:
    form, (recorded, called) = REPEATED[name]
    assert agrees(form, drawn(*recorded), "attention", drawn(*called))


# -- filled scores -------------------------------------------------------------------------------------------


def changed_later() -> Tensor:
    fill = torch.full((4,), -math.inf)
    fill[1:2].fill_(3.0)
    return fill


def number_changed_later() -> Tensor:
    fill = torch.full((), -math.inf)
    fill.view(1).fill_(3.0)
    return fill


FILL_TENSORS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "fill_value by name": (lambda: torch.full((), fill_value=-math.inf), True),
    "size by name": (lambda: torch.full(size=(), fill_value=-math.inf), True),
    "data by name": (lambda: torch.tensor(data=-math.inf), True),
    "the lowest number": (lambda: torch.tensor(torch.finfo(torch.float32).min, dtype=torch.float32), True),
    "changed through a view": (changed_later, False),
    "a number changed through a view": (number_changed_later, False),
    "true": (lambda: torch.tensor(-math.inf, dtype=torch.bool), False),
    "a list": (lambda: torch.tensor([-math.inf, 1.0, 2.0, 3.0]), False),
    "another number": (lambda: torch.tensor(-9.0), False),
}


@pytest.mark.parametrize("name", FILL_TENSORS)
def test_tensors_that_scores_are_filled_with(name: str) -> None:
    make, fits = FILL_TENSORS[name]
    allowed = torch.ones(4, 4).tril()

    def form(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        fill, allowed = make(), allowed > 0
        return torch.where(allowed, q @ k.transpose(-1, -2) * 0.5, fill).softmax(-1) @ v

    assert bool(agrees(form, [*drawn(*[(2, 3, 4, 8)] * 3), allowed], "attention")) is fits


def test_a_fill_tensor_larger_than_the_scores() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        fill = torch.full((rows.shape[0], 1, 1, 1), -math.inf)
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return torch.where(allowed, q @ k.transpose(-1, -2) * 0.5, fill).softmax(-1) @ v

    small = drawn(*[(1, 3, 4, 8)] * 3, (1,))
    agrees(form, small, "attention", [*small[:3], *drawn((3,))])


# -- rules that fail -----------------------------------------------------------------------------------------


def failing(*_: object) -> Any:
    raise ArithmeticError("oops")


@pytest.mark.unwritable("the rules are not registered")
@pytest.mark.parametrize("part", ["build", "extra_check", "no_gain"])
def test_what_a_rule_raises_is_the_reason_why_it_is_skipped(part: str) -> None:
    rule = dataclasses.replace(GELU, **{part: failing})
    module, tensors = Applied(lambda x, b: F.gelu(x + b)), drawn((4, 8), (8,))
    report = schedule.optimize(module, tuple(tensors), rules=[rule], cost_guard=False)
    assert not report.applied
    assert [entry.status for entry in report.entries if "ArithmeticError: oops" in entry.reason] == ["skipped"]
    assert_same(results(module, tensors), results(module.form, tensors), torch.float32)
