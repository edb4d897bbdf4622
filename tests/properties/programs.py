"""Random FX graphs: DAGs of tensor operations with shared values, views, in-place operations and several results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import fx, nn

from tests.properties.modules import WIDTH

FULL, HEADS, SCORES, ROW = "[rows, length, width]", "[rows, 2, length, 4]", "[rows, 2, length, length]", "[…, 1]"


@dataclass(eq=False)
class Memory:
    """What values share; ``kept``: autograd, or who called, still needs what is in it."""

    kept: bool = False


@dataclass(frozen=True)
class Value:
    """A node, its kind of shape, and its memory."""

    node: fx.Node
    kind: str
    memory: Memory


@dataclass(frozen=True)
class Op:
    """An operation, and several ways to write it.

    Attributes:
        takes: kinds of shape.
        gives: kind of the result.
        forms: each inserts it, given the graph and its arguments.
        keeps: autograd keeps an argument or the result, so neither may change afterwards.
        view: the result shares memory with the first argument.
        mutates: the first argument is changed, and is the result.
    """

    takes: tuple[str, ...]
    gives: str
    forms: tuple[Callable[..., fx.Node], ...]
    keeps: bool = True
    view: bool = False
    mutates: bool = False


def calls(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Callable[..., fx.Node]:
    """A form: a function called with the arguments and these constants."""
    return lambda graph, *args: graph.call_function(function, (*args, *rest), kwargs)


def method(name: str, *rest: Any, **kwargs: Any) -> Callable[..., fx.Node]:
    """A form: a method."""
    return lambda graph, *args: graph.call_method(name, (*args, *rest), kwargs)


def with_attributes(function: Callable[..., Any], *names: str, **kwargs: Any) -> Callable[..., fx.Node]:
    """A form: a function called with the arguments and parameters."""
    return lambda graph, *args: graph.call_function(function, (*args, *(graph.get_attr(n) for n in names)), kwargs)


def module(name: str) -> Callable[..., fx.Node]:
    """A form: a submodule called."""
    return lambda graph, *args: graph.call_module(name, args)


def _split(graph: fx.Graph, x: fx.Node) -> fx.Node:
    rows, length = graph.call_method("size", (x, 0)), graph.call_method("size", (x, 1))
    return graph.call_method("transpose", (graph.call_method("view", (x, rows, length, 2, WIDTH // 2)), 1, 2))


def _joined(graph: fx.Graph, x: fx.Node) -> fx.Node:
    shape = graph.call_function(getattr, (x, "shape"))
    rows, length = (graph.call_function(operator.getitem, (shape, i)) for i in (0, 2))
    turned = graph.call_method("contiguous", (graph.call_method("transpose", (x, 1, 2)),))
    return graph.call_method("view", (turned, rows, length, WIDTH))


def _flat_and_back(graph: fx.Graph, x: fx.Node) -> fx.Node:
    size = graph.call_method("size", (x,))
    return graph.call_method("view", (graph.call_method("reshape", (x, -1, WIDTH)), size))


def _halves(graph: fx.Graph, x: fx.Node) -> fx.Node:
    parts = graph.call_method("chunk", (x, 2), {"dim": -1})
    one, other = (graph.call_function(operator.getitem, (parts, i)) for i in (0, 1))
    return graph.call_function(torch.cat, ([other, one],), {"dim": -1})


def _rms(graph: fx.Graph, x: fx.Node) -> fx.Node:
    mean = graph.call_method("mean", (graph.call_method("pow", (x, 2)), -1), {"keepdim": True})
    scale = graph.call_function(torch.rsqrt, (graph.call_function(operator.add, (mean, 1e-6)),))
    return graph.call_function(operator.mul, (graph.get_attr("gain"), graph.call_function(operator.mul, (x, scale))))


def _scores(graph: fx.Graph, q: fx.Node, k: fx.Node) -> fx.Node:
    product = graph.call_function(torch.matmul, (q, graph.call_method("transpose", (k, -1, -2))))
    return graph.call_function(operator.truediv, (product, 2.0))


def _masked(graph: fx.Graph, scores: fx.Node) -> fx.Node:
    length = graph.call_method("size", (scores, -1))
    later = graph.call_method("triu", (graph.call_function(torch.ones, (length, length)), 1))
    return graph.call_method("masked_fill", (scores, graph.call_method("bool", (later,)), -1e4))


OPS: tuple[Op, ...] = (
    Op((FULL, FULL), FULL, (calls(operator.add), calls(torch.add), method("add")), keeps=False),
    Op((FULL, FULL), FULL, (calls(operator.sub), calls(torch.sub, alpha=2)), keeps=False),
    Op((FULL, FULL), FULL, (calls(operator.mul), calls(torch.mul), method("mul"))),
    Op((FULL,), FULL, (calls(F.gelu), calls(F.gelu, approximate="tanh"), module("act"))),
    Op((FULL,), FULL, (calls(F.relu), calls(torch.relu), method("relu"))),
    Op((FULL,), FULL, (calls(F.silu), calls(torch.tanh), calls(torch.sigmoid))),
    Op((FULL,), FULL, (calls(operator.neg), calls(operator.mul, 0.5), calls(operator.truediv, 2.0)), keeps=False),
    Op((FULL,), FULL, (with_attributes(operator.add, "bias"), with_attributes(torch.add, "bias")), keeps=False),
    Op((FULL,), FULL, (with_attributes(operator.mul, "gain"),)),
    Op((FULL,), FULL, (with_attributes(F.linear, "weight"), with_attributes(F.linear, "weight", "bias"), module("fc"))),
    Op((FULL,), FULL, (module("norm"), _rms, calls(F.layer_norm, (WIDTH,)))),
    Op((FULL,), FULL, (module("drop"), calls(F.dropout, 0.25, True)), view=True),  # in evaluation it is its input
    Op((FULL,), FULL, (calls(F.softmax, dim=-1), method("softmax", -1))),
    Op((FULL,), FULL, (method("contiguous"), _flat_and_back), view=True, keeps=False),
    Op((FULL,), FULL, (_halves,)),
    Op((FULL,), HEADS, (_split,), view=True, keeps=False),
    Op((HEADS,), FULL, (_joined,), view=True, keeps=False),
    Op((HEADS, HEADS), SCORES, (_scores,)),
    Op((SCORES,), SCORES, (calls(F.softmax, dim=-1), _masked, module("drop"))),
    Op((SCORES, HEADS), HEADS, (calls(torch.matmul), calls(operator.matmul))),
    Op((HEADS, HEADS, HEADS), HEADS, (calls(F.scaled_dot_product_attention),)),
    Op((FULL,), ROW, (method("mean", -1, keepdim=True), method("sum", dim=-1, keepdim=True)), keeps=False),
    Op((FULL, ROW), FULL, (calls(operator.add), calls(operator.sub)), keeps=False),
    Op((FULL, FULL), FULL, (method("add_"), calls(operator.iadd)), keeps=False, mutates=True),
    Op((FULL,), FULL, (method("mul_", 0.5), calls(operator.imul, 2.0), method("neg_")), keeps=False, mutates=True),
    Op((FULL,), FULL, (calls(torch.relu_), calls(F.relu, inplace=True)), mutates=True),
)


@dataclass
class Program:
    """A graph that is being written."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    values: list[Value] = field(default_factory=list)

    def add(self, op: Op, form: int, picks: tuple[int, ...]) -> bool:
        """Insert ``op`` with arguments chosen by numbers; False if there are none for it."""
        chosen = []
        for place, (kind, pick) in enumerate(zip(op.takes, picks, strict=False)):
            suitable = [v for v in self.values if v.kind == kind and not (op.mutates and not place and v.memory.kept)]
            if op.mutates and place:  # added to itself in place, autograd would be wrong by no fault of ours
                suitable = [v for v in suitable if v.memory is not chosen[0].memory]
            if not suitable:
                return False
            chosen.append(suitable[-1 - pick % len(suitable)])  # 0 is the latest: chains are the simplest
        node = op.forms[form % len(op.forms)](self.graph, *(value.node for value in chosen))
        memory = chosen[0].memory if op.view or op.mutates else Memory()
        for value in chosen if op.keeps else ():
            value.memory.kept = True
        memory.kept |= op.keeps
        self.values.append(Value(node, op.gives, memory))
        return True


