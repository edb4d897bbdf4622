"""Which factors the dimensions of every value of a graph have, by the operations alone.

Each operation says which dimensions of its operands and its result are the same. What an operation sums over, or
does along a dimension (a softmax, a norm, a sort), and what is not known, blocks the factors there. A projection's
weight gives the features before and after it the factors of its two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from schedule.distributed.factors import Dim, block, equate, factors, new_dim, size_of, take
from schedule.distributed.modules import BATCH_NORMS, CONVOLUTIONS, projection_of
from schedule.patterns.normalise import normalise
from schedule.patterns.values import OpNode, operands
from schedule.tracing.specialisation import original_class
from schedule.tracing.specs import TensorSpec

Dims = list[Dim]
Value = Any  # Dims, a tuple of them, or None

_POINTWISE_MODULES = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
_NOT_POINTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)
_SAME = ("identity", "cast", "to", "contiguous", "detach", "clone", "type_as", "dropout", "tril", "triu", "bernoulli")
_FACTORIES = "made whole on every rank"
CONSTANTS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
"""What is made of one number: where its sizes follow the shared ones, so does its data."""


@dataclass
class Layer:
    """A projection, convolution or embedding that a graph calls.

    Attributes:
        path: the module.
        node: the call.
        given: what it reads.
        weight: factors of the weight's axes.
        lookup: it picks rows of its weight.
    """

    path: str
    node: OpNode
    given: OpNode
    weight: Dims
    lookup: bool = False


@dataclass
class Propagated:
    """What was found in one graph.

    Attributes:
        nodes: its operations, in order.
        dims: the factors of every tensor.
        tensors: path of each parameter and buffer → factors of its axes.
        layers: the projections, convolutions and embeddings called.
        contracted: an operation → dimensions it sums over in a way that partial sums could be added up.
    """

    nodes: list[OpNode] = field(default_factory=list)
    dims: dict[OpNode, Value] = field(default_factory=dict)
    tensors: dict[str, Dims] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    contracted: dict[OpNode, Dims] = field(default_factory=dict)


def propagate(
    graph: fx.Graph, root: nn.Module, apart: Collection[str] = (), free: Collection[str] = (), returned: bool = False
) -> Propagated:
    """Follow the factors of every dimension through ``graph``.

    Args:
        graph: traced from ``root``.
        root: where its paths begin.
        apart: projections whose rows after are other rows than those before: they are gathered or shared out.
        free: inputs that need not be whole on every rank.
        returned: whether what is returned need not be whole.
    """
    run = _Propagation(root, apart, free, returned)
    for node in normalise(graph, dict(root.named_modules())).nodes:
        run.visit(node)
    return run.found


class _Propagation:
    def __init__(self, root: nn.Module, apart: Collection[str], free: Collection[str], returned: bool) -> None:
        self.root, self.apart, self.free, self.returned = root, apart, free, returned
        self.found = Propagated()
        self._names = _first_names(root)

    # -- values ------------------------------------------------------------------------------------------

    def visit(self, node: OpNode) -> None:
        self.found.nodes.append(node)
        if node.op == "output":
            for operand in operands(node.args) if not self.returned else ():
                self.block(operand, "the model returns it whole")
            return
        if node.op == "placeholder" and str(node.target) in self.free:
            self.found.dims[node] = self.fresh(node.spec, "")
            return
        if node.op == "get_attr":
            self.found.dims[node] = self.tensor(str(node.target)) if isinstance(node.spec, TensorSpec) else None
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

    def tensor(self, path: str) -> Dims:
        """The axes of a parameter or buffer, the same under all of its names."""
        path = self._names.get(path, path)
        if path not in self.found.tensors:
            owner, _, name = path.rpartition(".")
            module = self.root.get_submodule(owner)
            held = module._parameters.get(name, module._buffers.get(name))
            value = getattr(module, name) if held is None else held
            why = "" if held is not None else _FACTORIES
            self.found.tensors[path] = [new_dim(size, why) for size in value.shape]
        return self.found.tensors[path]

    def of(self, value: Any) -> Dims | None:
        """The dimensions of an operand that is a tensor."""
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
        if not any(self.of(operand) or self.found.dims.get(operand) for operand in operands(node.args)):
            return self.fresh(spec, "" if node.op.rpartition(".")[2] in CONSTANTS else _FACTORIES)
        handler = _HANDLERS.get(node.op.rpartition(".")[2])
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
            return self.fresh(spec, _FACTORIES)
        return self.unknown(node)

    def broadcast(self, values: Sequence[Any], shape: Sequence[int]) -> Dims:
        out: Dims = [[] for _ in shape]
        for value in values:
            dims = self.of(value)
            for at, dim in enumerate(dims or ()):
                place = len(shape) - len(dims or ()) + at
                if place < 0 or not dim:
                    continue
                if out[place]:
                    equate(out[place], dim)
                else:
                    out[place] = dim
        return self.sized(out, shape)

    def sized(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """``dims`` where they are of these sizes, others where not."""
        pairs = zip(dims, shape, strict=True)
        return [dim if size_of(dim) == size else new_dim(size, _FACTORIES) for dim, size in pairs]

    def of_object(self, node: OpNode) -> Value:
        """A method of an object, such as a cache: what comes back follows what goes in, in order."""
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

    # -- shapes ------------------------------------------------------------------------------------------

    def view(self, node: OpNode) -> Value:
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        rest: Dim = [factor for dim in source for factor in dim]
        out: Dims = []
        for size in spec.shape:
            taken = take(rest, size)
            if taken is None:
                return self.unknown(node)
            out.append(taken[0])
            rest = taken[1]
        return out

    def permute(self, node: OpNode) -> Value:
        source = self.of(node.args["input"])
        if source is None:
            return self.unknown(node)
        rank = len(source)
        if node.op == "t":
            return source[::-1]
        if node.op == "permute":
            order = [int(dim) % rank for dim in node.args["dims"]]
            return [source[dim] for dim in order]
        one, other = int(node.args["dim0"]) % rank, int(node.args["dim1"]) % rank
        out = list(source)
        out[one], out[other] = out[other], out[one]
        return out

    def squeeze(self, node: OpNode) -> Value:
        """Dimensions of one have no factors: what is left keeps its order."""
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        kept = [dim for dim in source if dim]
        return [kept.pop(0) if size > 1 else [] for size in spec.shape]

    def expand(self, node: OpNode) -> Value:
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        out = [new_dim(size, "repeated", repeated=True) for size in spec.shape[: spec.ndim - len(source)]]
        for dim, size in zip(source, spec.shape[spec.ndim - len(source) :], strict=True):
            out.append(dim if dim else new_dim(size, "repeated", repeated=True))
        return out

    def repeat_interleave(self, node: OpNode) -> Value:
        source, spec, dim = self.of(node.args["input"]), node.spec, node.args.get("dim")
        if source is None or not isinstance(spec, TensorSpec) or not isinstance(dim, int):
            return self.unknown(node)
        at, out = dim % len(source), list(source)
        times = spec.shape[at] // max(size_of(source[at]), 1)
        out[at] = [*source[at], *new_dim(times, "repeated", repeated=True)]
        return out if size_of(out[at]) == spec.shape[at] else self.unknown(node)

    def pieces(self, node: OpNode) -> Value:
        """``split``, ``chunk`` and ``unbind``: equal pieces share the inner factors."""
        source = self.of(node.args.get("tensor", node.args.get("input")))
        specs, dim = node.spec, node.args.get("dim", 0)
        if source is None or not isinstance(specs, (tuple, list)) or not isinstance(dim, int):
            return self.unknown(node)
        at = dim % len(source)
        if node.op == "unbind":
            _pick(source[at])
            return tuple(source[:at] + source[at + 1 :] for _ in specs)
        inner = self.piece(source[at], [spec.shape[at] for spec in specs])
        if inner is not None:
            return tuple([*source[:at], inner, *source[at + 1 :]] for _ in specs)
        block(source[at], "split into pieces of different sizes")
        fresh = [new_dim(spec.shape[at], "a piece of a dimension") for spec in specs]
        return tuple([*source[:at], one, *source[at + 1 :]] for one in fresh)

    def piece(self, dim: Dim, sizes: Sequence[int]) -> Dim | None:
        """The inner factors of a dimension that is cut into equal pieces."""
        taken = take(dim, len(sizes)) if len(set(sizes)) == 1 and sum(sizes) == size_of(dim) else None
        if taken is None:
            return None
        _pick(taken[0])
        return taken[1]

    def item(self, node: OpNode) -> Value:
        source, index = node.args["input"], node.args["index"]
        found = self.found.dims.get(source) if isinstance(source, OpNode) else None
        if isinstance(found, tuple):
            return found[index] if isinstance(index, int) and -len(found) <= index < len(found) else None
        dims, spec = self.of(source), node.spec
        if dims is None or not isinstance(spec, TensorSpec):
            return self.unknown(node) if dims is not None else self.fresh(spec, _FACTORIES)
        indices = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(one, OpNode) and isinstance(one.spec, TensorSpec) for one in indices):
            return self.gathered(node, dims, indices, spec)
        if Ellipsis in indices:
            at = indices.index(Ellipsis)
            used = sum(1 for one in indices if one is not None and one is not Ellipsis)
            indices[at : at + 1] = [slice(None)] * (len(dims) - used)
        rest, out = list(dims), list[Dim]()
        for one in indices:
            if one is None:
                out.append([])
            elif isinstance(one, slice):
                out.append(self.sliced(rest.pop(0), spec.shape[len(out)], one))
            else:
                block(rest.pop(0), "picked from by position")
        return [*out, *rest]

    def sliced(self, dim: Dim, size: int, index: slice) -> Dim:
        whole = size_of(dim)
        if size == whole:
            return dim
        start, step = index.start or 0, index.step or 1
        if isinstance(start, int) and isinstance(step, int) and size > 1 and whole % size == 0:
            if step == 1 and start % size == 0:
                taken = take(dim, whole // size)
                if taken is not None:
                    _pick(taken[0])
                    return taken[1]
            taken = take(dim, size) if step == whole // size else None
            if taken is not None:
                _pick(taken[1])
                return taken[0]
        block(dim, "picked from by position")
        return new_dim(size, "a piece of a dimension")

    def gathered(self, node: OpNode, dims: Dims, indices: list[Any], spec: TensorSpec) -> Value:
        """``x[index]`` with one tensor, in front: rows."""
        first = self.of(indices[0])
        if len(indices) == 1 and first is not None and spec.ndim == len(first) + len(dims) - 1 and spec.ndim:
            block(dims[0], "picked from by position")
            return [*first, *dims[1:]]
        return self.unknown(node)

    def joined(self, node: OpNode) -> Value:
        """``cat`` and ``stack``."""
        parts, spec, dim = node.args["tensors"], node.spec, node.args.get("dim", 0)
        dims = [self.of(part) for part in operands(parts)]
        if not isinstance(spec, TensorSpec) or not isinstance(dim, int) or any(one is None for one in dims):
            return self.unknown(node)
        known = [one for one in dims if one is not None]
        at = dim % spec.ndim
        if node.op == "stack":
            out = self.broadcast(list(operands(parts)), [n for i, n in enumerate(spec.shape) if i != at])
            return [*out[:at], new_dim(spec.shape[at], "stacked"), *out[at:]]
        for one in known:
            block(one[at], "joined with others")
            for i, other in enumerate(known[0]):
                if i != at:
                    equate(one[i], other)
        return [dim if i != at else new_dim(spec.shape[at], "joined") for i, dim in enumerate(known[0])]

    # -- along dimensions --------------------------------------------------------------------------------

    def along(self, node: OpNode) -> Value:
        """Softmax, sort, cumulative sum, …: the dimension is blocked, the others go on."""
        source, dim, spec = self.of(node.args["input"]), node.args.get("dim", -1), node.spec
        if source is None or not source:
            return self.unknown(node)
        for one in dim if isinstance(dim, tuple) else (dim,):
            for each in source if not isinstance(one, int) else (source[one % len(source)],):
                block(each, f"{node.op} works along it")

        def like(one: Any) -> Value:
            if not isinstance(one, TensorSpec) or one.ndim != len(source):
                return self.fresh(one, f"comes out of {node.op}")
            return [d if size_of(d) == n else new_dim(n, node.op) for d, n in zip(source, one.shape, strict=True)]

        return tuple(map(like, spec)) if isinstance(spec, (tuple, list)) else like(spec)

    def reduced(self, node: OpNode) -> Value:
        source, dim, spec = self.of(node.args["input"]), node.args.get("dim"), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.along(node) if source is not None and isinstance(dim, int) else self.unknown(node)
        over = [int(one) % len(source) for one in (dim if isinstance(dim, tuple) else (dim,)) if isinstance(one, int)]
        over = over or list(range(len(source)))
        for at in over:
            block(source[at], f"{node.op} works along it")
        if spec.ndim == len(source):
            return [[] if at in over else one for at, one in enumerate(source)]
        return [one for at, one in enumerate(source) if at not in over]

    def normed(self, node: OpNode) -> Value:
        source, shape = self.of(node.args["input"]), node.args["normalized_shape"]
        if source is None:
            return self.unknown(node)
        count = len(shape) if isinstance(shape, (tuple, list)) else 1
        for dim in source[len(source) - count :]:
            block(dim, f"{node.op} works along it")
        self.block([node.args.get("weight"), node.args.get("bias")], f"{node.op} works along it")
        return source

    # -- products ----------------------------------------------------------------------------------------

    def linear(self, node: OpNode) -> Value:
        given, weight = self.of(node.args["input"]), self.of(node.args["weight"])
        if given is None or weight is None or len(weight) != 2:
            return self.unknown(node)
        return self.projected(node, given, weight)

    def projected(self, node: OpNode, given: Dims, weight: Dims) -> Dims:
        """``weight`` is [out, in]."""
        equate(given[-1], weight[1])
        self.found.contracted[node] = [weight[1]]
        self.layer(node, weight)
        if node.fx is not None and str(node.fx.target) in self.apart and isinstance(node.spec, TensorSpec):
            return [*(new_dim(size) for size in node.spec.shape[:-1]), weight[0]]
        return [*given[:-1], weight[0]]

    def layer(self, node: OpNode, weight: Dims, lookup: bool = False) -> None:
        if node.fx is not None and node.fx.op == "call_module":
            given = node.args.get("input", node.args.get("0"))
            if isinstance(given, OpNode):
                self.found.layers.append(Layer(str(node.fx.target), node, given, weight, lookup))

    def looked_up(self, node: OpNode) -> Value:
        ids, weight = self.of(node.args["input"]), self.of(node.args["weight"])
        if ids is None or weight is None:
            return self.unknown(node)
        self.found.contracted[node] = [weight[0]]
        self.layer(node, weight, lookup=True)
        return [*ids, weight[1]]

    def product(self, node: OpNode) -> Value:
        one, other = _factors_of_product(node)
        a, b, spec = self.of(one), self.of(other), node.spec
        if a is None or b is None or len(a) < 2 or len(b) < 2 or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        equate(a[-1], b[-2])
        self.found.contracted[node] = [a[-1]]
        leading = [a[:-2], b[:-2]]
        rank = max(map(len, leading))
        out: Dims = []
        for at in range(rank):
            pair = [dims[at - rank + len(dims)] for dims in leading if at - rank + len(dims) >= 0]
            full = [dim for dim in pair if dim]
            if len(full) == 2:
                equate(full[0], full[1])
            out.append(full[0] if full else [])
        out += [a[-2], b[-1]]
        if node.op in ("baddbmm", "addmm"):
            self.found.dims[node] = out
            return self.broadcast([node, node.args["input"]], spec.shape)
        return out

    def grouped_product(self, node: OpNode) -> Value:
        """``torch._grouped_mm``: rows of ``[tokens, in]`` by the weight of their group, ``[groups, in, out]``."""
        arguments = list(operands(node.args))
        a, b = (self.of(one) for one in arguments[:2])
        if a is None or b is None or len(a) != 2 or len(b) != 3:
            return self.unknown(node)
        block(b[0], "each group of tokens has one of them")
        equate(a[1], b[1])
        self.found.contracted[node] = [a[1]]
        return [a[0], b[2]]

    def einsum(self, node: OpNode) -> Value:
        equation, tensors = node.args["equation"], list(operands(node.args["operands"]))
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return self.unknown(node)
        before, _, after = equation.replace(" ", "").partition("->")
        letters: dict[str, Dim] = {}
        for names, tensor in zip(before.split(","), tensors, strict=False):
            for name, dim in zip(names, self.of(tensor) or (), strict=False):
                if name in letters:
                    equate(letters[name], dim)
                letters[name] = dim
        self.found.contracted[node] = [dim for name, dim in letters.items() if name not in after]
        return [letters.get(name, []) for name in after]

    def attention(self, node: OpNode) -> Value:
        q, k, v, mask = (self.of(node.args.get(name)) for name in ("query", "key", "value", "attn_mask"))
        if q is None or k is None or v is None:
            return self.unknown(node)
        for dim in (q[-1], k[-1]):
            block(dim, "attention sums over it")
        for dim in (k[-2], v[-2]):
            block(dim, "attention works along it")
        for at in range(len(q) - 2):
            heads = take(q[at], size_of(k[at])) if node.args.get("enable_gqa") is True else (q[at], [])
            for other in (k, v):
                equate(q[at] if heads is None else heads[0], other[at])
        if mask is not None:
            for at, dim in enumerate(mask[:-2]):
                if dim:
                    equate(q[at + len(q) - len(mask)], dim)
        return [*q[:-1], v[-1]]

    # -- modules -----------------------------------------------------------------------------------------

    def called(self, node: OpNode) -> Value:
        module, spec = node.module, node.spec
        given = self.of(node.args.get("0", node.args.get("x", node.args.get("input"))))
        if module is None or given is None:
            return self.unknown(node)
        cls, path = original_class(module), str(node.args["target"])
        if projection_of(module) is not None:
            weight = self.tensor(f"{path}.weight")
            out = self.projected(node, given, weight if cls is nn.Linear else weight[::-1])
            self.beside(path, "bias", out[-1])
            return out
        if cls in CONVOLUTIONS and isinstance(spec, TensorSpec):
            return self.convolved(node, path, module, given, spec)
        if cls in BATCH_NORMS:
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.beside(path, name, given[1])
            return given
        pointwise = cls.__module__ in _POINTWISE_MODULES and not isinstance(module, _NOT_POINTWISE)
        if pointwise and isinstance(spec, TensorSpec) and not module._parameters:
            return given
        return self.unknown(node)

    def beside(self, path: str, name: str, dim: Dim) -> None:
        """A vector of parameters along ``dim``."""
        module = self.root.get_submodule(path)
        if module._parameters.get(name) is not None or module._buffers.get(name) is not None:
            equate(dim, self.tensor(f"{path}.{name}")[0])

    def convolved(self, node: OpNode, path: str, module: Any, given: Dims, spec: TensorSpec) -> Value:
        weight = self.tensor(f"{path}.weight")
        for dim in (*given[2:], *weight[2:]):
            block(dim, "a convolution works along it")
        if module.groups == 1:
            equate(given[1], weight[1])
            self.found.contracted[node] = [weight[1]]
        else:
            ours, theirs = take(given[1], module.groups), take(weight[0], module.groups)
            if ours is None or theirs is None:
                return self.unknown(node)
            equate(ours[0], theirs[0])
            for dim in (ours[1], theirs[1], weight[1]):
                block(dim, "inside a group of a convolution")
        self.layer(node, weight)
        self.beside(path, "bias", weight[0])
        return [given[0], weight[0], *(new_dim(n, "a convolution works along it") for n in spec.shape[2:])]


def _pick(dim: Dim) -> None:
    for factor in factors(dim):
        factor.picked = True
        factor.blocked = factor.blocked or "picked from by position"


def _factors_of_product(node: OpNode) -> tuple[Any, Any]:
    for names in (("batch1", "batch2"), ("mat1", "mat2"), ("input", "other"), ("input", "mat2")):
        if all(name in node.args for name in names):
            return node.args[names[0]], node.args[names[1]]
    return None, None


def _is_pointwise(node: OpNode) -> bool:
    """Whether each element of the result comes from the elements in its place; torch's own tag says so."""
    name = node.op.rpartition(".")[2].strip("_")
    if name in ("div", "add", "sub", "mul", "pow", "where", "masked_fill", "lerp", "floor_divide", "gelu", "softplus"):
        return True
    for candidate in (name, {"and": "bitwise_and", "or": "bitwise_or", "iadd": "add"}.get(name, name)):
        packet = getattr(torch.ops.aten, candidate, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            return any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return False


def _first_names(root: nn.Module) -> dict[str, str]:
    """Every name of a tied parameter → its first one."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = f"{path}.{name}" if path else name
                names[full] = first.setdefault(id(tensor), full)
    return names


_HANDLERS: Mapping[str, Callable[[_Propagation, OpNode], Value]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _Propagation.view),
    **dict.fromkeys(("transpose", "permute", "t"), _Propagation.permute),
    **dict.fromkeys(("squeeze", "unsqueeze"), _Propagation.squeeze),
    **dict.fromkeys(("expand", "broadcast_to"), _Propagation.expand),
    **dict.fromkeys(("split", "chunk", "unbind"), _Propagation.pieces),
    **dict.fromkeys(("cat", "stack"), _Propagation.joined),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "topk", "normalize", "glu"), _Propagation.along),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "var", "std", "argmax", "argmin"), _Propagation.reduced),
    **dict.fromkeys(("any", "all", "logsumexp", "norm"), _Propagation.reduced),
    **dict.fromkeys(("layer_norm", "rms_norm"), _Propagation.normed),
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm", "addmm"), _Propagation.product),
    "repeat_interleave": _Propagation.repeat_interleave,
    "getitem": _Propagation.item,
    "linear": _Propagation.linear,
    "embedding": _Propagation.looked_up,
    "einsum": _Propagation.einsum,
    "scaled_dot_product_attention": _Propagation.attention,
    "_grouped_mm": _Propagation.grouped_product,
}

