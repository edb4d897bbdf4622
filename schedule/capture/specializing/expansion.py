"""Inlining of small leaf modules, so patterns of torch operations also match inside modules.

::

    before:  y = self.c_fc(x);  z = self.act(y)
    after:   y = torch.matmul(x, self.c_fc.weight) + self.c_fc.bias;  z = 0.5 * y * (1 + torch.tanh(…))

A Linear (and transformers' Conv1D) becomes a product without bias and an addition, on the same parameters; any other
module without children is replaced with the nodes of its forward. Node names do not depend on which calls are inlined.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

import fused
from fused.torch_internals.torch_modules import BatchNormBase, ConvolutionBase
from schedule.capture.effects.effects import has_effect
from schedule.capture.effects.later_reads import LATER, inlined_later
from schedule.capture.graph.signature import Parameters
from schedule.capture.guards.guard_set import GuardSet, module_state_guards
from schedule.capture.guards.own_forward import installed_forward, is_batch_norm, is_conv1d, is_projection
from schedule.capture.recording.hooks import is_hooked
from schedule.capture.recording.recording import Call, Recording
from schedule.capture.recording.structure import TensorSpec, map_structure
from schedule.capture.specializing.specialization import Inlined, Specialization, in_mode, original_class, specialize
from schedule.capture.tracing.graph_data import pack_graph, unpack_graph
from schedule.util.errors import TraceError

_LARGEST = 40
_CLOSED = (BatchNormBase, nn.Embedding, nn.EmbeddingBag, ConvolutionBase, nn.RNNBase)


@dataclass
class Expansion:
    """Copy of a graph with leaf modules inlined.

    Attributes:
        graph: the copy with the inlined nodes.
        origin: name of an inlined node → name of the call it came from.
        inlined: path of each inlined submodule → what its guard needs; for :meth:`Specialization.with_graph`.
        closed: paths of submodules that cannot be inlined.
    """

    graph: fx.Graph
    origin: dict[str, str] = field(default_factory=dict)
    inlined: dict[str, Inlined] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)


_full: weakref.WeakKeyDictionary[fx.Graph, list[Expansion]] = weakref.WeakKeyDictionary()


def expand(
    specialization: Specialization, module: nn.Module, recording: Recording, only: Collection[str] | None = None
) -> Expansion:
    """Return a copy of the graph of ``specialization`` with leaf modules inlined.

    Args:
        specialization: one traced forward of ``module``.
        module: the module it was traced from.
        recording: the run it was recorded in.
        only: names of the calls to inline; all that can be inlined if None (that copy is cached and shared: read only).
    """
    if only is not None:
        return _expanded(specialization, module, recording, only)
    known = _full.setdefault(specialization.graph, [])
    if known:
        opened = {path for path in _paths(specialization.graph) if _can_open(path, module, specialization)}
        with in_mode(module, specialization.training):
            for expansion in known:
                if _fits(expansion, specialization.graph, module, opened):
                    return expansion
    known.append(_expanded(specialization, module, recording, None))
    return known[-1]


def _paths(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_module"}


def _fits(expansion: Expansion, graph: fx.Graph, module: nn.Module, opened: Collection[str]) -> bool:
    """Check whether an expansion made for one module is valid for another with the same graph.

    Args:
        opened: paths of the submodules that can be inlined.
    """
    for path in _paths(graph):
        child, inlined = module.get_submodule(path), expansion.inlined.get(path)
        if inlined is None:
            without_bias = is_projection(child) and child.bias is None
            if path in opened and not without_bias and path not in expansion.closed:
                return False
            continue
        unlike = inlined.scheduled is (type(child) is original_class(child))
        if unlike or path not in opened or not inlined.guard_set.holds(child):
            return False
    return True


def _expanded(
    specialization: Specialization, module: nn.Module, recording: Recording, only: Collection[str] | None
) -> Expansion:
    expansion = Expansion(unpack_graph(pack_graph(specialization.graph)))
    for call in list(expansion.graph.nodes):
        wanted = call.op == "call_module" and (only is None or call.name in only)
        if wanted and _can_open(str(call.target), module, specialization):
            _open(expansion, call, module.get_submodule(str(call.target)), specialization, recording)
    return expansion


def _can_open(path: str, module: nn.Module, made: Specialization) -> bool:
    child = module.get_submodule(path)
    cls = original_class(child)
    is_norm = is_batch_norm(cls)
    is_shard = is_norm and getattr(installed_forward(child), "is_local", False)
    known = type(child) is cls or _own_graph(child, True) is not None or is_shard
    plain = known and not is_hooked(child) and "forward" not in vars(child)
    if not plain or child._modules or "__call__" in vars(type(child)):
        return False
    return _follows_mode(child, module, made) if is_norm else not issubclass(cls, _CLOSED)


def _follows_mode(child: nn.Module, module: nn.Module, made: Specialization) -> bool:
    """Check whether a batch norm can be part of a graph: it is not frozen, and updates its statistics once.

    A graph with checks may start again after the update.
    """
    return child.training is module.training and not (made.training and made.has_checks)


def _own_graph(child: nn.Module, training: bool) -> Specialization | None:
    """Return the graph of a scheduled child without any conditions (a sharded child, for example), or None."""
    state = vars(child).get("_schedule_state")
    for made in getattr(state, "specializations", ()):
        any_call = not made.signature.conditions and made.signature.others is None
        conditional = not any_call or made.guards or made.guard_set or made.inlined
        if made.training is training and not conditional and not made.has_checks:
            return made
    return None


def _open(
    expansion: Expansion, call: fx.Node, child: nn.Module, specialization: Specialization, recording: Recording
) -> None:
    path, graph = str(call.target), expansion.graph
    guard_set = GuardSet()
    own = _own_graph(child, specialization.training)
    result: fx.Node | None
    with graph.inserting_before(call):
        if own is not None:
            nodes, result = _inline(graph, call, child, own)
        elif is_projection(child):
            if child.bias is None:
                return
            nodes, result = _open_projection(graph, call, child)
            guard_set = module_state_guards(child)
        elif is_batch_norm(original_class(child)):
            nodes, result = _open_batch_norm(graph, call, child, specialization.training)
            guard_set = module_state_guards(child)
        else:
            inside = _inside(child, call, recording, specialization)
            if inside is None:
                expansion.closed.add(path)
                return
            guard_set = inside.guard_set
            nodes, result = _inline(graph, call, child, inside)
    if result is None:
        expansion.closed.add(path)
        return
    expansion.origin.update(dict.fromkeys((node.name for node in nodes), call.name))
    cls = original_class(child)
    expansion.inlined[path] = Inlined(cls, guard_set, scheduled=type(child) is not cls)
    call.replace_all_uses_with(result)
    graph.erase_node(call)


def _open_projection(graph: fx.Graph, call: fx.Node, child: Any) -> tuple[list[fx.Node], fx.Node]:
    source = call.args[0] if call.args else next(iter(call.kwargs.values()))
    weight = graph.create_node("get_attr", f"{call.target}.weight", name=f"{call.name}__weight")
    product_of = torch.matmul if is_conv1d(type(child)) else F.linear
    product = graph.create_node("call_function", product_of, (source, weight), name=f"{call.name}__product")
    bias = graph.create_node("get_attr", f"{call.target}.bias", name=f"{call.name}__bias")
    made = {weight: TensorSpec.of(child.weight), product: call.meta.get("spec"), bias: TensorSpec.of(child.bias)}
    result = call.meta.get("spec")
    if isinstance(result, TensorSpec) and result.dtype != child.bias.dtype:  # autocast casts the bias too
        bias = graph.create_node("call_method", "to", (bias, result.dtype), name=f"{call.name}__bias_narrowed")
        made[bias] = replace(TensorSpec.of(child.bias), dtype=result.dtype)
    total = graph.create_node("call_function", operator.add, (product, bias), name=f"{call.name}__add")
    made[total] = result
    for node, spec in made.items():
        node.meta.update(spec=spec, source=call.meta.get("source", ""), module=str(call.target))
    return list(made), total


def _open_batch_norm(graph: fx.Graph, call: fx.Node, child: Any, training: bool) -> tuple[list[fx.Node], fx.Node]:
    source = call.args[0] if call.args else next(iter(call.kwargs.values()))
    is_tracked = child.track_running_stats or not training
    made: list[fx.Node] = []

    def read(name: str, wanted: bool = True) -> fx.Node | None:
        tensor = getattr(child, name)
        if tensor is None or not wanted:
            return None
        made.append(graph.create_node("get_attr", f"{call.target}.{name}", name=f"{call.name}__{name}"))
        made[-1].meta["spec"] = TensorSpec.of(tensor)
        return made[-1]

    running = read("running_mean", is_tracked), read("running_var", is_tracked)
    parameters = read("weight"), read("bias")
    counter = read("num_batches_tracked", training and child.track_running_stats)
    of_batch = training or running == (None, None)
    momentum = 0.0 if child.momentum is None and counter is None else child.momentum
    options: dict[str, Any] = {} if counter is None else {"num_batches_tracked": counter}
    args = (source, *running, *parameters, of_batch, momentum, child.eps)
    result = graph.create_node("call_function", fused.batch_norm, args, options, name=f"{call.name}__norm")
    result.meta["spec"] = call.meta.get("spec")
    made.append(result)
    for node in made:
        node.meta.update(source=call.meta.get("source", ""), module=str(call.target))
    return made, result


def _inside(child: nn.Module, call: fx.Node, recording: Recording, caller: Specialization) -> Specialization | None:
    """Return the graph of ``child`` for this call, or None if it cannot be inlined."""
    described = map_structure((call.args, dict(call.kwargs)), _described)
    if any(part is _UNKNOWN for part in (*described[0], *described[1].values())):
        return None
    call_of_child = Call(described[0], described[1], None)
    try:
        inside = specialize(
            child, original_class(child).forward, call_of_child, recording, caller.training, autocast=caller.autocast
        )
    except TraceError:
        return None
    simple = not inside.guards and len(inside.graph.nodes) <= _LARGEST
    return inside if simple and not any(map(has_effect, inside.graph.nodes)) else None


_UNKNOWN = object()


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    spec = leaf.meta.get("spec")
    return spec if isinstance(spec, TensorSpec) else _UNKNOWN


def _inline(
    graph: fx.Graph, call: fx.Node, child: nn.Module, inside: Specialization
) -> tuple[list[fx.Node], fx.Node | None]:
    bound = Parameters(original_class(child).forward).bind(call.args, dict(call.kwargs))
    if any(text not in bound for text in inside.signature.inputs.values()):
        return [], None
    mapped: dict[fx.Node, Any] = {}
    made: list[fx.Node] = []
    for node in inside.graph.nodes:
        if node.op == "placeholder":
            mapped[node] = bound[inside.signature.inputs[str(node.target)]]
        elif node.op == "output":
            result = mapped.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
            if isinstance(result, fx.Node) and result not in made:
                made.append(graph.create_node("call_function", unchanged, (result,), name=f"{call.name}__unchanged"))
                made[-1].meta.update(call.meta, module=str(call.target))
                result = made[-1]
            if result is not None:
                return made, result
            for extra in reversed(made):
                graph.erase_node(extra)
            return [], None
        else:
            mapped[node] = _copy_inside(graph, call, node, mapped)
            made.append(mapped[node])
    return [], None


def unchanged(x: Any) -> Any:
    """Return the argument itself, as an inlined module does that is turned off, such as stochastic depth at 0."""
    return x


def _copy_inside(graph: fx.Graph, call: fx.Node, node: fx.Node, mapped: dict[fx.Node, Any]) -> fx.Node:
    target = f"{call.target}.{node.target}" if node.op in ("get_attr", "call_module") else node.target
    args = fx.node.map_arg(node.args, lambda n: mapped[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: mapped[n])
    copied = graph.create_node(node.op, target, args, kwargs, name=f"{call.name}__{node.name}")
    copied.meta.update(node.meta, module=str(call.target))
    if later := inlined_later(str(call.target), node, call):
        copied.meta[LATER] = later
    copied.meta["source"] = node.meta.get("source") or call.meta.get("source", "")  # lines inside torch are not helpful
    return copied
