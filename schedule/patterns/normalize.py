"""Normalization of fx graphs: every call becomes its canonical operation with its arguments by name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import mutates
from schedule.patterns.normalized_nodes import Attr, NormalGraph, OpNode, map_operands
from schedule.patterns.ops import DEFINITIONS, CannotBind, arguments_of, find_form, operation_of, qualified_name
from schedule.patterns.side_effects import is_plain_module

_CACHE = "_schedule_normal_graph"
_SETITEM = (operator.setitem, "__setitem__", "setitem")
_TRANSPOSED = {"mT": (-2, -1), "T": None, "H": None}


def normalize(graph: fx.Graph, modules: Mapping[str, nn.Module] | None = None) -> NormalGraph:
    """Return the normalized form of ``graph``, built once and cached on the graph until it changes.

    Args:
        graph: any fx graph.
        modules: path → module of the ``call_module`` nodes; plain ``torch.nn`` modules become the operation
            they compute, anything else (other classes, hooked modules, paths not given) stays a ``call_module``.
    """
    holder = graph.__dict__.get(_CACHE)
    if holder is not None and holder.fresh(graph, modules):
        return holder.value
    builder = Builder(modules or {})
    value = builder.build(graph)
    graph.__dict__[_CACHE] = _Holder(value, graph, modules)
    return value


class _Holder:
    """Cache of a NormalGraph on its fx graph.

    It detects when it is out of date, and is dropped by pickling and copying.
    """

    def __init__(
        self,
        value: NormalGraph | None = None,
        graph: fx.Graph | None = None,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.value = value
        self.seen = [] if graph is None else [(n, n.target, n.args, n.kwargs) for n in graph.nodes]
        self.called = [(str(n.target), _identity(n, modules)) for n, *_ in self.seen if n.op == "call_module"]

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()

    def fresh(self, graph: fx.Graph, modules: Mapping[str, nn.Module] | None) -> bool:
        """Check whether the graph and the called modules are unchanged."""
        if self.value is None or len(self.seen) != len(graph.nodes):
            return False
        for now, (node, target, args, kwargs) in zip(graph.nodes, self.seen, strict=True):
            if now is not node or now.target is not target or now.args is not args or now.kwargs is not kwargs:
                return False
        return all(_state((modules or {}).get(path)) == state for path, state in self.called)


def _identity(node: fx.Node, modules: Mapping[str, nn.Module] | None) -> tuple[Any, ...]:
    return _state((modules or {}).get(str(node.target)))


def _state(module: nn.Module | None) -> tuple[Any, ...]:
    return (id(module), is_plain_module(module), getattr(module, "training", None))


class Builder:
    """Builder of a NormalGraph from one fx graph."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.result = NormalGraph()
        self.attributes: dict[str, OpNode] = {}

    def build(self, graph: fx.Graph) -> NormalGraph:
        of = self.result.of
        for node in graph.nodes:
            op = node.op
            if op == "call_function" or op == "call_method":
                value = self.call(node, op)
            elif op == "call_module":
                value = self.call_module(node)
                self.result.calls.append(value)
            else:
                args = {"value": map_operands(node.args[0], of.__getitem__)} if op == "output" else {}
                value = self.new(op, args, node)
                value.target = node.target
                if op == "get_attr":
                    value.args = {"target": node.target}
            of[node] = self.passed_on(node, value)
        self.result.connect()
        return self.result

    def passed_on(self, node: fx.Node, value: OpNode) -> OpNode:
        """Return the argument's OpNode in place of the ``value`` of a node that only passes it on."""
        source = value.args.get("input") if value.op == "identity" else None
        if not isinstance(source, OpNode):
            return value
        self.result.passed.add(node)
        return source

    def new(self, op: str, args: Mapping[str, Any], node: fx.Node | None) -> OpNode:
        target = node.target if node is not None else None
        return self.result.add(OpNode(op, args, node, definition=DEFINITIONS.get(op), target=target))

    def call(self, node: fx.Node, kind: str) -> OpNode:
        target: Any = node.target
        get = self.result.of.__getitem__
        args = [get(a) if type(a) is fx.Node else map_operands(a, get) for a in node.args]
        kwargs = {k: map_operands(v, get) for k, v in node.kwargs.items()} if node.kwargs else {}
        form = find_form(kind, target)
        if form is not None:
            try:
                bound, in_place = form.bind(args, kwargs)
            except CannotBind:
                return self.special(node, target, args, kwargs)
            special = _CANONICAL.get(form.definition.name)
            name = form.definition.name
            if special is not None:
                name, bound = special(bound)
            if name == "linear":
                return self.linear(node, bound)
            value = self.new(name, bound, node)
            value.mutates = in_place
            return value
        return self.special(node, target, args, kwargs)

    def special(self, node: fx.Node, target: Any, args: list[Any], kwargs: dict[str, Any]) -> OpNode:
        """Normalize a call without a row: ``size()``, ``type(dtype)``, setitem, and unknown calls."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name == "size" and len(args) == 1 and not kwargs:
            return self.new("shape", {"input": args[0]}, node)
        if name == "type" and len(args) == 2:
            return self.new("cast", _filled("cast", input=args[0], dtype=args[1]), node)
        if target in _SETITEM:
            value = self.new("setitem", dict(zip(("input", "index", "value"), args, strict=False)), node)
            value.mutates = True
            return value
        value = self.new(qualified_name(target), self.by_signature(target, args, kwargs), node)
        value.mutates = mutates(node)
        return value

    def by_signature(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if inspect.isfunction(target):
            try:
                bound = inspect.signature(target).bind(*args, **kwargs)
            except (TypeError, ValueError):  # ValueError: its ``__wrapped__`` is a built-in function
                return {str(i): a for i, a in enumerate(args)} | kwargs
            bound.apply_defaults()
            return dict(bound.arguments)
        return {str(i): a for i, a in enumerate(args)} | kwargs

    def linear(self, node: fx.Node, bound: dict[str, Any]) -> OpNode:
        """Normalize ``F.linear`` with a bias to a product and a sum.

        A pattern may then match the sum alone.
        """
        bias = bound.get("bias")
        product = self.new("linear", {**bound, "bias": None}, node)
        if bias is None:
            return product
        total = self.new("add", {"input": product, "other": bias, "alpha": 1}, node)
        self.result.parts[node] = [product, total]
        return total

    def call_module(self, node: fx.Node) -> OpNode:
        path = str(node.target)
        module = self.modules.get(path)
        get = self.result.of.__getitem__
        given = {str(i): map_operands(a, get) for i, a in enumerate(node.args)}
        given |= {k: map_operands(v, get) for k, v in node.kwargs.items()}
        if not is_plain_module(module) or len(given) != 1:
            value = self.new("call_module", {"target": path, **given}, node)
            value.module = module
            return value
        name = str(operation_of(type(module)))
        first = next(iter(DEFINITIONS[name].params))
        bound = {first: next(iter(given.values()))}
        for key, value in (arguments_of(module) or {}).items():
            bound[key] = self.attribute(f"{path}.{value.path}", value) if isinstance(value, Attr) else value
        in_place = bool(bound.pop("inplace", False))
        result = self.linear(node, bound) if name == "linear" else self.new(name, _filled(name, **bound), node)
        result.module, result.mutates = module, in_place
        return result

    def attribute(self, path: str, attr: Attr) -> OpNode:
        """Return the OpNode of the parameter at ``path``, without a node in the fx graph."""
        if path not in self.attributes:
            node = self.new("get_attr", {"target": path}, None)
            node.target, node.attr = path, Attr(path, attr.value)
            self.attributes[path] = node
        return self.attributes[path]


def _filled(name: str, **bound: Any) -> dict[str, Any]:
    """Return ``bound`` in canonical order with the defaults of ``name``."""
    definition = DEFINITIONS[name]
    result = {key: bound.pop(key, default) for key, default in definition.params.items()}
    return definition.spell_out({**result, **bound})


def _canonical_to(bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Normalize ``x.to(dtype)`` to a cast, and ``x.to`` with a device or another tensor to a move."""
    first, dtype = bound["device"], bound["dtype"]
    if _is_dtype(first):
        if isinstance(dtype, bool):  # x.to(dtype, non_blocking, copy)
            bound = {**bound, "non_blocking": dtype, "copy": bound["non_blocking"]}
        first, dtype = None, first
    if first is None and dtype is not None:
        given = {k: v for k, v in bound.items() if k not in ("device", "dtype")}
        return "cast", {"input": given.pop("input"), "dtype": dtype, **given}
    return "to", {**bound, "device": first, "dtype": dtype}


