"""One vocabulary: the same operation however it is written, and never two different ones as one."""

from __future__ import annotations

import gc
import operator
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.patterns import NormalGraph, OpNode, graphs_equal, normalize, register_op

X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


def last(graph: fx.Graph, modules=None) -> OpNode:
    """The operation that makes the output."""
    return normalize(graph, modules).nodes[-1].args["value"]


SAME = {
    "softmax": [
        lambda x: F.softmax(x, dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=-1),
        lambda x: torch.softmax(x, axis=-1),
    ],
    "relu": [
        lambda x: F.relu(x),
        lambda x: torch.relu(x),
        lambda x: x.relu(),
        lambda x: F.relu(x, inplace=False),
    ],
    "cast": [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.to(dtype=torch.float32),
    ],
    "sub": [lambda x: 1 - x, lambda x: torch.rsub(x, 1), lambda x: x.__rsub__(1)],
    "div": [
        lambda x: x / 2,
        lambda x: torch.div(x, 2),
        lambda x: x.div(2),
        lambda x: torch.true_divide(x, 2),
    ],
    "pow": [lambda x: x**3, lambda x: torch.pow(x, 3), lambda x: x.pow(3)],
    "add": [
        lambda x: x + 1,
        lambda x: torch.add(x, 1),
        lambda x: x.add(1),
        lambda x: torch.add(x, 1, alpha=1),
    ],
    "view": [lambda x: x.view(2, -1), lambda x: x.view((2, -1))],
    "expand": [lambda x: x.expand(5, 2, 3, 4), lambda x: x.expand((5, 2, 3, 4)), lambda x: x.expand(size=(5, 2, 3, 4))],
    "permute": [lambda x: x.permute(0, 2, 1), lambda x: torch.permute(x, (0, 2, 1))],
    "size": [lambda x: x.size(0), lambda x: x.shape[0], lambda x: x.size()[0]],
    "masked_fill": [lambda x: x.masked_fill(x, 0), lambda x: torch.masked_fill(x, x, 0)],
    "where": [lambda x: torch.where(x, x, 0.0), lambda x: x.where(x, 0.0)],
    "dropout": [
        lambda x: F.dropout(x, 0.5, True),
        lambda x: F.dropout(x),
        lambda x: torch.dropout(x, 0.5, True),
    ],
    "gelu": [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none")],
    "matmul": [lambda x: x @ x, lambda x: torch.matmul(x, x), lambda x: x.matmul(x)],
    "layer_norm": [lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, [4], None, None, 1e-5)],
    "transpose": [lambda x: x.transpose(-2, -1), lambda x: torch.transpose(x, -2, -1), lambda x: x.mT],
    "mean": [lambda x: x.mean(1), lambda x: x.mean([1]), lambda x: torch.mean(x, dim=(1,)), lambda x: x.mean(axis=1)],
    "squeeze": [lambda x: x.squeeze(1), lambda x: torch.squeeze(x, (1,))],
    "conv2d": [
        lambda x: F.conv2d(x, x),
        lambda x: F.conv2d(x, x, padding=[0, 0], dilation=(1, 1)),
        lambda x: torch.conv2d(x, x, None, [1], 0),
    ],
    "max_pool2d": [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, [2, 2], padding=[0, 0]),
        lambda x: torch.max_pool2d(x, (2,), [], dilation=1),
        lambda x: F.max_pool2d(x, kernel_size=2, stride=(2, 2)),
    ],
    "avg_pool3d": [lambda x: F.avg_pool3d(x, 3), lambda x: F.avg_pool3d(x, (3, 3, 3), 3, (0, 0, 0))],
    "adaptive_avg_pool2d": [lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.adaptive_avg_pool2d(x, (1, 1))],
}


@pytest.mark.parametrize("name", SAME)
def test_forms_of_one_operation(name, traced):
    graphs = [traced(form) for form in SAME[name]]
    assert [last(g).op for g in graphs] == [name] * len(graphs)
    first = last(graphs[0])
    for graph in graphs[1:]:
        node = last(graph)
        assert list(node.args) == list(first.args)
        constants = {k: v for k, v in node.args.items() if not isinstance(v, OpNode)}
        assert constants == {k: v for k, v in first.args.items() if not isinstance(v, OpNode)}


