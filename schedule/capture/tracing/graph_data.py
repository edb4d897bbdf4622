"""Graphs as data: shared by like modules, pickled and copied, spelled as source code.

Two modules share a graph if their classes, parameter shapes and attributes agree, recursively, and they were called
with like arguments. Plain attributes (a layer's index) need not agree unless the forward reads them.
"""

from __future__ import annotations

import keyword
import operator
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.effects.effects import KIND, LENGTH, QUIET, RULE
from schedule.capture.effects.later_reads import AGAIN, LATER
from schedule.capture.effects.layers import LAYER, SHARES
from schedule.capture.effects.opaque import Constant
from schedule.capture.graph.escaped_containers import CONTAINER, READ
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.recording.recording import Call, Opaque
from schedule.capture.recording.structure import TensorSpec, leaves
from schedule.util.errors import TraceError

# -- Source code of a graph ---------------------------------------------------------------------------------


_UNQUOTED = {'"', "\\"}


def source_of(graph: fx.Graph) -> Any:
    """Return ``graph.python_code("self")``, correct for any module name and any power.

    FX writes ``self.body.class`` for a keyword and ``getattr(self, "…")`` for any other name that is not an identifier,
    without escaping quotes, backslashes and newlines. For such names the code is made from a copy with escaped names.
    For the power of a negative number, it writes ``-1 ** x``, which is ``-(1 ** x)``; in the copy it is ``pow(-1, x)``.
    """
    if any(_spelled(node) != node.target for node in graph.nodes):
        written = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            copies[node] = written.node_copy(node, copies.__getitem__)
            copies[node].target = _spelled(node)
        graph = written
    return graph.python_code("self")


def _spelled(node: fx.Node) -> Any:
    """Return the target to write, with special parts of a path escaped for FX's quotes."""
    if node.target is operator.pow and repr(node.args[0]).startswith("-"):
        return pow
    if node.op not in ("call_module", "get_attr"):
        return node.target
    parts = str(node.target).split(".")
    return ".".join(part if _is_plain(part) else "".join(f"\\U{ord(char):08x}" for char in part) for part in parts)


def _is_plain(part: str) -> bool:
    return part.isascii() and part.isprintable() and not keyword.iskeyword(part) and not _UNQUOTED & {*part}


def check_spelling(graph: fx.Graph) -> None:
    """Raise if a call cannot be written in Python source.

    Raises:
        TraceError: a call has a keyword such as ``**{"class": x}``, or is of a lambda in place of a function of
            torch.
    """
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "<lambda>":
            raise TraceError(
                "a function of torch was replaced by a lambda, which has no name to call it by",
                where=str(node.meta.get("source", "")),
                fix="replace it by a function with a name",
            )
        for name in node.kwargs:
            if keyword.iskeyword(name) or not name.isidentifier():
                raise TraceError(
                    f"a call is given a keyword argument {name!r}, which no Python code can spell",
                    where=str(node.meta.get("source", "")),
                    fix="rename the argument, or schedule the submodules one by one",
                )


# -- One graph for many like modules ------------------------------------------------------------------------


_HOOKS = {name for name in vars(nn.Module()) if name.startswith(("_", "training", "call_super_init"))}
_HOOKS.add("_schedule_state")  # a child stays a call, whatever it runs


def structural_key(module: nn.Module, call: Call, *context: Hashable) -> Hashable:
    """Return a key shared by modules with equivalent forwards on ``call``, ignoring plain attributes."""
    return (tuple(_described(module)), _call_key(call), context)


def _described(module: nn.Module) -> Iterator[Hashable]:
    for name, child in module.named_modules():
        tables = (child._parameters, child._buffers)
        tensors = tuple((key, _tensor_key(tensor)) for table in tables for key, tensor in table.items())
        others = tuple((key, _value_key(value)) for key, value in vars(child).items() if key not in _HOOKS)
        yield (name, type(child), tensors, others)


def _tensor_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, tensor.layout, strides, tensor.dtype, tensor.device


def _value_key(value: Any) -> Hashable:
    if is_atom(value):
        return "plain"
    if isinstance(value, types.MethodType):
        return id(value.__func__)
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, (list, tuple, dict, set)):
        return repr(value)
    return id(value)


def _call_key(call: Call) -> Hashable:
    return tuple((path, _leaf_key(leaf)) for path, leaf in leaves((call.args, call.kwargs, call.output)))


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, Opaque):
        return str(type(leaf.snapshot))
    return leaf if isinstance(leaf, Hashable) else id(leaf)


def comparable(value: Any) -> list[Any]:
    """Describe arguments for comparison: shapes and dtypes of tensors, plain values, classes of others."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, TensorSpec)):
            return (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Opaque):
            return type(leaf.snapshot)
        return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)

    return [(path, kind(leaf)) for path, leaf in leaves(value)]


def has_constants(specialization: Any) -> bool:
    """Check whether the graph contains an object of possibly one module only."""
    return any(isinstance(node.target, Constant) for node in specialization.graph.nodes)


# -- A graph as plain data, for pickling and copying --------------------------------------------------------


_SAVED_META = (
    "spec",
    "source",
    "opaque",
    "object",
    "module",
    QUIET,
    RULE,
    "draws",
    "raises",
    "changes",
    "writes",
    CONTAINER,
    READ,
    KIND,
    LENGTH,
    LATER,
    AGAIN,
    LAYER,
    SHARES,
)


class _Ref:
    """Reference to a node in packed arguments."""

    def __init__(self, name: str) -> None:
        self.name = name


def pack_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return each node as ``(op, name, target, args, kwargs, meta)``."""

    def reference(node: fx.Node) -> Any:
        return _Ref(node.name)

    return [
        (
            node.op,
            node.name,
            node.target,
            fx.node.map_arg(node.args, reference),
            fx.node.map_arg(node.kwargs, reference),
            {key: node.meta[key] for key in _SAVED_META if key in node.meta},
        )
        for node in graph.nodes
    ]


def unpack_graph(packed: list[tuple[Any, ...]]) -> fx.Graph:
    """Rebuild a graph from the result of :func:`pack_graph`."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def resolve(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Ref) else value

    for op, name, target, args, kwargs, meta in packed:
        args, kwargs = fx.node.map_aggregate(args, resolve), fx.node.map_aggregate(kwargs, resolve)
        nodes[name] = graph.create_node(op, target, args, kwargs, name=name)
        nodes[name].meta.update(meta)
    return graph
