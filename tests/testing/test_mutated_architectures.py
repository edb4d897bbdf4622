"""Graphs of real architectures with one node changed: not equal any more, and the node is the one marked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import schedule.testing as testing
from schedule.patterns.canonical import canonical_lines
from schedule.testing.difference import side_by_side
from schedule.util.errors import ScheduleError
from tests.testing.releases import paths
from tests.zoo import ARCHITECTURES, batch, build

IN_CI = ("gpt2", "llama")
ORDERED = {torch.matmul, operator.matmul, operator.sub, operator.truediv, F.linear, torch.bmm}
"""Operations whose operands do not commute."""

Mutation = Callable[[fx.Graph], "str | None"]
"""Changes a graph, and returns what the marked line shows, or None if there is nothing to change."""


def _live(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the output is computed from, in order; others do not count in a comparison."""
    live = {next(node for node in graph.nodes if node.op == "output")}
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.users):
            live.add(node)
    return [node for node in graph.nodes if node in live]


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in _live(graph) if node.op == "call_function")


def operand_order(graph: fx.Graph) -> str | None:
    for node in _calls(graph):
        first, second, *others = (*node.args, None, None)
        operands = isinstance(first, fx.Node) and isinstance(second, fx.Node) and first is not second
        if node.target in ORDERED and operands:
            node.args = (second, first, *others[:-2])
            return f"{node.target.__name__.strip('_')}("
    return None


def constant(graph: fx.Graph) -> str | None:
    for node in _calls(graph):
        for position, arg in enumerate(node.args):
            if type(arg) is float and abs(arg) < 1e30:  # the lowest float is shown as an integer
                changed = arg / 2 if arg else 0.5
                node.args = (*node.args[:position], changed, *node.args[position + 1 :])
                return str(changed)
    return None


def dtype(graph: fx.Graph) -> str | None:
    for node in _calls(graph):
        found = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, torch.dtype)]
        if found:
            node.args = tuple(torch.float64 if isinstance(arg, torch.dtype) else arg for arg in node.args)
            node.kwargs = {k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in node.kwargs.items()}
            return "torch.float64"
    return None


def missing(graph: fx.Graph) -> str | None:
    for node in _calls(graph):
        if node.target in (F.linear, torch.tanh, F.gelu, F.silu, F.relu, F.softmax):
            (source, *_) = node.all_input_nodes
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            return f"{node.target.__name__}("
    return None


def path(graph: fx.Graph) -> str | None:
    read = [node for node in _live(graph) if node.op == "get_attr"]
    for one in read:
        for other in read:
            if one.target != other.target:
                before, one.target = one.target, other.target
                return f"self.{before} or self.{other.target}"  # whichever graph's line stands first
    return None


MUTATIONS: tuple[Mutation, ...] = (operand_order, constant, dtype, missing, path)


@cache
def graphs(name: str) -> tuple[testing.Traced, ...]:
    """Return the graphs of one module of each class of an architecture."""
    model = build(name)
    found = []
    for _, at in paths(model):
        try:
            found.append(testing.graph_of(model, batch(name), at))
        except ScheduleError:
            continue
    return tuple(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_the_changed_node_is_marked(name: str, mutate: Mutation) -> None:
    changed = 0
    for traced in graphs(name):
        copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        copy.output(copy.graph_copy(traced.graph, copied))
        expected = mutate(copy)
        if expected is None:
            continue
        changed += 1
        other = testing.Traced(copy, traced.modules)
        with pytest.raises(AssertionError, match="the graphs differ"):
            testing.assert_graphs_equal(traced, other)
        shown = side_by_side(traced.lines(), canonical_lines(copy, traced.modules), width=10_000)
        marked = next(line for line in shown.splitlines() if line.startswith(">>>"))
        assert any(text in marked for text in expected.split(" or ")), shown
    if not changed:
        pytest.skip(f"no graph of {name} has anything to change")