def _is_dtype(value: Any) -> bool:
    if isinstance(value, OpNode):
        if value.op == "scalar" or (value.op == "getattr" and value.args.get("name") == "dtype"):
            return True
        return isinstance(value.spec, torch.dtype)
    return isinstance(value, torch.dtype)


def _canonical_getattr(bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = bound["name"]
    if name in ("shape", "ndim"):
        return name, {"input": bound["input"]}
    if name == "mT":
        return "transpose", {"input": bound["input"], "dim0": -2, "dim1": -1}
    return ("t" if name == "T" else "getattr"), ({"input": bound["input"]} if name == "T" else bound)


def _canonical_getitem(bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    source, index = bound["input"], bound["index"]
    if isinstance(source, OpNode) and source.op == "shape" and isinstance(index, int):
        return "size", {"input": source.args["input"], "dim": index}
    return "getitem", bound


def _canonical_pool(name: str) -> Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]:
    def with_stride(bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Write the stride that is the size of the window, as torch's modules do."""
        stride = bound["stride"]
        return name, {**bound, "stride": bound["kernel_size"] if stride in (None, ()) else stride}

    return with_stride


def _canonical_view(bound: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    size = bound["size"]
    if _is_dtype(size) and not (isinstance(size, OpNode) and size.op == "scalar"):
        return "view_dtype", {"input": bound["input"], "dtype": size}
    return "view", bound


_CANONICAL = {
    "to": _canonical_to,
    "getattr": _canonical_getattr,
    "getitem": _canonical_getitem,
    "view": _canonical_view,
    **{name: _canonical_pool(name) for kind in ("avg", "max") for name in (f"{kind}_pool{n}d" for n in (1, 2, 3))},
}
