"""What is found, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from schedule.patterns import compile_pattern, resolve, search
from tests.patterns.found import B, X, bias_gelu, only, qkv

# basics


def test_an_occurrence_says_everything(traced):
    graph = traced(lambda a, b: F.gelu(a + b, approximate="tanh") * 2, X, B)
    found = only(graph, bias_gelu)
    a, b, add, gelu, *_ = graph.nodes
    assert found.nodes == (add, gelu) and found.outputs == (gelu,)
    assert found.inputs == {"x": a, "bias": b} and found.graph is graph
    assert found.pattern.name == "bias_gelu" and found.pattern.inputs == ("x", "bias")
    assert set(found.binding.values()) == {a, b, add, gelu}
    assert len(found.pattern.digraph) == 4


@pytest.mark.parametrize(
    "written",
    [
        lambda a, b: F.gelu(b + a, approximate="tanh"),
        lambda a, b: F.gelu(torch.add(a, b), approximate="tanh"),
        lambda a, b: F.gelu(a.add(b), approximate="tanh"),
        lambda a, b: F.gelu(torch.add(input=a, other=b, alpha=1), approximate="tanh"),
    ],
)
def test_operands_commute_and_forms_agree(written, traced):
    assert len(search(traced(written), bias_gelu).graph_matches) == 1


def test_one_value_may_be_two_inputs(traced):
    found = only(traced(lambda a: F.gelu(a + a, approximate="tanh")), bias_gelu)
    assert found.inputs["x"] is found.inputs["bias"]


def test_a_repeated_input_is_one_value(traced):
    def swish(x):
        return x * torch.sigmoid(x)

    assert search(traced(lambda a: a * torch.sigmoid(a)), swish).graph_matches
    assert search(traced(lambda a: torch.sigmoid(a) * a), swish).graph_matches
    assert not search(traced(lambda a, b: a * torch.sigmoid(b)), swish).graph_matches


def test_a_parameter_read_twice_is_one_value():
    graph = fx.Graph()
    first, second = graph.get_attr("w"), graph.get_attr("w")
    graph.output(graph.call_function(torch.mul, (first, graph.call_function(torch.sigmoid, (second,)))))
    assert search(graph, lambda x: x * torch.sigmoid(x)).graph_matches


# traps


TRAPS = {
    "erf for tanh": (bias_gelu, lambda a, b: F.gelu(a + b)),
    "another constant": (lambda x, y: (x + y) * 2.0, lambda a, b: (a + b) * 3.0),
    "alpha": (lambda x, y: torch.relu(x + y), lambda a, b: torch.relu(torch.add(a, b, alpha=3))),
    "swapped subtraction": (lambda x, y: torch.relu(x - y) * y, lambda a, b: torch.relu(a - b) * a),
    "dim": (lambda x: torch.exp(x.softmax(-1)), lambda a: torch.exp(a.softmax(1))),
    "p": (lambda x: F.dropout(x, 0.1), lambda a: F.dropout(a, 0.2)),
    "eps": (lambda x: F.layer_norm(x, (4,)), lambda a: F.layer_norm(a, (4,), eps=1e-3)),
    "dtype": (lambda x: x.to(torch.float32), lambda a: a.to(torch.float16)),
    "power": (lambda x: x**3, lambda a: a * a * a),
    "a further argument": (lambda x: torch.abs(x), lambda a: torch.abs(a, out=a)),
    "no bias": (lambda x, w, b: F.linear(x, w, b), lambda a, w: F.linear(a, w)),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name, traced):
    pattern, model = TRAPS[name]
    result = search(traced(model), pattern)
    assert not result.graph_matches and result.near_misses
    assert search(traced(pattern), pattern).graph_matches  # the pattern itself is found


def test_data_edges_not_neighbors(traced):
    def neighbors(a, b):
        return torch.relu(a) + torch.tanh(b)  # tanh follows relu in the list of nodes only

    assert not search(traced(neighbors), lambda x: torch.tanh(torch.relu(x))).graph_matches

    def apart(a, b):
        first = torch.relu(a)
        other = torch.exp(b)
        return torch.tanh(first) + other

    assert search(traced(apart), lambda x: torch.tanh(torch.relu(x))).graph_matches


def test_two_for_two_point_nought_only_among_floats(traced):
    pattern = compile_pattern(lambda x: torch.abs(x * 2.0))
    assert search(traced(lambda a: torch.abs(a * 2), X), pattern).graph_matches
    assert not search(traced(lambda a: torch.abs(a * 2), X.long()), pattern).graph_matches


def test_dims_are_equal_modulo_the_rank(traced):
    pattern = compile_pattern(lambda x: x.softmax(-1))
    assert search(traced(lambda a: a.softmax(2), X), pattern).graph_matches
    assert not search(traced(lambda a: a.softmax(1), X), pattern).graph_matches
    assert not search(traced(lambda a: a.softmax(2)), pattern).graph_matches  # rank unknown
    swapped = compile_pattern(lambda x: x.transpose(-1, -2))
    assert search(traced(lambda a: a.transpose(1, 2), X), swapped).graph_matches
    assert not search(traced(lambda a: a.transpose(0, 2), X), swapped).graph_matches


def test_an_interior_value_used_outside(traced):
    def leaky(a, b):
        inner = a + b
        return F.gelu(inner, approximate="tanh") + inner

    graph = traced(leaky)
    result = search(graph, bias_gelu)
    assert not result.graph_matches
    assert "no use outside the match" in str(result.near_misses[0]) and "2 of 2" in str(result.near_misses[0])
    assert len(search(graph, bias_gelu, closed=False).graph_matches) == 1


def test_an_interior_value_that_is_returned(traced):
    def leaky(a, b):
        inner = a + b
        return F.gelu(inner, approximate="tanh"), inner

    (near,) = search(traced(leaky), bias_gelu).near_misses
    assert "no use outside the match, found it returned (a flat graph" in str(near)


def test_a_region_that_another_node_interrupts(traced):
    def pair(x, y):
        first = torch.relu(x)
        return first, torch.tanh(first + y)

    def interrupted(a):
        first = torch.relu(a)
        return torch.tanh(first + torch.exp(first))

    result = search(traced(interrupted), pair)
    assert not result.graph_matches and "in one piece" in result.near_misses[0].expected


def test_an_input_is_from_outside(traced):
    def two(x, y):
        return torch.relu(x) * torch.tanh(y)

    graph = traced(lambda a: (lambda r: r * torch.tanh(r))(torch.relu(a)))
    assert not search(graph, two).graph_matches


# several outputs and overlaps


def test_three_projections_in_graph_order(traced):
    def model(a, q, k, v):
        return F.linear(a, q).relu(), F.linear(a, k).relu(), F.linear(a, v).relu()

    found = only(traced(model), qkv)
    assert {k: n.name for k, n in found.inputs.items()} == {"x": "a", "q": "q", "k": "k", "v": "v"}
    assert [n.name for n in found.outputs] == ["linear", "linear_1", "linear_2"]


def test_the_larger_match_wins(traced):
    graph = traced(lambda a, b: torch.tanh(torch.relu(a + b)))
    small = search(graph, lambda x, y: torch.relu(x + y)).graph_matches
    large = search(graph, lambda x, y: torch.tanh(torch.relu(x + y))).graph_matches
    assert resolve(small + large) == large == resolve(large + small)