MODULES = [
    (nn.Softmax(-1), lambda x: F.softmax(x, dim=-1)),
    (nn.ReLU(), lambda x: torch.relu(x)),
    (nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (nn.GELU(), lambda x: F.gelu(x)),
    (nn.Dropout(0.3), lambda x: F.dropout(x, 0.3, True)),
    (nn.SiLU(), lambda x: F.silu(x)),
    (nn.MaxPool1d(2, 1, 1), lambda x: F.max_pool1d(x, 2, 1, 1)),
    (nn.AvgPool1d(2), lambda x: F.avg_pool1d(x, (2,), (2,), (0,))),
    (nn.MaxPool2d(2), lambda x: F.max_pool2d(x, [2, 2])),
    (nn.AvgPool2d([3, 3], padding=1), lambda x: F.avg_pool2d(x, 3, 3, (1, 1))),
    (nn.AdaptiveMaxPool2d((1, 1)), lambda x: F.adaptive_max_pool2d(x, 1)),
    (nn.AdaptiveAvgPool1d(1), lambda x: F.adaptive_avg_pool1d(x, 1)),
    (nn.Flatten(), lambda x: x.flatten(1)),
]


@pytest.mark.parametrize(("module", "function"), MODULES, ids=lambda m: type(m).__name__)
def test_modules_are_the_operations_they_compute(module, function, traced):
    root = nn.Sequential(module)
    assert graphs_equal(traced(root), traced(function), dict(root.named_modules()))


DIFFERENT = {
    "erf is not tanh": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    "alpha is kept": (lambda x: torch.add(x, 1), lambda x: torch.add(x, 1, alpha=3)),
    "sub has an order": (lambda x: x - 1, lambda x: 1 - x),
    "power is no product": (lambda x: x**3, lambda x: x * x * x),
    "dtype or device": (lambda x: x.to(torch.float32), lambda x: x.to("cpu")),
    "division is no product": (lambda x: x / 3, lambda x: x * (1 / 3)),
    "rounding mode": (lambda x: torch.div(x, 2), lambda x: torch.div(x, 2, rounding_mode="floor")),
    "p": (lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, 0.2)),
    "training": (lambda x: F.dropout(x, 0.1, True), lambda x: F.dropout(x, 0.1, False)),
    "eps": (lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, (4,), eps=1e-6)),
    "flag or number": (lambda x: F.dropout(x, 1), lambda x: F.dropout(x, True)),
    "matmul or bmm": (lambda x: x @ x, lambda x: torch.bmm(x, x)),
    "first size": (lambda x: x.expand(5, 2, 3, 4), lambda x: x.expand(6, 2, 3, 4)),
    "second size": (lambda x: x[:, None].expand(2, 5, 3, 4), lambda x: x[:, None].expand(2, 6, 3, 4)),
    "view or reshape": (lambda x: x.view(-1), lambda x: x.reshape(-1)),
    "out is kept": (lambda x: torch.abs(x), lambda x: torch.abs(x, out=x)),
    "in place": (lambda x: F.relu(x), lambda x: F.relu(x, inplace=True)),
    "one window": (lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, (2, 1))),
    "stride": (lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2, 1)),
    "two dimensions": (lambda x: x.mean(1), lambda x: x.mean([1, 2])),
    "no dimension": (lambda x: x.mean([]), lambda x: x.mean([0])),
    "cast copies": (lambda x: x.to(torch.float32), lambda x: x.to(torch.float32, copy=True)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_operations(name, traced):
    a, b = DIFFERENT[name]
    assert not graphs_equal(traced(a), traced(b))


@pytest.mark.parametrize("function", [torch.relu_, lambda x: F.relu(x, True), lambda x: x.relu_(), lambda x: x.add_(1)])
def test_mutation_is_flagged(function, traced):
    def wrapped(x):
        return function(x)

    assert last(traced(wrapped)).mutates


def test_subclasses_hooks_and_own_forwards_stay_calls(traced):
    class Odd(nn.ReLU):
        def forward(self, input):
            return input + 1

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    replaced = nn.ReLU()
    replaced.forward = lambda x: x
    for module in (hooked, replaced):
        root = nn.Sequential(module)
        assert last(traced(root), dict(root.named_modules())).op == "call_module"
    graph = fx.Graph()
    graph.output(graph.call_module("odd", (graph.placeholder("x"),)))
    assert last(graph, {"odd": Odd()}).op == "call_module"
    assert last(graph).op == "call_module"


def test_linear_with_a_bias_is_a_product_and_a_sum(traced):
    root = nn.Sequential(nn.Linear(4, 4))
    total = last(traced(root), dict(root.named_modules()))
    assert (total.op, total.args["input"].op, total.args["other"].attr.path) == ("add", "linear", "0.bias")


def test_unknown_callables_keep_their_name_and_identity(traced):
    def leaf(x, scale=2):
        return x * scale

    graph = fx.Graph()
    graph.output(graph.call_function(leaf, (graph.placeholder("x"),)))
    node = last(graph)
    assert node.op.endswith("leaf") and node.args["scale"] == 2


def test_kept_until_the_graph_changes(traced):
    graph = traced(lambda x: torch.relu(x + 1))
    first = normalize(graph)
    assert normalize(graph) is first
    add = next(n for n in graph.nodes if n.name == "add")
    add.args = (add.args[0], 2)
    second = normalize(graph)
    assert second is not first and second.by_op["add"][0].args["other"] == 2
    add.target = torch.mul
    assert "mul" in normalize(graph).by_op


def test_toggling_training_or_hooks_is_noticed(traced):
    root = nn.Sequential(nn.Dropout(0.5))
    graph, modules = traced(root), dict(root.named_modules())
    assert last(graph, modules).args["training"] is True
    root.eval()
    assert last(graph, modules).args["training"] is False
    root[0].register_forward_hook(lambda *_: None)
    assert last(graph, modules).op == "call_module"


def test_the_kept_form_lives_and_dies_with_the_graph(traced):
    graph = traced(lambda x: x + 1)
    kept = weakref.ref(normalize(graph).digraph)
    assert isinstance(normalize(pickle.loads(pickle.dumps(graph))), NormalGraph)
    del graph
    gc.collect()
    assert kept() is None


def test_a_new_operation_registers(traced):
    def twice(value, times=2):
        return value * times

    register_op("test_twice", "value, times=2", functions=[twice])
    graph = fx.Graph()
    graph.output(graph.call_function(twice, (graph.placeholder("x"),)))
    assert last(graph).op == "test_twice" and last(graph).args["times"] == 2


def test_unbound_methods_are_methods():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.Tensor.softmax, (graph.placeholder("x"), -1)))
    assert (last(graph).op, last(graph).args["dim"]) == ("softmax", -1)


def test_augmented_assignment_mutates():
    graph = fx.Graph()
    graph.output(graph.call_function(operator.iadd, (graph.placeholder("x"), 1)))
    assert (last(graph).op, last(graph).mutates) == ("add", True)
