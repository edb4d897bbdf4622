"""A rewrite checked from all sides: the same values afterwards, or an error and the same graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from schedule.patterns import search
from schedule.patterns.rewriting import check, rewrite, splice
from schedule.util.errors import MatchError

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def trace(function):
    return fx.Tracer().trace(function)


def run(graph, *inputs, root=None):
    return fx.GraphModule(root or nn.Module(), graph)(*inputs)


def fused(x, y):
    return torch.tanh(torch.relu(x + y))


def pattern(x, y):
    return torch.tanh(torch.relu(x + y))


def build(graph, inputs, scalars):
    return graph.call_function(fused, (inputs["x"], inputs["y"]))


def text(graph):
    return str(graph) + str([(n.name, n.meta) for n in graph.nodes])


def refused(function, what=pattern, modules=None, match=""):
    """The error for the single place where ``what`` is found in ``function``; nothing may have changed."""
    graph = function if isinstance(function, fx.Graph) else trace(function)
    (graph_match,) = search(graph, what, modules, closed=False).graph_matches
    before = text(graph)
    for attempt in (
        lambda: check(graph, [graph_match], modules),
        lambda: rewrite(graph, [graph_match], build, modules),
        lambda: splice(graph, graph_match, build, modules),
    ):
        with pytest.raises(MatchError, match=match) as caught:
            attempt()
        assert caught.value.fix and caught.value.where
        assert text(graph) == before


def replaced(function, what=pattern, make=build, inputs=(X, Y), modules=None):
    """The rewritten graph, after checking that it computes what ``function`` computes."""
    graph = trace(function)
    before = text(graph)
    found = search(graph, what, modules).graph_matches
    assert found
    new, _ = rewrite(graph, found, make, modules)
    assert text(graph) == before
    torch.testing.assert_close(run(new, *(i.clone() for i in inputs)), run(graph, *(i.clone() for i in inputs)))
    return new


def ops(graph):
    return [n.name for n in graph.nodes if n.op not in ("placeholder", "output")]


def pair(x, w, v):
    return x @ w, x @ v


def both(graph, inputs, scalars):
    return graph.call_function(matmuls, (inputs["x"], inputs["w"], inputs["v"]))


def matmuls(x, w, v):
    return x @ w, x @ v
