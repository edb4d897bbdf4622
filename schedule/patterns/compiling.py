"""Compilation of a pattern to a :class:`Pattern`: its normalized graph and the tables of the matcher."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx, nn

from fused.torch_internals.schemas import takes_no_tensor
from schedule.patterns.language import Tracer, call_module, mark_choice, mark_input, mark_module, mark_scalar, recording
from schedule.patterns.normalize import Builder
from schedule.patterns.normalized_nodes import OpNode, map_operands, operands
from schedule.patterns.pattern_nodes import MISSING, CallNode, ChoiceNode, InputNode, ScalarNode, Which
from schedule.util.errors import MatchError


@dataclass(frozen=True, eq=False)
class Pattern:
    """A compiled pattern.

    Attributes:
        name: the function's name unless another was given.
        inputs: names of the inputs, in the order of the parameters.
        scalars: names of the constants.
        digraph: the normalized ``networkx.DiGraph``.
        outputs: the OpNodes returned.
        required: the operations every match has, in topological order.
        size: the number of operations, those in choices included.
    """

    name: str
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    digraph: nx.DiGraph
    outputs: tuple[OpNode, ...]
    required: tuple[OpNode, ...]
    input_nodes: tuple[InputNode, ...]
    scalar_nodes: tuple[ScalarNode, ...]
    choice_nodes: tuple[ChoiceNode, ...]
    size: int
    users: dict[OpNode, list[OpNode]]

    def __repr__(self) -> str:
        return f"Pattern({self.name}({', '.join(self.inputs)}))"


class _PatternBuilder(Builder):
    """Builder for traced patterns, with marks turned back into pattern nodes."""

    def __init__(self, tracer: Tracer, root: nn.Module | None) -> None:
        modules = dict(root.named_modules(remove_duplicate=False)) if root is not None else {}
        super().__init__({**modules, **tracer.foreign})
        self.tracer = tracer
        self.ordered: dict[str, InputNode] = {}

    def add(self, node: Any, origin: fx.Node | None) -> Any:
        if node.index < 0:
            node.target = origin.name if origin is not None else None
            self.result.add(node)
        return node

    def call(self, node: fx.Node, kind: str) -> OpNode:
        target: Any = node.target
        of = self.result.of.__getitem__
        if target is mark_scalar:
            return self.add(self.tracer.scalars[str(node.args[0])], node)
        if target is mark_input:
            return self.input(str(node.args[0]), MISSING)
        if target is mark_choice:
            name, is_optional, alternatives = node.args
            values = map_operands(alternatives, of)
            return self.add(ChoiceNode(str(name), bool(is_optional), values), node)
        if target is mark_module:
            given = {str(i): map_operands(a, of) for i, a in enumerate(node.args[1:])}
            given |= {k: map_operands(v, of) for k, v in node.kwargs.items()}
            return self.add(CallNode(self.tracer.modules_called[int(node.args[0])], given), node)  # type: ignore
        return super().call(node, kind)

    def new(self, op: str, args: Any, node: fx.Node | None) -> OpNode:
        if op == "placeholder" and node is not None:
            return self.input(str(node.target), node.args[0] if node.args else MISSING)
        if op == "get_attr":
            return self.input(str(node.target) if node is not None else args["target"], MISSING)
        if op == "call_module" and node is not None:
            module = self.modules.get(str(node.target))
            what = type(module) if module is not None else str(node.target)
            return self.add(CallNode(what, {k: v for k, v in args.items() if k != "target"}), node)
        value = super().new(op, args, node)
        value.fx = None  # a pattern's nodes have neither sizes nor sources
        return value

    def linear(self, node: fx.Node, bound: dict[str, Any]) -> OpNode:
        """Normalize ``F.linear`` and make a bias with the default None optional.

        ``choices["bias"]`` records whether it is present.
        """
        total = super().linear(node, bound)
        bias = bound.get("bias")
        if isinstance(bias, InputNode) and bias.default is None:
            total.fx = None
            name = self.tracer.choice_name("bias")
            return self.add(ChoiceNode(name, True, (total, total.args["input"])), None)
        return total

    def input(self, name: str, default: Any) -> InputNode:
        node = self.tracer.input(name)
        if default is not MISSING:
            node.default = default
        self.ordered.setdefault(name, node)
        return self.add(node, None)


def compile_pattern(obj: Any, name: str | None = None) -> Pattern:
    """Compile ``obj`` to a :class:`Pattern`.

    Args:
        obj: a function, an ``nn.Module``, ``call_module(...)``, a regular expression for a module path, a module
            type, or a Pattern.
        name: its name in reports.

    Raises:
        MatchError: it cannot be recorded, returns a value it does not compute, or has unconnected parts.
    """
    if isinstance(obj, Pattern):
        return obj
    if isinstance(obj, (str, call_module)) or (isinstance(obj, type) and issubclass(obj, nn.Module)):
        return _module_pattern(obj.what if isinstance(obj, call_module) else obj, name or "")
    label = name or str(getattr(obj, "__name__", type(obj).__name__))
    if not callable(obj):
        raise MatchError(f"{obj!r} is not a pattern", fix="give a function, a module, a path or a module type")
    tracer = Tracer()
    try:
        with recording(tracer):
            graph = tracer.trace(obj)
    except (fx.proxy.TraceError, TypeError) as error:
        raise MatchError(
            f"the pattern {label} cannot be recorded: {error}",
            fix="a pattern has no branches on values; use any_of, optional and scalar",
        ) from error
    builder = _PatternBuilder(tracer, obj if isinstance(obj, nn.Module) else None)
    return _assemble(label, builder, builder.build(graph).nodes[-1].args["value"])


def _module_pattern(what: Which, name: str) -> Pattern:
    if isinstance(what, str):
        try:
            re.compile(what)
        except re.error as error:
            raise MatchError(
                f"{what!r} is not a regular expression for the path of a module: {error}",
                fix='such as "attn", or "fc[12]"',
            ) from error
    node = CallNode(what, {}, any_arguments=True)
    builder = _PatternBuilder(Tracer(), None)
    builder.add(node, None)
    label = str(getattr(what, "__name__", what))
    return _assemble(name or f"call_module({label})", builder, node)


def _assemble(name: str, builder: _PatternBuilder, returned: Any) -> Pattern:
    outputs = tuple(operands(returned))
    if not outputs or any(o.op in ("input", "scalar") for o in outputs):
        raise MatchError(f"the pattern {name} returns something it does not compute", fix="return computed values")
    graph = builder.result
    if not graph.digraph:
        graph.connect()
    live = set(outputs).union(*(nx.ancestors(graph.digraph, o) for o in outputs))
    digraph = graph.digraph.subgraph(live).copy()
    if not nx.is_weakly_connected(digraph):
        raise MatchError(f"the parts of the pattern {name} share no value", fix="make it several patterns")
    for node in builder.ordered.values():
        node.is_setting = node.is_free and _only_settings(node, graph.users_of(node))
    order = sorted(live, key=lambda node: node.index)
    kinds = {kind: tuple(n for n in order if isinstance(n, kind)) for kind in (InputNode, ScalarNode, ChoiceNode)}
    operations = [n for n in order if n.op not in ("input", "scalar", "choice")]
    return Pattern(
        name=name,
        inputs=tuple(builder.ordered),
        scalars=tuple(n.name for n in kinds[ScalarNode]),
        digraph=digraph,
        outputs=outputs,
        required=_required(outputs),
        input_nodes=tuple(builder.ordered.values()),
        scalar_nodes=kinds[ScalarNode],  # type: ignore[arg-type]
        choice_nodes=kinds[ChoiceNode],  # type: ignore[arg-type]
        size=len(operations),
        users={node: [u for u in graph.users_of(node) if u in live] for node in order},
    )


def _only_settings(node: InputNode, users: list[OpNode]) -> bool:
    """Check whether the operations use ``node`` only where torch takes no tensor."""
    slots = [(user, name) for user in users for name, value in user.args.items() if node in operands(value)]
    return bool(slots) and all(user.definition and takes_no_tensor(user.op, name) for user, name in slots)


def _required(outputs: tuple[OpNode, ...]) -> tuple[OpNode, ...]:
    """Return the operations and choices present in every match, in topological order.

    Reads of metadata are left out: a graph may contain a dtype as a constant where the pattern reads it.
    """
    found: set[OpNode] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        reads = node.definition is not None and node.definition.metadata
        if node in found or reads or node.op in ("input", "scalar"):
            continue
        found.add(node)
        if not isinstance(node, ChoiceNode):
            stack.extend(operands(tuple(node.args.values())))
    return tuple(sorted(found, key=lambda node: node.index))
