"""What a search says of what it did not find, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from schedule.patterns import optional, search
from tests.patterns.found import bias_gelu, qkv

# near misses


def test_near_misses_name_node_expectation_and_line(traced):
    graph = traced(lambda a, b: F.gelu(a - b, approximate="tanh"))
    next(n for n in graph.nodes if n.name == "sub").meta["source"] = "model.py:12"
    (miss,) = search(graph, bias_gelu).near_misses
    assert (miss.node, miss.source, miss.matched, miss.total) == ("sub", "model.py:12", 1, 2)
    assert str(miss) == ("bias_gelu: 1 of 2 operations match; at sub (model.py:12) expected add(), found sub()")


def test_near_miss_without_the_operation(traced):
    assert "gelu" in str(search(traced(lambda a: a * 2), bias_gelu).near_misses[0])
    miss = search(traced(lambda a, b: torch.relu(a + b)), bias_gelu).near_misses[0]
    assert miss.matched == 1 and "gelu" in miss.expected and "relu" in miss.found


# cost


def relus(n):
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(n):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return graph


def seven(x):
    for _ in range(7):
        x = torch.relu(x)
    return x


def test_relu_chains_are_linear():
    results = {n: search(relus(n), seven) for n in (40, 400, 4000)}
    assert [len(r.graph_matches) for r in results.values()] == [5, 57, 571]
    assert all(r.visited <= 7 * n for n, r in results.items())


def layers(n):
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    cos = graph.placeholder("cos")
    call = graph.call_function
    for i in range(n):
        heads = [call(F.linear, (x, graph.get_attr(f"{i}.{name}"))) for name in "qkv"]
        heads[:2] = [call(torch.mul, (h, cos)) for h in heads[:2]]
        scores = call(torch.add, (call(torch.matmul, (heads[0], heads[1])), mask))
        weights = call(F.softmax, (scores,), {"dim": -1})
        x = call(torch.add, (x, call(torch.matmul, (weights, heads[2]))))
        x = call(torch.add, (x, call(F.gelu, (call(F.linear, (x, graph.get_attr(f"{i}.fc"))),))))
    graph.output(x)
    return graph


def rotary(q, k, cos):
    return q * cos, k * cos


def masked(scores, mask):
    return torch.softmax(scores + mask, -1)


@pytest.mark.parametrize("pattern", [qkv, rotary, masked], ids=lambda p: p.__name__)
def test_visits_are_linear_in_layers(pattern):
    few, many = search(layers(12), pattern), search(layers(96), pattern)
    assert (len(few.graph_matches), len(many.graph_matches)) == (12, 96)
    assert math.isclose(many.visited / few.visited, 8, rel_tol=0.05)


def tree(depth, leaf):
    def build(x, level=depth):
        return leaf(x) if level == 0 else build(x, level - 1) + build(x, level - 1)

    return build


def test_commuting_trees_do_not_explode(traced):
    def model(x):
        return tree(6, torch.relu)(x) + torch.relu(x)

    def wrong(x):
        return tree(6, torch.relu)(x) + torch.tanh(x)

    result = search(traced(model), wrong)
    assert not result.graph_matches and result.visited < 50_000
    assert search(traced(model), model).graph_matches


def test_many_optionals_do_not_explode(traced):
    def pattern(x):
        for i in range(12):
            x = optional(torch.relu, name=f"r{i}")(torch.abs(x))
        return torch.tanh(x)

    def model(x):
        for _ in range(11):
            x = torch.relu(torch.abs(x))
        return torch.tanh(torch.exp(x))

    assert search(traced(model), pattern).visited < 10_000
