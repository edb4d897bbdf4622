"""Replacing what was found: the same values afterwards, and graphs as they should look."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.patterns import compile_pattern, graphs_equal, search
from schedule.patterns.rewriting import copy_graph, erased, merge, rewrite, split_linear
from schedule.util.errors import MatchError
from tests.patterns.rewriting.replacing import (
    X,
    Y,
    both,
    build,
    fused,
    matmuls,
    ops,
    pair,
    pattern,
    refused,
    replaced,
    run,
    text,
    trace,
)


def test_a_chain_becomes_one_call():
    new = replaced(lambda a, b: torch.exp(torch.tanh(torch.relu(a + b))))
    assert ops(new) == ["fused", "exp"]
    assert graphs_equal(new, trace_calls(fused, torch.exp))


def trace_calls(first, second):
    graph = fx.Graph()
    x, y = graph.placeholder("p"), graph.placeholder("q")
    graph.output(graph.call_function(second, (graph.call_function(first, (x, y)),)))
    return graph


def test_names_are_fresh_and_deterministic_and_metadata_stays():
    def model(a, b):
        return torch.tanh(torch.relu(torch.tanh(torch.relu(a + b)) + b))

    graphs = []
    for _ in range(2):
        graph = trace(model)
        for node in graph.nodes:
            node.meta.update(spec=("spec of", node.name), source="model.py:7")
        new, made = rewrite(graph, search(graph, pattern).graph_matches, build)
        assert [[n.name for n in nodes] for nodes in made] == [["fused"], ["fused_1"]]
        assert made[1][0].meta == {"spec": ("spec of", "tanh_1"), "source": "model.py:7"}
        graphs.append(new)
    assert str(graphs[0]) == str(graphs[1])
    torch.testing.assert_close(run(graphs[0], X, Y), model(X, Y))


def test_names_are_not_used_again_in_copies():
    graph = trace(lambda a, b: torch.tanh(torch.relu(a + b)))
    new, _ = rewrite(
        graph, search(graph, pattern).graph_matches, lambda g, i, s: g.call_function(torch.sub, (*i.values(),))
    )
    twin = copy_graph(copy_graph(new))
    with twin.inserting_after(next(n for n in twin.nodes if n.name == "sub")):
        assert twin.call_function(torch.relu, (X,)).name == "relu_1"
    assert set(erased(twin)) == {"add", "relu", "tanh"}


def test_copies_keep_names_metadata_and_values():
    graph = trace(lambda a, b: (a + b) * (a + b))
    for node in graph.nodes:
        node.meta["spec"] = node.name
    next(iter(graph.nodes)).next.next._rename("add_07")
    twin = copy_graph(graph)
    assert text(twin) == text(graph) and not set(twin.nodes) & set(graph.nodes)
    torch.testing.assert_close(run(twin, X, Y), run(graph, X, Y))


W, V = torch.randn(4, 4), torch.randn(4, 4)


def test_several_outputs_go_before_the_first_use_and_after_all_inputs():
    def model(a, w, v):
        first = torch.relu(a @ w)
        late = torch.tanh(v)  # an input of the match, made after the use of its first output
        return first + a @ late

    new = replaced(model, pair, both, (X, W, V))
    assert ops(new) == ["tanh", "matmuls", "getitem", "getitem_1", "relu", "add"]


def test_unused_outputs_may_be_missing_used_ones_not():
    graph = trace(lambda a, w, v: (a @ w).relu() + 0 * (a @ v).sum())
    found = search(graph, pair).graph_matches
    with pytest.raises(MatchError, match="gives no value for matmul_1"):
        rewrite(graph, found, lambda g, i, s: [g.call_function(torch.matmul, (i["x"], i["w"]))])
    dead = trace(lambda a, w, v: (a @ w, a @ v)[0])
    found = search(dead, pair).graph_matches
    new, _ = rewrite(dead, found, lambda g, i, s: [g.call_function(torch.mm, (i["x"], i["w"]))])
    torch.testing.assert_close(run(new, X, W, V), X @ W)


def test_parallel_chains_merge_into_one_call():
    def model(a, w, v):
        return torch.relu(a @ w) - torch.exp(a @ v)

    graph = trace(model)
    product = compile_pattern(lambda x, w: x @ w)
    merged = merge(search(graph, product).graph_matches)
    assert {k: n.name for k, n in merged.inputs.items()} == {"x": "a", "w_0": "w", "w_1": "v"}
    new, _ = rewrite(graph, [merged], lambda g, i, s: g.call_function(matmuls, (i["x"], i["w_0"], i["w_1"])))
    torch.testing.assert_close(run(new, X, W, V), model(X, W, V))
    with pytest.raises(MatchError, match="nothing to merge"):
        merge([])
    apart = trace(lambda a, b: torch.relu(a) + torch.relu(b))
    with pytest.raises(MatchError, match="share no input"):
        merge(search(apart, lambda x: torch.relu(x)).graph_matches)


def test_what_only_fed_the_match_goes_and_effects_stay():
    def shaped(x, y):
        return torch.relu(x).view(x.size(0), -1) + y

    def model(a, b):
        a.size(1)
        b.add_(1)
        return torch.relu(a).view(a.size(0), -1) + b

    graph = trace(model)
    new, _ = rewrite(graph, search(graph, shaped).graph_matches, build)
    assert ops(new) == [
        "size",
        "add_",
        "fused",
    ]  # the unused size read of the user's own is not ours to erase
    assert torch.equal(run(new, X, Y.clone()), fused(X, Y + 1))


def test_size_reads_of_interior_values_go_along():
    def model(a, b):
        inner = torch.relu(a + b)
        return torch.tanh(inner.view(inner.shape[0], -1))

    def shaped(x, y):
        inner = torch.relu(x + y)
        return torch.tanh(inner.view(inner.size(0), -1))

    assert ops(replaced(model, shaped)) == ["fused"]

    def leaky(a, b):
        inner = torch.relu(a + b)
        return torch.tanh(inner.view(inner.shape[0], -1)) * inner.shape[1]

    refused(leaky, shaped, match="used outside")


def test_parameters_of_module_calls_are_read_by_path():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.fc(x))

    model = Model()
    graph, modules = trace(model), dict(model.named_modules())

    def what(x, w, b):
        return torch.relu(F.linear(x, w, b))

    new, (made,) = rewrite(
        graph,
        search(graph, what, modules).graph_matches,
        lambda g, i, s: g.call_function(what, (*i.values(),)),
        modules,
    )
    assert [n.target for n in made[:2]] == ["fc.weight", "fc.bias"] and ops(new)[-1] == "what"
    assert made[0].meta["spec"].shape == (4, 4)
    torch.testing.assert_close(run(new, X, root=model), model(X))


def test_linear_splits_into_product_and_sum():
    graph = trace(lambda x, w, b: torch.relu(F.linear(x, w, b)))
    what = compile_pattern(lambda x, b: torch.relu(x + b))
    assert not search(graph, what).graph_matches
    assert split_linear(graph) == 1 and search(graph, what).graph_matches
    bias = torch.randn(4)
    torch.testing.assert_close(run(graph, X, W, bias), torch.relu(F.linear(X, W, bias)))


def test_many_matches_in_one_rewrite():
    def model(a, b):
        for _ in range(50):
            a = torch.tanh(torch.relu(a + b))
        return a

    assert len(ops(replaced(model))) == 50