class Holder(nn.Module):
    """The graph as a submodule, so that it has a path."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def program_of(instructions: list[tuple[int, int, tuple[int, ...]]], outputs: int) -> nn.Module:
    """The model of instructions (operation, form, arguments), which returns its last values."""
    torch.manual_seed(0)
    program = Program()
    program.values.append(Value(program.graph.placeholder("x"), FULL, Memory(kept=True)))
    for op, form, picks in instructions:
        for shift in range(len(OPS)):  # the next operation that has arguments
            if program.add(OPS[(op + shift) % len(OPS)], form, picks):
                break
    results = tuple(value.node for value in program.values[1:][-outputs:]) or (program.values[0].node,)
    program.graph.output(results[0] if len(results) == 1 else results)
    root = nn.Module()
    root.fc, root.norm, root.act, root.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)
    root.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
    root.bias, root.gain = nn.Parameter(torch.randn(WIDTH) / 4), nn.Parameter(1 + torch.randn(WIDTH) / 4)
    program.graph.lint()
    return Holder(fx.GraphModule(root, program.graph))


instructions = st.lists(
    st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 2), st.tuples(*[st.integers(0, 5)] * 3)),
    min_size=2,
    max_size=14,
)
programs = st.builds(program_of, instructions, st.integers(1, 3))
