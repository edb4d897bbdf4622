"""Equal up to names and order, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from schedule.patterns import difference, graphs_equal

EQUAL = [
    (lambda a, b: torch.relu(a) + torch.tanh(b), lambda x, y: torch.tanh(y) + x.relu()),
    (lambda a, b: F.softmax(a * 0.5, -1) @ b, lambda x, y: torch.matmul(torch.softmax(0.5 * x, dim=-1), y)),
    (lambda a, b: (a * b) + (b - a), lambda x, y: (lambda d: y * x + d)(y - x)),
    (lambda a, b: (a + b, [a, b]), lambda x, y: (y + x, [x, y])),
]
UNEQUAL = [
    (lambda a, b: a - b, lambda a, b: b - a),
    (lambda a, b: torch.relu(a) - torch.tanh(b), lambda a, b: torch.relu(b) - torch.tanh(a)),
    (lambda a, b: a @ b @ a, lambda a, b: a @ (b @ a)),
    (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([b, a])),
    (lambda a, b: torch.add(a, b), lambda a, b: torch.add(a, b, alpha=2)),
    (lambda a, b: torch.add(a, b, alpha=2), lambda a, b: torch.add(b, a, alpha=2)),
    (lambda a, b: (a + 1, b), lambda a, b: (b, a + 1)),
    (lambda a, b: F.gelu(a), lambda a, b: F.gelu(a, approximate="tanh")),
    (lambda a, b: (a * b) * (a * b), lambda a, b: (lambda p: p * p)(a * b)),
    (lambda a, b: a[:, 1:], lambda a, b: a[:, 2:]),
]


@pytest.mark.parametrize("pair", EQUAL)
def test_equal(pair, traced):
    a, b = map(traced, pair)
    assert graphs_equal(a, b) and difference(a, b) == ""


@pytest.mark.parametrize("pair", UNEQUAL)
def test_unequal(pair, traced):
    a, b = map(traced, pair)
    assert not graphs_equal(a, b) and difference(a, b)


def test_the_difference_is_readable(traced):
    text = difference(traced(lambda a: F.gelu(a)), traced(lambda a: F.gelu(a, approximate="tanh")))
    assert text.splitlines() == ["- gelu(approximate='none')", "+ gelu(approximate='tanh')"]
    text = difference(traced(lambda a, b: a - torch.relu(b)), traced(lambda a, b: torch.relu(b) - a))
    assert "connected otherwise" in text and "relu" in text


def test_dead_nodes_without_effects_do_not_count(traced):
    def dead(a):
        torch.exp(a)
        return a + 1

    def changed(a):
        a.add_(1)
        return a + 1

    plain = traced(lambda a: a + 1)
    assert graphs_equal(traced(dead), plain) and not graphs_equal(traced(changed), plain)


def test_large_repetitive_graphs_are_quick(traced):
    def model(a):
        for _ in range(60):
            a = torch.relu(a + a) * torch.relu(a)
        return a

    assert graphs_equal(traced(model), traced(model))
