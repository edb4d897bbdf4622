"""Replacing what was found: the same values afterwards, or an error and the same graph."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from schedule.errors import MatchError
from schedule.patterns import compile_pattern, graphs_equal, search
from schedule.rewriting import check, copy_graph, erased, merge, rewrite, sift, splice, split_linear
from schedule.tracing.regions import begin_grad_mode, end_region

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
    (occurrence,) = search(graph, what, modules, closed=False).occurrences
    before = text(graph)
    for attempt in (
        lambda: check(graph, [occurrence], modules),
        lambda: rewrite(graph, [occurrence], build, modules),
        lambda: splice(graph, occurrence, build, modules),
    ):
        with pytest.raises(MatchError, match=match) as caught:
            attempt()
        assert caught.value.fix and caught.value.where
        assert text(graph) == before


def replaced(function, what=pattern, make=build, inputs=(X, Y), modules=None):
    """The rewritten graph, after checking that it computes what ``function`` computes."""
    graph = trace(function)
    before = text(graph)
    found = search(graph, what, modules).occurrences
    assert found
    new, _ = rewrite(graph, found, make, modules)
    assert text(graph) == before
    torch.testing.assert_close(run(new, *(i.clone() for i in inputs)), run(graph, *(i.clone() for i in inputs)))
    return new


def ops(graph):
    return [n.name for n in graph.nodes if n.op not in ("placeholder", "output")]


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
        new, made = rewrite(graph, search(graph, pattern).occurrences, build)
        assert [[n.name for n in nodes] for nodes in made] == [["fused"], ["fused_1"]]
        assert made[1][0].meta == {"spec": ("spec of", "tanh_1"), "source": "model.py:7"}
        graphs.append(new)
    assert str(graphs[0]) == str(graphs[1])
    torch.testing.assert_close(run(graphs[0], X, Y), model(X, Y))


def test_names_are_not_used_again_in_copies():
    graph = trace(lambda a, b: torch.tanh(torch.relu(a + b)))
    new, _ = rewrite(
        graph, search(graph, pattern).occurrences, lambda g, i, s: g.call_function(torch.sub, (*i.values(),))
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


# refusals


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
        check(graph, search(graph, pattern, modules).occurrences, modules)


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
        graph, search(graph, dropped).occurrences, lambda g, i, s: g.call_function(dropped, (*i.values(),))
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
    (one,) = search(graph, pattern).occurrences
    (two,) = search(graph, lambda x: torch.tanh(torch.relu(x))).occurrences
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
        splice(graph, search(graph, pattern).occurrences[0], breaks)
    assert text(graph) == before


def test_sift_separates_sound_from_unsound():
    def model(a, b):
        good = torch.tanh(torch.relu(a + b))
        inner = torch.relu(good + b)
        b.add_(1)
        return torch.tanh(inner)

    graph = trace(model)
    sound, unsound = sift(graph, search(graph, pattern).occurrences)
    assert [o.outputs[0].name for o in sound] == ["tanh"]
    assert [o.outputs[0].name for o, _ in unsound] == ["tanh_1"] and "add_" in str(unsound[0][1])


# placement


def pair(x, w, v):
    return x @ w, x @ v


def both(graph, inputs, scalars):
    return graph.call_function(matmuls, (inputs["x"], inputs["w"], inputs["v"]))


def matmuls(x, w, v):
    return x @ w, x @ v


W, V = torch.randn(4, 4), torch.randn(4, 4)


def test_several_outputs_go_before_the_first_use_and_after_all_inputs():
    def model(a, w, v):
        first = torch.relu(a @ w)
        late = torch.tanh(v)  # an input of the match, made after the use of its first output
        return first + a @ late

    new = replaced(model, pair, both, (X, W, V))
    assert ops(new) == ["tanh", "matmuls", "getitem", "getitem_1", "relu", "add"]


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


def test_unused_outputs_may_be_missing_used_ones_not():
    graph = trace(lambda a, w, v: (a @ w).relu() + 0 * (a @ v).sum())
    found = search(graph, pair).occurrences
    with pytest.raises(MatchError, match="gives no value for matmul_1"):
        rewrite(graph, found, lambda g, i, s: [g.call_function(torch.matmul, (i["x"], i["w"]))])
    dead = trace(lambda a, w, v: (a @ w, a @ v)[0])
    found = search(dead, pair).occurrences
    new, _ = rewrite(dead, found, lambda g, i, s: [g.call_function(torch.mm, (i["x"], i["w"]))])
    torch.testing.assert_close(run(new, X, W, V), X @ W)


def test_parallel_chains_merge_into_one_call():
    def model(a, w, v):
        return torch.relu(a @ w) - torch.exp(a @ v)

    graph = trace(model)
    product = compile_pattern(lambda x, w: x @ w)
    merged = merge(search(graph, product).occurrences)
    assert {k: n.name for k, n in merged.inputs.items()} == {"x": "a", "w_0": "w", "w_1": "v"}
    new, _ = rewrite(graph, [merged], lambda g, i, s: g.call_function(matmuls, (i["x"], i["w_0"], i["w_1"])))
    torch.testing.assert_close(run(new, X, W, V), model(X, W, V))
    with pytest.raises(MatchError, match="nothing to merge"):
        merge([])
    apart = trace(lambda a, b: torch.relu(a) + torch.relu(b))
    with pytest.raises(MatchError, match="share no input"):
        merge(search(apart, lambda x: torch.relu(x)).occurrences)


# what is erased


def test_what_only_fed_the_match_goes_and_effects_stay():
    def shaped(x, y):
        return torch.relu(x).view(x.size(0), -1) + y

    def model(a, b):
        a.size(1)
        b.add_(1)
        return torch.relu(a).view(a.size(0), -1) + b

    graph = trace(model)
    new, _ = rewrite(graph, search(graph, shaped).occurrences, build)
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
        search(graph, what, modules).occurrences,
        lambda g, i, s: g.call_function(what, (*i.values(),)),
        modules,
    )
    assert [n.target for n in made[:2]] == ["fc.weight", "fc.bias"] and ops(new)[-1] == "what"
    assert made[0].meta["spec"].shape == (4, 4)
    torch.testing.assert_close(run(new, X, root=model), model(X))


def test_linear_splits_into_product_and_sum():
    graph = trace(lambda x, w, b: torch.relu(F.linear(x, w, b)))
    what = compile_pattern(lambda x, b: torch.relu(x + b))
    assert not search(graph, what).occurrences
    assert split_linear(graph) == 1 and search(graph, what).occurrences
    bias = torch.randn(4)
    torch.testing.assert_close(run(graph, X, W, bias), torch.relu(F.linear(X, W, bias)))


def test_many_matches_in_one_rewrite():
    def model(a, b):
        for _ in range(50):
            a = torch.tanh(torch.relu(a + b))
        return a

    assert len(ops(replaced(model))) == 50
