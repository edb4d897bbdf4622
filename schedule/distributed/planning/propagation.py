"""Propagation of dimension factors through a graph, from its operations alone.

Each operation determines which dimensions of its operands and its result have the same factors. An operation that works
along a dimension (a softmax, a norm, a sort) blocks the factors of this dimension; an unknown operation blocks those of
all its dimensions. The dimensions over which a product sums are recorded. The features before and after a projection
have the factors of the two axes of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import fx, nn

from schedule.capture import TensorSpec, has_own_forward, original_class
from schedule.distributed.planning.dimension_rules import Shapes
from schedule.distributed.planning.factored_values import Dims, Layer, Propagated, Value
from schedule.distributed.planning.factors import Dim, block, equate, new_dim, size_of, take
from schedule.distributed.tensor_parallel.sharded_modules import BATCH_NORMS, CONVOLUTIONS, projection_of
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.patterns.optable import POOLS

CHANNEL_ROWS = ("weight", "bias", "running_mean", "running_var")
"""The tensors of a batch norm with one number for each channel."""
_POINTWISE_MODULES = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
_NOT_POINTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)


def propagate(
    graph: fx.Graph,
    root: nn.Module,
    apart: Collection[str] = (),
    free: Collection[str] = (),
    returned: bool = False,
    gathers: bool = False,
    averages: bool = False,
) -> Propagated:
    """Follow the factors of every dimension through ``graph``.

    Args:
        graph: a graph traced from ``root``.
        root: the module at which its paths begin.
        apart: paths of modules with collectives along the sequence: the leading dimensions of input and output are not
            equated.
        free: inputs that need not be replicated on every rank.
        returned: whether the outputs need not be replicated.
        gathers: whether attention gathers its keys and values along the sequence, and takes rows of its mask.
        averages: whether means of shards are averaged over the ranks.
    """
    run = _Propagation(root, apart, free, returned)
    run.gathers, run.averages = gathers, averages
    for node in normalize(graph, dict(root.named_modules(remove_duplicate=False))).nodes:
        run.visit(node)
    return run.found


class _Propagation(Shapes):
    """Products, reductions, norms and modules."""

    # -- along dimensions --------------------------------------------------------------------------------

    def along(self, node: OpNode) -> Value:
        """Propagate through softmax, sort, cumulative sum and the like, blocking only their dimension."""
        dim = node.args.get("dim", -1)
        return self.blocked(node, dim if isinstance(dim, tuple) else (dim,))

    def pooled(self, node: OpNode) -> Value:
        """Propagate through a pool, such as ``max_pool2d``, along the last dimensions."""
        return self.blocked(node, range(-int(node.op[-2]), 0))

    def blocked(self, node: OpNode, over: Iterable[Any]) -> Value:
        """Return the dimensions of a result with the same rank, with those in ``over`` blocked (all if unknown)."""
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not source:
            return self.unknown(node)
        for one in over:
            for each in source if not isinstance(one, int) else (source[one % len(source)],):
                block(each, f"{node.op} works along it")

        def like(one: Any) -> Value:
            if not isinstance(one, TensorSpec) or one.ndim != len(source):
                return self.fresh(one, f"comes out of {node.op}")
            return [d if size_of(d) == n else new_dim(n, node.op) for d, n in zip(source, one.shape, strict=True)]

        return tuple(map(like, spec)) if isinstance(spec, (tuple, list)) else like(spec)

    def reduced(self, node: OpNode) -> Value:
        source, dim, spec = self.of(node.args.get("input", node.args.get("0"))), node.args.get("dim"), node.spec
        values = isinstance(spec, (tuple, list)) and isinstance(spec[0], TensorSpec) and isinstance(dim, int)
        if source is None or not (isinstance(spec, TensorSpec) or values):
            return self.unknown(node)
        over = [int(one) % len(source) for one in (dim if isinstance(dim, tuple) else (dim,)) if isinstance(one, int)]
        over = over or list(range(len(source)))
        if node.op == "mean" and self.averages:
            self.found.averaged[node] = [source[at] for at in over]
        for at in over if node not in self.found.averaged else ():
            block(source[at], f"{node.op} works along it")
        keeps_dims = (spec if isinstance(spec, TensorSpec) else spec[0]).ndim == len(source)
        out = [[] if at in over else one for at, one in enumerate(source) if keeps_dims or at not in over]
        return tuple(out for _ in spec) if values else out

    def extreme(self, node: OpNode) -> Value:
        """Propagate through ``max`` and ``min``, along a dimension or of two tensors."""
        tensors = list(operands(node.args))
        if len(tensors) > 1 and isinstance(node.spec, TensorSpec):
            return self.broadcast(tensors, node.spec.shape)
        return self.reduced(node)

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
        """Propagate through a projection with a ``weight`` of shape [out, in]."""
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
        if node.fx is not None and node.fx.op == "call_module":
            self.found.contracted[node] = [weight[0]]
            self.layer(node, weight, lookup=True)
        else:
            block(weight[0], "rows are picked from it by position")
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
        """Propagate through ``torch._grouped_mm``.

        Each row of ``[tokens, in]`` is multiplied by the weight of its group in ``[groups, in, out]``.
        """
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
        for dim in () if self.gathers else (k[-2], v[-2]):
            block(dim, "attention works along it")
        for at in range(len(q) - 2):
            heads = take(q[at], size_of(k[at])) if node.args.get("enable_gqa") is True else (q[at], [])
            for other in (k, v):
                equate(q[at] if heads is None else heads[0], other[at])
        if mask is not None:
            for at, dim in enumerate(mask[:-2]):
                if dim:
                    equate(q[at + len(q) - len(mask)], dim)
            for rows, positions in zip(mask[-2:], (q[-2], k[-2]), strict=True) if self.gathers else ():
                if rows:
                    equate(positions, rows)
        return [*q[:-1], v[-1]]

    # -- modules -----------------------------------------------------------------------------------------

    def called(self, node: OpNode) -> Value:
        module, spec = node.module, node.spec
        path = str(node.args["target"])
        if path in self.apart and module is not None and projection_of(module) is None:
            self.found.layers.append(Layer(path, node, next(operands(node.args)), []))
            return self.fresh(spec, "")
        given = self.of(node.args.get("0", node.args.get("x", node.args.get("input"))))
        if module is None or given is None:
            return self.unknown(node)
        cls = original_class(module)
        projection = projection_of(module)
        if projection is not None:
            weight = self.tensor(f"{path}.weight")
            out = self.projected(node, given, weight if projection.transposed else weight[::-1])
            bias = self.own(path, "bias")
            if bias is not None:
                equate(out[-1], bias[0])
            return out
        if cls in CONVOLUTIONS:
            return self.convolved(node, given, self.own(path, "weight"), self.own(path, "bias"), module.groups)
        if cls in BATCH_NORMS:
            return self.by_channels(given, [self.own(path, name) for name in CHANNEL_ROWS])
        pointwise = cls.__module__ in _POINTWISE_MODULES and not isinstance(module, _NOT_POINTWISE)
        if pointwise and has_own_forward(cls) and isinstance(spec, TensorSpec) and not module._parameters:
            return given
        return self.unknown(node)

    def own(self, path: str, name: str) -> Dims | None:
        """Return the dimensions of a parameter or buffer of the module at ``path``, or None if it has none."""
        module = self.root.get_submodule(path)
        found = module._parameters.get(name, module._buffers.get(name))
        return None if found is None else self.tensor(f"{path}.{name}")

    def convolution(self, node: OpNode) -> Value:
        given, weight, bias = (self.of(node.args[name]) for name in ("input", "weight", "bias"))
        groups = node.args["groups"]
        return self.convolved(node, given, weight, bias, groups.spec if isinstance(groups, OpNode) else groups)

    def convolved(self, node: OpNode, given: Dims | None, weight: Dims | None, bias: Dims | None, groups: Any) -> Value:
        """Propagate through a convolution of ``[batch, in, …]`` or ``[in, …]`` with a weight [out, in / groups, …]."""
        spec, why = node.spec, "a convolution works along it"
        if given is None or weight is None or not isinstance(spec, TensorSpec) or not isinstance(groups, int):
            return self.unknown(node)
        at = len(given) - len(weight) + 1  # the channels
        parts = [take(dim, groups) for dim in (given[at], weight[0])]
        if None in parts:
            return self.unknown(node)
        for dim in (*given[at + 1 :], *weight[2:]):
            block(dim, why)
        if groups == 1:
            equate(given[at], weight[1])
            self.found.contracted[node] = [weight[1]]
        else:
            (ours, inner), (theirs, outer) = filter(None, parts)
            equate(ours, theirs)
            for dim in (inner, outer, weight[1]):
                block(dim, "inside a group of a convolution")
        self.layer(node, weight)
        if bias is not None:
            equate(weight[0], bias[0])
        return [*given[:at], weight[0], *(new_dim(size, why) for size in spec.shape[at + 1 :])]

    def batch_normed(self, node: OpNode) -> Value:
        given = self.of(node.args["input"])
        rows = [self.of(node.args[name]) for name in CHANNEL_ROWS]
        return self.unknown(node) if given is None else self.by_channels(given, rows)

    def by_channels(self, given: Dims, rows: Iterable[Dims | None]) -> Dims:
        """Equate the channels of ``[batch, channels, …]`` with the dimension of each row that there is."""
        for row in rows:
            if row is not None:
                equate(given[1], row[0])
        return given


def _factors_of_product(node: OpNode) -> tuple[Any, Any]:
    for names in (("batch1", "batch2"), ("mat1", "mat2"), ("input", "other"), ("input", "mat2")):
        if all(name in node.args for name in names):
            return node.args[names[0]], node.args[names[1]]
    return None, None


_HANDLERS: Mapping[str, Callable[[_Propagation, OpNode], Value]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _Propagation.view),
    **dict.fromkeys(("transpose", "permute", "t"), _Propagation.permute),
    **dict.fromkeys(("squeeze", "unsqueeze"), _Propagation.squeeze),
    **dict.fromkeys(("expand", "broadcast_to"), _Propagation.expand),
    **dict.fromkeys(("split", "chunk", "unbind"), _Propagation.pieces),
    **dict.fromkeys(("cat", "stack"), _Propagation.joined),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "topk", "normalize", "glu"), _Propagation.along),
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "var", "std", "argmax", "argmin"), _Propagation.reduced),
    **dict.fromkeys(("any", "all", "logsumexp", "norm", "linalg_vector_norm"), _Propagation.reduced),
    **dict.fromkeys(("max", "min"), _Propagation.extreme),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as"), _Propagation.expand_as),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _Propagation.complex),
    **dict.fromkeys(("gather", "index_select"), _Propagation.picked),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _Propagation.convolution),
    **dict.fromkeys(POOLS, _Propagation.pooled),
    "batch_norm": _Propagation.batch_normed,
    "repeat": _Propagation.repeat,
    "pad": _Propagation.padded,
    "copy_": _Propagation.written,
    "setitem": _Propagation.stored,
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


_Propagation.handlers = _HANDLERS
