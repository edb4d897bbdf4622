"""What is found, what is refused, what is said about it, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.errors import MatchError
from schedule.patterns import any_of, call_module, compile_pattern, optional, resolve, scalar, search, tensor

X, B, W = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4, 4)


def bias_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def only(graph, pattern, modules=None):
    """The single occurrence."""
    (occurrence,) = search(graph, pattern, modules).occurrences
    return occurrence


def names(occurrence):
    """Names of the consumed nodes."""
    return [node.name for node in occurrence.nodes]


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
    assert len(search(traced(written), bias_gelu).occurrences) == 1


def test_one_value_may_be_two_inputs(traced):
    found = only(traced(lambda a: F.gelu(a + a, approximate="tanh")), bias_gelu)
    assert found.inputs["x"] is found.inputs["bias"]


def test_a_repeated_input_is_one_value(traced):
    def swish(x):
        return x * torch.sigmoid(x)

    assert search(traced(lambda a: a * torch.sigmoid(a)), swish).occurrences
    assert search(traced(lambda a: torch.sigmoid(a) * a), swish).occurrences
    assert not search(traced(lambda a, b: a * torch.sigmoid(b)), swish).occurrences


def test_a_parameter_read_twice_is_one_value():
    graph = fx.Graph()
    first, second = graph.get_attr("w"), graph.get_attr("w")
    graph.output(graph.call_function(torch.mul, (first, graph.call_function(torch.sigmoid, (second,)))))
    assert search(graph, lambda x: x * torch.sigmoid(x)).occurrences


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
    assert not result.occurrences and result.near_misses
    assert search(traced(pattern), pattern).occurrences  # the pattern itself is found


def test_data_edges_not_neighbours(traced):
    def neighbours(a, b):
        return torch.relu(a) + torch.tanh(b)  # tanh follows relu in the list of nodes only

    assert not search(traced(neighbours), lambda x: torch.tanh(torch.relu(x))).occurrences

    def apart(a, b):
        first = torch.relu(a)
        other = torch.exp(b)
        return torch.tanh(first) + other

    assert search(traced(apart), lambda x: torch.tanh(torch.relu(x))).occurrences


def test_two_for_two_point_nought_only_among_floats(traced):
    pattern = compile_pattern(lambda x: torch.abs(x * 2.0))
    assert search(traced(lambda a: torch.abs(a * 2), X), pattern).occurrences
    assert not search(traced(lambda a: torch.abs(a * 2), X.long()), pattern).occurrences


def test_dims_are_equal_modulo_the_rank(traced):
    pattern = compile_pattern(lambda x: x.softmax(-1))
    assert search(traced(lambda a: a.softmax(2), X), pattern).occurrences
    assert not search(traced(lambda a: a.softmax(1), X), pattern).occurrences
    assert not search(traced(lambda a: a.softmax(2)), pattern).occurrences  # rank unknown
    swapped = compile_pattern(lambda x: x.transpose(-1, -2))
    assert search(traced(lambda a: a.transpose(1, 2), X), swapped).occurrences
    assert not search(traced(lambda a: a.transpose(0, 2), X), swapped).occurrences


def test_an_interior_value_used_outside(traced):
    def leaky(a, b):
        inner = a + b
        return F.gelu(inner, approximate="tanh") + inner

    graph = traced(leaky)
    result = search(graph, bias_gelu)
    assert not result.occurrences
    assert "no use outside the match" in str(result.near_misses[0]) and "2 of 2" in str(result.near_misses[0])
    assert len(search(graph, bias_gelu, closed=False).occurrences) == 1


def test_a_region_that_another_node_interrupts(traced):
    def pair(x, y):
        first = torch.relu(x)
        return first, torch.tanh(first + y)

    def interrupted(a):
        first = torch.relu(a)
        return torch.tanh(first + torch.exp(first))

    result = search(traced(interrupted), pair)
    assert not result.occurrences and "in one piece" in result.near_misses[0].expected


def test_an_input_is_from_outside(traced):
    def two(x, y):
        return torch.relu(x) * torch.tanh(y)

    graph = traced(lambda a: (lambda r: r * torch.tanh(r))(torch.relu(a)))
    assert not search(graph, two).occurrences


# the language


def test_scalars(traced):
    def scaled(x):
        return torch.softmax(x * scalar("scale", where=lambda s: s > 0), dim=-1)

    graph = traced(lambda a: torch.softmax(0.125 * a, dim=-1))
    assert only(graph, scaled).scalars == {"scale": 0.125}
    assert not search(traced(lambda a: torch.softmax(a * -1, dim=-1)), scaled).occurrences
    assert not search(traced(lambda a, b: torch.softmax(a * b, dim=-1), X, X), scaled).occurrences


def test_a_scalar_twice_is_one_constant(traced):
    def pattern(x):
        return torch.relu(x * scalar("s")) + scalar("s")

    assert search(traced(lambda a: torch.relu(a * 2) + 2), pattern).occurrences
    assert not search(traced(lambda a: torch.relu(a * 2) + 3), pattern).occurrences


@pytest.mark.parametrize("value", [None, True, 0.5, torch.float16])
def test_scalars_bind_any_constant(value, traced):
    graph = traced(lambda a: F.softmax(a, dim=-1, dtype=value))
    assert only(graph, lambda x: F.softmax(x, dim=-1, dtype=scalar("d"))).scalars == {"d": value}


def test_scalars_bind_sizes(traced):
    def model(a):
        return torch.relu(a / a.size(-1) ** 0.5)

    graph = traced(model, X)
    found = only(graph, lambda x: torch.relu(x / scalar("s")))
    assert found.scalars["s"].name == "pow_1" and names(found) == ["truediv", "relu"]
    positive = compile_pattern(lambda x: torch.relu(x / scalar("s", where=lambda s: s > 0)))
    assert not search(graph, positive).occurrences
    nodes = compile_pattern(lambda x: torch.relu(x / scalar("s", where=lambda s: isinstance(s, fx.Node))))
    assert search(graph, nodes).occurrences


def test_alpha_as_a_scalar(traced):
    def pattern(x, y):
        return torch.relu(x.add(y, alpha=scalar("alpha")))

    assert only(traced(lambda a, b: torch.relu(torch.add(a, b, alpha=3))), pattern).scalars == {"alpha": 3}


def attention(scores, mask):
    scores = optional(lambda s: s + mask, name="mask")(scores * scalar("scale"))
    weights = F.softmax(scores, dim=-1)
    weights = optional(lambda w: w.to(scalar("dtype")), name="cast")(weights)
    return optional(lambda w: F.dropout(w, scalar("p"), scalar("training")), name="dropout")(weights)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
def test_optional_parts(mask, cast, dropout, traced):
    def model(a, m):
        s = a * 0.5
        s = s + m if mask else s
        s = torch.softmax(s, -1)
        s = s.to(torch.float16) if cast else s
        s = F.dropout(s, 0.1, True) if dropout else s
        return s @ m

    found = only(traced(model), attention)
    assert found.choices == {"mask": mask, "cast": cast, "dropout": dropout}
    assert len(found.nodes) == 2 + mask + cast + dropout
    assert (found.inputs["mask"] is not None) == mask
    assert found.scalars["p"] == (0.1 if dropout else None)


def after_one(act):
    return lambda a: act(a + 1)


def test_any_of_values_and_functions(traced):
    def activation(x):
        return any_of(lambda v: F.gelu(v, approximate="tanh"), torch.relu, lambda v: v * torch.sigmoid(v), name="act")(
            x + 1
        )

    for i, act in enumerate((lambda v: F.gelu(v, approximate="tanh"), torch.relu, lambda v: torch.sigmoid(v) * v)):
        assert only(traced(after_one(act)), activation).choices == {"act": i}
    assert not search(traced(lambda a: F.gelu(a + 1)), activation).occurrences
    power = compile_pattern(lambda x: x ** any_of(2, 3, name="n"))
    assert only(traced(lambda a: a**3), power).choices == {"n": 1}


def test_the_whole_pattern_may_be_a_choice(traced):
    pattern = compile_pattern(lambda x: any_of(torch.relu(x), torch.tanh(x)))
    assert len(search(traced(lambda a: torch.relu(a) + torch.tanh(a)), pattern).occurrences) == 2


def test_defaults_are_optional_constants(traced):
    def pattern(x, scale=1.0):
        return torch.relu(optional(lambda v: v * scale, name="scaled")(torch.abs(x)))

    assert only(traced(lambda a: torch.relu(torch.abs(a) * 3)), pattern).inputs["scale"] == 3
    assert only(traced(lambda a: torch.relu(torch.abs(a))), pattern).inputs["scale"] == 1.0

    def strict(x, scale):
        return torch.relu(torch.abs(x) * scale)

    assert not search(traced(lambda a: torch.relu(torch.abs(a) * 3)), strict).occurrences


def test_an_optional_bias(traced):
    def pattern(x, w, b=None):
        return torch.relu(F.linear(x, w, b))

    assert only(traced(lambda a, w, b: torch.relu(F.linear(a, w) + b)), pattern).choices == {"bias": True}
    assert only(traced(lambda a, w, b: torch.relu(F.linear(a, w, b))), pattern).choices == {"bias": True}
    found = only(traced(lambda a, w: torch.relu(F.linear(a, w))), pattern)
    assert found.choices == {"bias": False} and found.inputs["b"] is None


def test_predicates_on_inputs(traced):
    def pattern(x):
        tensor("x", dtype=(torch.float32, torch.float16), ndim=3, where=lambda s: s.shape[-1] % 4 == 0)
        return torch.relu(x)

    def model(a):
        return torch.relu(a)

    assert search(traced(model, X), pattern).occurrences
    for wrong in (X.double(), X[0], torch.randn(2, 3, 5)):
        assert not search(traced(model, wrong), pattern).occurrences
    assert not search(traced(model), pattern).occurrences  # never seen: no predicate holds
    assert "dtype" in search(traced(model, X.double()), pattern).near_misses[0].expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc10, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.GELU("tanh")

    def forward(self, x):
        return self.fc10(self.act(self.fc1(x)))


def test_called_modules(traced):
    block = Block()
    graph, modules = traced(block), dict(block.named_modules())
    assert names(only(graph, call_module("fc1"), modules)) == ["fc1"]
    assert names(only(graph, "fc10", modules)) == ["fc10"]
    assert len(search(graph, call_module(nn.Linear), modules).occurrences) == 2
    assert len(search(graph, r"fc\d+", modules).occurrences) == 2
    found = only(graph, lambda x: F.gelu(call_module(r"fc\d+")(x), approximate="tanh"), modules)
    assert names(found) == ["fc1", "act"] and found.inputs["x"].name == "x"
    assert not search(graph, call_module("c1"), modules).occurrences


def test_module_patterns_and_leaf_modules(traced):
    class Pattern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.act = nn.Linear(9, 9), nn.GELU("tanh")

        def forward(self, x):
            return self.act(self.proj(x))

    block = Block()
    graph, modules = traced(block), dict(block.named_modules())
    found = only(graph, Pattern(), modules)
    assert found.pattern.inputs == ("x", "proj.weight", "proj.bias")
    assert found.inputs["proj.weight"].path == "fc1.weight" and names(found) == ["fc1", "act"]
    half = search(graph, bias_gelu, modules)
    assert not half.occurrences and "decompose" in half.near_misses[0].found


def test_dtype_of_an_input(traced):
    def pattern(x):
        return torch.softmax(x.float(), -1).to(x.dtype)

    graph = traced(lambda a: torch.softmax(a.float(), -1).to(torch.float16), X.half())
    assert search(graph, pattern).occurrences
    graph = traced(lambda a: torch.softmax(a.float(), -1).to(torch.bfloat16), X.half())
    assert not search(graph, pattern).occurrences
    graph = traced(lambda a: torch.softmax(a.float(), -1).to(a.dtype), X.half())
    assert search(graph, pattern).occurrences


def test_nested_arguments(traced):
    def rotate(x):
        return torch.cat((-x[..., 2:], x[..., :2]), dim=-1)

    assert search(traced(lambda a: torch.cat([-a[..., 2:], a[..., :2]], -1)), rotate).occurrences
    assert not search(traced(lambda a: torch.cat([-a[..., 1:], a[..., :2]], -1)), rotate).occurrences
    assert not search(traced(lambda a: torch.cat([a[..., :2], -a[..., 2:]], -1)), rotate).occurrences


def test_sizes_inside_a_pattern(traced):
    def split(x):
        return torch.relu(x).view(x.size(0), x.size(1), 2, -1)

    graph = traced(lambda a: torch.relu(a).view(a.shape[0], a.shape[1], 2, -1).exp(), X)
    assert names(only(graph, split)) == ["relu", "view"]


BAD = [
    (lambda x: x, "does not compute"),
    (lambda x: torch.relu(x) if x else x, "cannot be recorded"),
    (lambda x, y: (torch.relu(x), torch.relu(y)), "share no value"),
    (3, "no pattern"),
]


@pytest.mark.parametrize(("pattern", "message"), BAD)
def test_bad_patterns(pattern, message):
    with pytest.raises(MatchError, match=message):
        compile_pattern(pattern)


def test_combinators_outside_a_pattern():
    with pytest.raises(MatchError, match="inside a pattern"):
        scalar("s")


# several outputs and overlaps


def qkv(x, q, k, v):
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def test_three_projections_in_graph_order(traced):
    def model(a, q, k, v):
        return F.linear(a, q).relu(), F.linear(a, k).relu(), F.linear(a, v).relu()

    found = only(traced(model), qkv)
    assert {k: n.name for k, n in found.inputs.items()} == {"x": "a", "q": "q", "k": "k", "v": "v"}
    assert [n.name for n in found.outputs] == ["linear", "linear_1", "linear_2"]


def test_the_larger_match_wins(traced):
    graph = traced(lambda a, b: torch.tanh(torch.relu(a + b)))
    small = search(graph, lambda x, y: torch.relu(x + y)).occurrences
    large = search(graph, lambda x, y: torch.tanh(torch.relu(x + y))).occurrences
    assert resolve(small + large) == large == resolve(large + small)


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
    assert [len(r.occurrences) for r in results.values()] == [5, 57, 571]
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
    assert (len(few.occurrences), len(many.occurrences)) == (12, 96)
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
    assert not result.occurrences and result.visited < 50_000
    assert search(traced(model), model).occurrences


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
