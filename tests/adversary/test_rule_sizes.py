"""Sizes that agree in the recorded run only: halves by accident, and features that broadcast in another call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from tests.adversary.rewritten import rewritten
from tests.adversary.test_rules import Form, agrees, drawn

# -- halves --------------------------------------------------------------------------------------------------


def turned_at(half: Callable[[Tensor], int], width: int | None = None) -> Form:
    def turn(x: Tensor) -> Tensor:
        return torch.cat((-x[..., half(x) :], x[..., : half(x)]), dim=-1)

    def form(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if width is None:
            return q * cos + turn(q) * sin
        part = q[..., :width]
        return torch.cat((part * cos + turn(part) * sin, q[..., width:]), dim=-1)

    return form


def turned_in_chunks(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = q.chunk(2, dim=-1)
    return q * cos + torch.cat((-second, first), dim=-1) * sin


def turned_in_pairs(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos + torch.stack((-q[..., 1::2], q[..., ::2]), dim=-1).flatten(-2) * sin


def turned_together(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned_at(lambda x: 4)(q, cos, sin), turned_at(lambda x: x.shape[-1] // 2)(q * 2, cos, sin)


EIGHT = ((2, 3, 5, 8), (5, 8), (5, 8))
TURNED: dict[str, tuple[Form, list[tuple[tuple[int, ...], ...]]]] = {
    "a constant": (turned_at(lambda x: 4), [EIGHT, ((2, 3, 5, 6), (5, 6), (5, 6))]),
    "half of the length": (
        turned_at(lambda x: x.shape[2] // 2),
        [((2, 3, 8, 8), (8, 8), (8, 8)), ((2, 3, 4, 8), (4, 8), (4, 8))],
    ),
    "half of an odd width": (turned_at(lambda x: x.shape[-1] // 2), [EIGHT, ((2, 3, 5, 7), (5, 7), (5, 7))]),
    "chunks of an odd width": (turned_in_chunks, [EIGHT, ((2, 3, 5, 7), (5, 7), (5, 7))]),
    "one cos for all": (turned_in_chunks, [EIGHT, ((2, 3, 5, 8), (5, 1), (5, 1))]),
    "one cos for all pairs": (turned_in_pairs, [EIGHT, ((2, 3, 5, 8), (5, 1), (5, 1))]),
    "one sin for all": (turned_at(lambda x: x.shape[-1] // 2), [EIGHT, ((2, 3, 5, 8), (5, 8), (5, 1))]),
    "one feature for all cos": (turned_at(lambda x: x.shape[-1] // 2), [EIGHT, ((2, 3, 5, 1), (5, 8), (5, 8))]),
    "a constant of a part": (
        turned_at(lambda x: 2, 4),
        [((2, 3, 5, 8), (5, 4), (5, 4)), ((2, 3, 5, 3), (5, 3), (5, 3))],
    ),
    "half of a part": (
        turned_at(lambda x: x.shape[-1] // 2, 4),
        [((2, 3, 5, 8), (5, 4), (5, 4)), ((2, 3, 5, 3), (5, 3), (5, 3)), ((2, 3, 5, 9), (5, 1), (5, 1))],
    ),
    "two at once": (turned_together, [EIGHT, ((2, 3, 5, 6), (5, 6), (5, 6))]),
}


@pytest.mark.parametrize("name", TURNED)
def test_parts_that_are_halves_by_accident(name: str) -> None:
    form, (recorded, *called) = TURNED[name]
    assert agrees(form, drawn(*recorded), "default", *(drawn(*shapes) for shapes in called))


def test_cos_narrower_than_the_queries_is_an_error_as_in_eager_torch() -> None:
    form = turned_at(lambda x: x.shape[-1] // 2)
    module, count = rewritten(form, drawn(*EIGHT), "default")
    assert count
    for function in (form, module):
        with pytest.raises(RuntimeError, match="must match the size"):
            function(*drawn((2, 3, 5, 8), (5, 4), (5, 4)))


def gated_at(half: Callable[[Tensor], int]) -> Form:
    return lambda y: F.silu(y[..., : half(y)]) * y[..., half(y) :]


def gated_product(w: Tensor, x: Tensor) -> Tensor:
    y = w @ x
    return F.silu(y[..., :1]) * y[..., 1:]


def gated_linear_by_name(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(weight=w, input=x)
    return F.silu(y[..., :1]) * y[..., 1:]


GATED: dict[str, tuple[Form, list[tuple[tuple[int, ...], ...]]]] = {
    "half of the length": (gated_at(lambda y: y.shape[1] // 2), [((2, 8, 8),), ((2, 2, 5),)]),
    "half of an odd width": (gated_at(lambda y: y.shape[-1] // 2), [((2, 8),), ((2, 3),)]),
    "a product": (gated_product, [((3, 4), (4, 2)), ((3, 4), (4, 5))]),
    "a weight by name": (gated_linear_by_name, [((3, 4), (2, 4)), ((3, 4), (5, 4))]),
}


@pytest.mark.parametrize("name", GATED)
def test_gates_that_are_halves_by_accident(name: str) -> None:
    form, (recorded, *called) = GATED[name]
    assert agrees(form, drawn(*recorded), "default", *(drawn(*shapes) for shapes in called))


# -- sizes that broadcast ------------------------------------------------------------------------------------


def rms_normed(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rms_normed_sum(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return rms_normed(total, w), total


def layer_normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


def layer_normed_sum(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return layer_normed(total, w, b), total


def gated_chunks(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def divided(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / (q.shape[2] - 1) + mask).softmax(-1)


BROADCAST: dict[str, tuple[Form, list[tuple[tuple[int, ...], ...]]]] = {
    "one bias": (lambda x, b: F.gelu(x + b), [((2, 3, 8), (8,)), ((2, 3, 8), (1,))]),
    "one feature and biases": (lambda x, b: F.gelu(x + b), [((2, 3, 8), (8,)), ((2, 3, 1), (8,)), ((2, 3, 1), (1,))]),
    "no feature and one bias": (lambda x, b: F.gelu(x + b), [((2, 3, 8), (8,)), ((2, 3, 0), (1,))]),
    "one weight": (rms_normed, [((2, 3, 8), (8,)), ((2, 3, 8), (1,)), ((2, 3, 1), (1,))]),
    "one feature and weights": (rms_normed, [((2, 3, 8), (8,)), ((2, 3, 1), (8,))]),
    "one feature of a sum": (
        rms_normed_sum,
        [((2, 8), (2, 8), (8,)), ((2, 8), (2, 8), (1,)), ((2, 1), (2, 1), (8,)), ((2, 8), (2, 1), (1,))],
    ),
    "one bias of a norm": (
        layer_normed,
        [((2, 8), (8,), (8,)), ((2, 8), (8,), (1,)), ((2, 8), (1,), (8,)), ((2, 1), (8,), (8,)), ((2, 1), (1,), (8,))],
    ),
    "one bias of the norm of a sum": (
        layer_normed_sum,
        [((2, 8), (2, 8), (8,), (8,)), ((2, 8), (2, 8), (8,), (1,)), ((2, 1), (2, 1), (8,), (1,))],
    ),
    "chunks of width 3": (gated_chunks, [((2, 8),), ((2, 3),)]),
    "divided by 0 in the call": (
        divided,
        [((2, 3, 4, 8), (2, 3, 4, 8), (4, 4)), ((2, 3, 1, 8), (2, 3, 4, 8), (1, 4))],
    ),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_sizes_that_broadcast_in_the_call_only(name: str) -> None:
    form, (recorded, *called) = BROADCAST[name]
    assert agrees(form, drawn(*recorded), "default", *(drawn(*shapes) for shapes in called))


def test_two_columns_of_sinks() -> None:
    def form(x: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        z = torch.cat([x * 0.5 + mask, sink], dim=-1)
        z = z - z.max(-1, keepdim=True).values
        return F.softmax(z, dim=-1)[..., :-1]

    shapes = (2, 3, 4, 4), (1, 1, 4, 4)
    agrees(form, drawn(shapes[0], (2, 3, 4, 1), shapes[1]), "default", drawn(shapes[0], (2, 3, 4, 2), shapes[1]))


def test_rows_of_choices_that_are_the_classes_of_a_head() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).view(labels.shape[0], -1), labels)

    torch.manual_seed(0)
    module = Head()
    twin = copy.deepcopy(module)
    schedule.optimize(module, (torch.randn(6, 8), torch.zeros(6, dtype=torch.long)), rules="memory", cost_guard=False)
    x, labels = torch.randn(24, 8), torch.randint(0, 4, (6,))
    torch.testing.assert_close(module(x, labels), twin(x, labels))


def test_one_bias_of_a_head() -> None:
    def form(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w) + b, labels.argmax(-1))

    shapes = (6, 8), (4, 8), (6, 4)
    recorded, called = (drawn(*shapes[:2], (width,), shapes[2]) for width in (4, 1))
    assert agrees(form, recorded, "memory", called)


def test_divided_by_the_constant_0() -> None:
    def form(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 0.0 + mask).softmax(-1)

    for rules in ("default", "attention"):
        agrees(form, drawn((2, 3, 4, 8), (2, 3, 4, 8), (4, 4)), rules)
