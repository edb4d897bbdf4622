"""Replacing what was found is refused where a value, an order or an effect would change; then nothing does."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.capture.effects.regions import begin_grad_mode, end_region
from schedule.patterns import search
from schedule.patterns.rewriting import check, copy_graph, partition, rewrite, splice
from schedule.util.errors import MatchError
from tests.patterns.rewriting.replacing import (
    X,
    Y,
    build,
    ops,
    pair,
    pattern,
    refused,
    replaced,
    run,
    text,
    trace,
)


def test_an_interior_value_used_outside():
    def model(a, b):
        inner = torch.relu(a + b)
        return torch.tanh(inner) * inner

    refused(model, match="relu, an interior value of the match, is used outside by mul")


def test_a_region_in_two_pieces():
    def pair(x, y):
        first = torch.relu(x)
        return first, torch.tanh(first + y)

    def model(a, b):
        first = torch.relu(a)
        return torch.tanh(first + torch.exp(first))

    refused(model, pair, match="exp lies between")


def between(effect):
    """relu(a + b), then ``effect``, then tanh: the effect lies amid the match."""

    def model(a, b):
        inner = torch.relu(a + b)
        other = effect(a, b)
        return torch.tanh(inner), other

    return model


class Cache:
    """Stands for an unknown object."""

    def update(self, value):
        return value


MUTATIONS = {
    "in place": lambda a, b: a.add_(1),
    "through a view": lambda a, b: a.view(-1).mul_(2),
    "through a slice": lambda a, b: a[0].zero_(),
    "set item": lambda a, b: a.tracer.create_proxy("call_function", operator.setitem, (a, 0, 1.0), {}),
    "unknown method": lambda a, b: a.update(b),
    "in-place function": lambda a, b: F.relu(a, inplace=True),
    "out": lambda a, b: torch.exp(b * 2, out=a),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_amid_the_match(name):
    refused(between(MUTATIONS[name]), match="in place amid")


def test_effects_on_other_values_are_fine():
    new = replaced(between(lambda a, b: (b * 2).add_(1)))
    assert "fused" in ops(new)
    new = replaced(between(lambda a, b: F.dropout(b, 0.0)))
    assert "fused" in ops(new)


def test_an_unknown_module_amid_the_match():
    class Leaf(nn.Module):
        def forward(self, x):
            return x

    def graph_for(argument):
        graph = fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        inner = graph.call_function(torch.relu, (graph.call_function(torch.add, (a, b)),))
        other = graph.call_function(torch.exp, (a,))
        called = graph.call_module("leaf", ({"a": a, "other": other}[argument],))
        graph.output((graph.call_function(torch.tanh, (inner,)), called))
        return graph

    refused(graph_for("a"), modules={"leaf": Leaf()}, match="leaf may change")
    refused(graph_for("a"), match="leaf may change")
    for modules, argument in (({"leaf": nn.Tanh()}, "a"), ({"leaf": Leaf()}, "other")):
        graph = graph_for(argument)
        check(graph, search(graph, pattern, modules).graph_matches, modules)


def dropped(x, y):
    return torch.tanh(F.dropout(x + y, 0.5, True))


def test_random_numbers_keep_their_order():
    def model(a, b):
        inner = F.dropout(a + b, 0.5, True)
        other = F.dropout(b * 2, 0.5, True)
        return torch.tanh(inner) + other

    refused(model, dropped, match="draws random numbers")

    def harmless(a, b):
        inner = F.dropout(a + b, 0.5, True)
        other = F.dropout(b * 2, 0.5, False)
        return torch.tanh(inner) + other

    graph = trace(harmless)
    torch.manual_seed(0)
    new, _ = rewrite(
        graph, search(graph, dropped).graph_matches, lambda g, i, s: g.call_function(dropped, (*i.values(),))
    )
    torch.manual_seed(1)
    expected = harmless(X, Y)
    torch.manual_seed(1)
    torch.testing.assert_close(run(new, X, Y), expected)


def test_unknown_code_amid_random_numbers():
    def model(a, b):
        inner = F.dropout(a + b, 0.5, True)
        other = b.update()
        return torch.tanh(inner) + other

    refused(model, dropped, match="unknown code")


def test_grad_mode_blocks_are_not_crossed():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    inner = graph.call_function(torch.relu, (graph.call_function(torch.add, (a, b)),))
    block = graph.call_function(begin_grad_mode, (False,))
    outer = graph.call_function(torch.tanh, (inner,))
    graph.call_function(end_region, (block,))
    graph.output(outer)
    refused(graph, match="begin_grad_mode changes what")


def test_in_place_operations_inside():
    def harmless(a, b):
        return torch.tanh(F.relu(a + b, inplace=True))

    assert ops(replaced(harmless)) == ["fused"]

    def fresh_input(a, b):
        hidden = a * 2
        early = torch.exp(hidden)
        return torch.tanh(torch.relu(hidden.add_(b))), early

    assert ops(replaced(fresh_input)) == ["mul", "exp", "fused"]

    def argument(a, b):
        return torch.tanh(torch.relu(a.add_(b)))

    refused(argument, match="changes a in place, which is seen outside")

    def read_later(a, b):
        hidden = a * 2
        out = torch.tanh(torch.relu(hidden.add_(b)))
        return out, torch.exp(hidden)

    refused(read_later, match="exp reads it afterwards")

    def read_through_a_view(a, b):
        hidden = a * 2
        view = hidden.view(-1)
        out = torch.tanh(torch.relu(hidden.add_(b)))
        return out, torch.exp(view)

    refused(read_through_a_view, match="exp reads it afterwards")


def test_overlapping_foreign_and_consumed_matches():
    graph = trace(lambda a, b: torch.tanh(torch.relu(a + b)))
    (one,) = search(graph, pattern).graph_matches
    (two,) = search(graph, lambda x: torch.tanh(torch.relu(x))).graph_matches
    with pytest.raises(MatchError, match="two matches share"):
        check(graph, [one, two])
    with pytest.raises(MatchError, match="another graph"):
        check(trace(lambda a, b: a - b), [one])
    new, _ = rewrite(graph, [one], build, by="fuse(pattern)")
    with pytest.raises(MatchError, match=r"already consumed by fuse\(pattern\)"):
        rewrite(new, [two], build)
    next(n for n in graph.nodes if n.name == "relu").target = torch.exp
    with pytest.raises(MatchError):
        rewrite(copy_graph(trace(lambda a, b: torch.tanh(torch.exp(a + b)))), [two], build)


def test_a_build_that_raises_leaves_nothing_behind():
    graph = trace(lambda a, b: torch.tanh(torch.relu(a + b)))
    before = text(graph)

    def breaks(graph, inputs, scalars):
        graph.call_function(torch.exp, (inputs["x"],))
        raise KeyError("no")

    with pytest.raises(KeyError):
        splice(graph, search(graph, pattern).graph_matches[0], breaks)
    assert text(graph) == before


def test_sift_separates_sound_from_unsound():
    def model(a, b):
        good = torch.tanh(torch.relu(a + b))
        inner = torch.relu(good + b)
        b.add_(1)
        return torch.tanh(inner)

    graph = trace(model)
    sound, unsound = partition(graph, search(graph, pattern).graph_matches)
    assert [o.outputs[0].name for o in sound] == ["tanh"]
    assert [o.outputs[0].name for o, _ in unsound] == ["tanh_1"] and "add_" in str(unsound[0][1])


def test_an_input_that_needs_an_output():
    def chained(a, w, v):
        first = a @ w
        return first, a @ torch.tanh(first.t() @ first)

    refused(chained, pair, match="lies between")

    def late(a, w, v):
        first = torch.relu(a @ w)
        other = F.dropout(v, 0.5, True)
        return first + a @ other

    refused(late, pair, match="made only after relu")


def test_a_late_input_is_not_moved_over_a_mutation():
    def model(a, w, v):
        first = torch.relu(a @ w)
        v.add_(1)
        late = torch.tanh(v)
        return first + a @ late

    refused(model, pair, match="may change what tanh reads")
