"""Call targets in rewritten graphs: matched operations as one callable, compiled or not, and named functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fused.backends import availability, kernel_store
from schedule.capture import compiled, pack_graph, unpack_graph
from schedule.patterns import GraphMatch
from schedule.patterns.normalized_nodes import Attr
from schedule.patterns.ops import arguments_of, operation_of
from schedule.patterns.rewriting import Build
from schedule.patterns.side_effects import is_plain_module
from schedule.util.errors import NotApplicable
from schedule.util.nodes import named_input

_OPTIONS: dict[str, Any] = {"fallback_random": True}  # dropout draws the same numbers as uncompiled


class Callee:
    """Callable with a name, for FX to print calls of it.

    Copies and pickles are made from the graph or function it is built from.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = re.sub(r"\W+", "_", name).strip("_") or "region"
        self.__qualname__ = self.__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__name__})"


class Named(Callee):
    """Call target for a function without a name: a lambda, a partial or an object."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(name)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Region(Callee):
    """Part of a graph as one function of the values it reads."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__(name)
        self.graph = graph
        self._run = compiled(graph)

    def __call__(self, *inputs: Any) -> Any:
        return self._run(None, *inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {"graph": pack_graph(self.graph), "name": self.__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(unpack_graph(state["graph"]), state["name"])  # type: ignore[misc]


class CompiledRegion(Region):
    """Region compiled by inductor at its first call, or run uncompiled if compiling is impossible."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__(graph, name)
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._run(None, *inputs)
        if self._compiled is None:
            self._compiled = self._compile(inputs)
        if self._compiled is self._run:
            return self._run(None, *inputs)
        try:
            return self._compiled(None, *inputs)
        except _failures() as error:
            result = self._run(None, *inputs)  # an error caused by the inputs is raised here, unchanged
            self._compiled = self._run
            availability.warn_once(
                f"{self.__name__}: compiling failed ({type(error).__name__}); it runs uncompiled, only slower"
            )
            return result

    def _compile(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        device = next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")
        reason = availability.why_unavailable("inductor", device)
        if reason is not None:
            availability.warn_once(f"{self.__name__} runs uncompiled: {reason}")
            return self._run
        kernel_store.cache()  # the compiler loads what it finds there
        made: Callable[..., Any] = torch.compile(self._run, dynamic=True, options=_OPTIONS)
        return made


def _failures() -> tuple[type[Exception], ...]:
    try:
        from fused.torch_internals.compiler import TorchDynamoException
    except ImportError:
        return (ImportError, OSError)
    return (TorchDynamoException, ImportError, OSError)


def region_of(graph_match: GraphMatch, name: str, make: type[Region], module: nn.Module) -> tuple[GraphMatch, Build]:
    """Return the match with all values read by its nodes as inputs, and a builder for a call of the region.

    The call of a plain layer, such as a convolution, becomes its operation on the layer's parameters.

    Args:
        module: the module of the graph.

    Raises:
        NotApplicable: the match contains the call of another module, which may have hooks and more than parameters.
    """
    nodes = tuple(node for node in graph_match.nodes if node.op != "get_attr")  # parameters are inputs
    inside = set(nodes)
    graph, mapped = fx.Graph(), {}
    inputs: dict[str, fx.Node | Attr] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            if read not in mapped and read not in inside:
                inputs[read.name] = read
                mapped[read] = graph.placeholder(read.name)
                mapped[read].meta.update(read.meta)
    layers = {node: _operation(graph, node, module, inputs) for node in nodes if node.op == "call_module"}
    for node in nodes:
        if node in layers:
            function, arguments = layers[node]
            mapped[node] = graph.call_function(function, (mapped[node.all_input_nodes[0]],), arguments)
            mapped[node].meta.update(node.meta)
        else:
            mapped[node] = graph.node_copy(node, mapped.__getitem__)
    ends = tuple(mapped[node] for node in graph_match.outputs)
    graph.output(ends[0] if len(ends) == 1 else ends)
    region = make(graph, name)

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        return graph.call_function(region, tuple(inputs.values()))

    return replace(graph_match, nodes=nodes, inputs=dict(inputs), scalars={}), build


def _operation(
    graph: fx.Graph, call: fx.Node, module: nn.Module, inputs: dict[str, fx.Node | Attr]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of a plain layer with its arguments, and add its parameters to the ``inputs``."""
    child = module.get_submodule(str(call.target))
    given = arguments_of(child) if is_plain_module(child) else None
    function = getattr(F, operation_of(type(child)) or "", None)
    if given is None or function is None or "training" in given or len(call.all_input_nodes) != 1:
        raise NotApplicable(
            f"the match holds the call of a module, {call.target}",
            fix="trace with flatten=True, decompose() it, or match what it computes",
        )
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Attr):
            path = f"{call.target}.{value.path}"
            arguments[key] = named_input(graph, path)
            inputs[arguments[key].name] = Attr(path, value.value)
        else:
            arguments[key] = value
    return function, arguments
