"""What patterns can say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.patterns import any_of, call_module, compile_pattern, optional, scalar, search, tensor
from schedule.util.errors import MatchError
from tests.patterns.found import X, bias_gelu, names, only


def test_scalars(traced):
    def scaled(x):
        return torch.softmax(x * scalar("scale", where=lambda s: s > 0), dim=-1)

    graph = traced(lambda a: torch.softmax(0.125 * a, dim=-1))
    assert only(graph, scaled).scalars == {"scale": 0.125}
    assert not search(traced(lambda a: torch.softmax(a * -1, dim=-1)), scaled).graph_matches
    assert not search(traced(lambda a, b: torch.softmax(a * b, dim=-1), X, X), scaled).graph_matches


def test_a_scalar_twice_is_one_constant(traced):
    def pattern(x):
        return torch.relu(x * scalar("s")) + scalar("s")

    assert search(traced(lambda a: torch.relu(a * 2) + 2), pattern).graph_matches
    assert not search(traced(lambda a: torch.relu(a * 2) + 3), pattern).graph_matches


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
    assert not search(graph, positive).graph_matches
    nodes = compile_pattern(lambda x: torch.relu(x / scalar("s", where=lambda s: isinstance(s, fx.Node))))
    assert search(graph, nodes).graph_matches


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
    assert not search(traced(lambda a: F.gelu(a + 1)), activation).graph_matches
    power = compile_pattern(lambda x: x ** any_of(2, 3, name="n"))
    assert only(traced(lambda a: a**3), power).choices == {"n": 1}


def test_the_whole_pattern_may_be_a_choice(traced):
    pattern = compile_pattern(lambda x: any_of(torch.relu(x), torch.tanh(x)))
    assert len(search(traced(lambda a: torch.relu(a) + torch.tanh(a)), pattern).graph_matches) == 2


def test_defaults_are_optional_constants(traced):
    def pattern(x, scale=1.0):
        return torch.relu(optional(lambda v: v * scale, name="scaled")(torch.abs(x)))

    assert only(traced(lambda a: torch.relu(torch.abs(a) * 3)), pattern).inputs["scale"] == 3
    assert only(traced(lambda a: torch.relu(torch.abs(a))), pattern).inputs["scale"] == 1.0

    def strict(x, scale):
        return torch.relu(torch.abs(x) * scale)

    assert not search(traced(lambda a: torch.relu(torch.abs(a) * 3)), strict).graph_matches


@pytest.mark.parametrize(
    ("pattern", "graph", "found"),
    [
        (lambda x, size: F.max_pool2d(x, size).relu(), lambda a: F.max_pool2d(a, 2).relu(), {"size": (2, 2)}),
        (lambda x, dims: x.mean(dims).relu(), lambda a: a.mean([1, 2]).relu(), {"dims": (1, 2)}),
        (lambda x, dims: x.mean(dims).relu(), lambda a: a.mean([1]).relu(), {"dims": 1}),
        (lambda x, p: F.relu(F.dropout(x, p)), lambda a: F.relu(F.dropout(a, 0.25)), {"p": 0.25}),
        (lambda x, shape: x.view(shape).relu(), lambda a: a.view(3, -1).relu(), {"shape": (3, -1)}),
        (lambda x, m, n: x.view(m, n).relu(), lambda a: a.view([3, -1]).relu(), {"m": 3, "n": -1}),
    ],
)
def test_inputs_where_torch_takes_no_tensor_bind_constants(pattern, graph, found, traced):
    inputs = only(traced(graph), pattern).inputs
    assert {name: inputs[name] for name in found} == found


def test_inputs_where_torch_takes_tensors_bind_no_constants(traced):
    for pattern, graph in (
        (lambda x, c: torch.relu(torch.abs(x) * c), lambda a: torch.relu(torch.abs(a) * 3.0)),
        (lambda x, c: F.dropout(torch.abs(x), c) * c, lambda a: F.dropout(torch.abs(a), 0.5) * 0.5),
    ):
        result = search(traced(graph), pattern)
        assert not result.graph_matches and "scalar('c') binds constants" in str(result.near_misses[0])


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

    assert search(traced(model, X), pattern).graph_matches
    for wrong in (X.double(), X[0], torch.randn(2, 3, 5)):
        assert not search(traced(model, wrong), pattern).graph_matches
    assert not search(traced(model), pattern).graph_matches  # never seen: no predicate holds
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
    assert len(search(graph, call_module(nn.Linear), modules).graph_matches) == 2
    assert len(search(graph, r"fc\d+", modules).graph_matches) == 2
    found = only(graph, lambda x: F.gelu(call_module(r"fc\d+")(x), approximate="tanh"), modules)
    assert names(found) == ["fc1", "act"] and found.inputs["x"].name == "x"
    assert not search(graph, call_module("c1"), modules).graph_matches


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
    assert not half.graph_matches and "decompose" in half.near_misses[0].found


def test_dtype_of_an_input(traced):
    def pattern(x):
        return torch.softmax(x.float(), -1).to(x.dtype)

    graph = traced(lambda a: torch.softmax(a.float(), -1).to(torch.float16), X.half())
    assert search(graph, pattern).graph_matches
    graph = traced(lambda a: torch.softmax(a.float(), -1).to(torch.bfloat16), X.half())
    assert not search(graph, pattern).graph_matches
    graph = traced(lambda a: torch.softmax(a.float(), -1).to(a.dtype), X.half())
    assert search(graph, pattern).graph_matches


def test_nested_arguments(traced):
    def rotate(x):
        return torch.cat((-x[..., 2:], x[..., :2]), dim=-1)

    assert search(traced(lambda a: torch.cat([-a[..., 2:], a[..., :2]], -1)), rotate).graph_matches
    assert not search(traced(lambda a: torch.cat([-a[..., 1:], a[..., :2]], -1)), rotate).graph_matches
    assert not search(traced(lambda a: torch.cat([a[..., :2], -a[..., 2:]], -1)), rotate).graph_matches


def test_sizes_inside_a_pattern(traced):
    def split(x):
        return torch.relu(x).view(x.size(0), x.size(1), 2, -1)

    graph = traced(lambda a: torch.relu(a).view(a.shape[0], a.shape[1], 2, -1).exp(), X)
    assert names(only(graph, split)) == ["relu", "view"]


BAD = [
    (lambda x: x, "does not compute"),
    (lambda x: torch.relu(x) if x else x, "cannot be recorded"),
    (lambda x, y: (torch.relu(x), torch.relu(y)), "share no value"),
    (3, "not a pattern"),
]


@pytest.mark.parametrize(("pattern", "message"), BAD)
def test_bad_patterns(pattern, message):
    with pytest.raises(MatchError, match=message):
        compile_pattern(pattern)


def test_combinators_outside_a_pattern():
    with pytest.raises(MatchError, match="inside a pattern"):
        scalar("s")
