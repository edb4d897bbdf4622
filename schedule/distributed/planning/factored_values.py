"""Values of a graph with the factors of their dimensions, and the general rules for operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from schedule.capture import TensorSpec, is_check
from schedule.distributed.planning.factors import Dim, block, equate, factors, new_dim, size_of
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.patterns.optable import ELEMENTWISE

Dims = list[Dim]
Value = Any  # Dims, a tuple of them, or None

_SAME = ("identity", "cast", "to", "contiguous", "detach", "clone", "type_as", "dropout", "tril", "triu", "bernoulli")
FACTORIES = "made whole on every rank"
CONSTANTS = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
"""What is made of one number, or of none: where its sizes follow the shared ones, so does its data."""


@dataclass
class Layer:
    """A projection, convolution or embedding called in a graph.

    Modules passed as ``apart`` are recorded as layers as well.

    Attributes:
        path: the path of the module.
        node: the call.
        given: the input.
        weight: the factors of the weight's axes; empty for other modules.
        lookup: whether it picks rows of its weight, as an embedding does.
    """

    path: str
    node: OpNode
    given: OpNode
    weight: Dims
    lookup: bool = False


@dataclass
class Propagated:
    """The result of propagation through one graph.

    Attributes:
        nodes: the operations of the graph, in order.
        dims: the factors of the dimensions of every tensor.
        tensors: path of each parameter and buffer → factors of its axes.
        layers: the projections, convolutions and embeddings called.
        contracted: operation → the dimensions over which it sums such that partial sums can be all-reduced.
        averaged: mean → the dimensions over which it is, if the means of shards may be averaged over the ranks.
    """

    nodes: list[OpNode] = field(default_factory=list)
    dims: dict[OpNode, Value] = field(default_factory=dict)
    tensors: dict[str, Dims] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    contracted: dict[OpNode, Dims] = field(default_factory=dict)
    averaged: dict[OpNode, Dims] = field(default_factory=dict)


class Values:
    """Visitor of the nodes of a graph, in order.

    Attributes:
        handlers: operation → the method that propagates through it.
        gathers: whether attention gathers its keys and values along the sequence, so that queries may be a part of it.
        averages: whether means of shards are averaged over the ranks, so that means may be over sharded dimensions.
    """

    handlers: ClassVar[Mapping[str, Callable[[Any, OpNode], Value]]] = {}
    gathers = False
    averages = False

    def __init__(self, root: nn.Module, apart: Collection[str], free: Collection[str], returned: bool) -> None:
        self.root, self.apart, self.free, self.returned = root, apart, free, returned
        self.found = Propagated()
        self._names = _first_names(root)

    # -- values ------------------------------------------------------------------------------------------

    def visit(self, node: OpNode) -> None:
        if is_check(node.target):  # computes nothing
            return
        self.found.nodes.append(node)
        if node.op == "output":
            for operand in operands(node.args) if not self.returned else ():
                self.block(operand, "the model returns it whole")
            return
        if node.op == "placeholder" and str(node.target) in self.free:
            self.found.dims[node] = self.fresh(node.spec, "")
            return
        if node.op == "get_attr":
            self.found.dims[node] = self.attribute(node) if isinstance(node.spec, TensorSpec) else None
            return
        if node.is_metadata or node.op == "placeholder":
            self.found.dims[node] = self.fresh(node.spec, "an input of the model is whole on every rank")
            return
        self.found.dims[node] = self.called(node) if node.op == "call_module" else self.computed(node)

    def fresh(self, spec: Any, why: str) -> Value:
        if isinstance(spec, TensorSpec):
            return [new_dim(size, why) for size in spec.shape]
        if isinstance(spec, (tuple, list)):
            return tuple(self.fresh(one, why) for one in spec)
        return None

    def attribute(self, node: OpNode) -> Value:
        """Return the dimensions of a tensor attribute.

        Those of a plain attribute are whole on every rank. They come from the recorded run, since the module may have
        another value now: a table that it caches for later calls is None before the first.
        """
        path = str(node.target)
        return self.tensor(path) if path in self._names else self.fresh(node.spec, FACTORIES)

    def tensor(self, path: str) -> Dims:
        """Return the dimensions of a parameter or buffer, the same under all of its names."""
        path = self._names.get(path, path)
        if path not in self.found.tensors:
            owner, _, name = path.rpartition(".")
            module = self.root.get_submodule(owner)
            registered = module._parameters.get(name, module._buffers.get(name))
            value = getattr(module, name) if registered is None else registered
            why = "" if registered is not None else FACTORIES
            self.found.tensors[path] = [new_dim(size, why) for size in value.shape]
        return self.found.tensors[path]

    def of(self, value: Any) -> Dims | None:
        """Return the dimensions of an operand, or None unless it is a single tensor."""
        found = self.found.dims.get(value) if isinstance(value, OpNode) else None
        if found is None and isinstance(value, OpNode) and value.attr is not None:
            found = self.found.dims[value] = self.tensor(value.attr.path)
        return found if isinstance(found, list) else None

    def block(self, value: Any, why: str) -> None:
        def each(found: Value) -> None:
            for one in found if isinstance(found, tuple) else ():
                each(one)
            for dim in found if isinstance(found, list) else ():
                block(dim, why)

        for operand in operands(value):
            self.of(operand)
            each(self.found.dims.get(operand))

    def unknown(self, node: OpNode) -> Value:
        why = f"{node.op.rpartition('.')[2]} is not known to keep dimensions apart"
        self.block(node.args, why)
        return self.fresh(node.spec, why)

    # -- operations --------------------------------------------------------------------------------------

    def computed(self, node: OpNode) -> Value:
        spec = node.spec
        if node.op.rpartition(".")[2] in CONSTANTS:
            return self.fresh(spec, "")
        if not any(self.of(operand) or self.found.dims.get(operand) for operand in operands(node.args)):
            return self.fresh(spec, FACTORIES)
        handler = self.handlers.get(node.op.rpartition(".")[2])
        if handler is not None:
            result: Value = handler(self, node)
            return result
        if node.op in _SAME:
            return self.of(node.args.get("input")) or self.unknown(node)
        if _is_pointwise(node) and isinstance(spec, TensorSpec):
            return self.broadcast([operand for operand in operands(node.args)], spec.shape)
        if isinstance(node.target, str) and not isinstance(spec, TensorSpec):
            return self.of_object(node)
        if node.op in ("zeros_like", "ones_like", "rand_like", "randn_like", "empty_like"):
            return self.fresh(spec, FACTORIES)
        return self.unknown(node)

    def broadcast(self, values: Sequence[Any], shape: Sequence[int]) -> Dims:
        out: Dims = [[] for _ in shape]
        for value in values:
            dims = self.of(value)
            for at, dim in enumerate(dims or ()):
                axis = len(shape) - len(dims or ()) + at
                if axis < 0 or not dim:
                    continue
                if out[axis]:
                    equate(out[axis], dim)
                else:
                    out[axis] = dim
        return self.sized(out, shape)

    def sized(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Return ``dims`` with a new blocked dimension in place of each one of another size than in ``shape``."""
        pairs = zip(dims, shape, strict=True)
        return [dim if size_of(dim) == size else new_dim(size, FACTORIES) for dim, size in pairs]

    def of_object(self, node: OpNode) -> Value:
        """Propagate through a method of an object, such as a cache.

        The results have the dimensions of the operands, in order.
        """
        given = [self.of(operand) for operand in operands(node.args)]
        tensors = [dims for dims in given if dims is not None]
        specs = node.spec if isinstance(node.spec, (tuple, list)) else (node.spec,)
        results = []
        for dims, spec in zip(tensors, specs, strict=False):
            if not isinstance(spec, TensorSpec) or spec.ndim != len(dims):
                return self.unknown(node)
            results.append(self.sized(dims, spec.shape))
        if len(results) != len(specs):
            return self.unknown(node)
        return tuple(results) if isinstance(node.spec, (tuple, list)) else results[0]

    def called(self, node: OpNode) -> Value:
        """Propagate through a module call."""
        return self.unknown(node)


def nbytes(spec: Any) -> int:
    """Return the bytes of a tensor, or 0 for other values."""
    return spec.nbytes if isinstance(spec, TensorSpec) else 0


def pick(dim: Dim) -> None:
    """Mark the factors of ``dim`` as picked from by position, and block them."""
    for factor in factors(dim):
        factor.picked = True
        factor.blocked = factor.blocked or "picked from by position"


def _is_pointwise(node: OpNode) -> bool:
    """Check whether an operation is pointwise, by name or by ``torch.Tag.pointwise``."""
    name = node.op.rpartition(".")[2].strip("_")
    if name in ("div", "add", "sub", "mul", "pow", "where", "masked_fill", "lerp", "floor_divide", "gelu", "softplus"):
        return True
    if name in ELEMENTWISE:
        return True
    for candidate in (name, {"and": "bitwise_and", "or": "bitwise_or", "iadd": "add"}.get(name, name)):
        packet = getattr(torch.ops.aten, candidate, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            return any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return False


def _first_names(root: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to its first name, the same for tied ones."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = f"{path}.{name}" if path else name
                names[full] = first.setdefault(id(tensor), full)
    return names
