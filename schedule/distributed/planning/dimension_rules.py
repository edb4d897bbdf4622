"""Operations to reorder, split, merge or index dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedule.capture import TensorSpec
from schedule.distributed.planning.factored_values import FACTORIES, Dims, Value, Values, pick
from schedule.distributed.planning.factors import Dim, block, equate, lead, new_dim, size_of, take
from schedule.patterns.normalized_nodes import OpNode, operands


class Shapes(Values):
    """Propagation through views, indexing, splitting and joining."""

    def view(self, node: OpNode) -> Value:
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        return self.viewed(node, source, spec)

    def viewed(self, node: OpNode, source: Dims, spec: TensorSpec) -> Value:
        """Return the dimensions of a view or reshape: the same elements in the same order."""
        rest: Dim = [factor for dim in source for factor in dim]
        out: Dims = []
        for size in spec.shape:
            taken = take(rest, size)
            if taken is None:
                return self.unknown(node)
            out.append(taken[0])
            rest = taken[1]
        return out

    def complex(self, node: OpNode) -> Value:
        """Propagate through ``view_as_complex`` and ``view_as_real``, with pairs along a last dimension of size 2."""
        source = self.of(next(operands(node.args), None))
        if source is None:
            return self.unknown(node)
        if node.op.rpartition(".")[2] == "view_as_real":
            return [*source, new_dim(2, "real and imaginary parts")]
        block(source[-1], "real and imaginary parts")
        return source[:-1]

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
        """Propagate through ``squeeze`` and ``unsqueeze``.

        Dimensions of size 1 have no factors; the others keep their order.
        """
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        remaining = [dim for dim in source if dim]
        return [remaining.pop(0) if size > 1 else [] for size in spec.shape]

    def expand(self, node: OpNode) -> Value:
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        out = [new_dim(size, repeated=True) for size in spec.shape[: spec.ndim - len(source)]]
        for dim, size in zip(source, spec.shape[spec.ndim - len(source) :], strict=True):
            out.append(dim if dim else new_dim(size, repeated=True))
        return out

    def expand_as(self, node: OpNode) -> Value:
        """Propagate through ``expand_as``, ``view_as`` and ``reshape_as``.

        The last two take only the sizes of the other tensor, not its factors.
        """
        arguments = list(operands(node.args))
        source, like, spec = self.of(arguments[0]), self.of(arguments[-1]), node.spec
        if source is None or like is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        if node.op.rpartition(".")[2] != "expand_as":
            return self.viewed(node, source, spec)
        return self.broadcast(arguments, spec.shape)

    def repeat(self, node: OpNode) -> Value:
        """Propagate through ``repeat``, with a new blocked outer factor for each repeated dimension."""
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        out: Dims = [[] for _ in range(spec.ndim - len(source))] + list(source)
        times = [size // max(size_of(dim), 1) for dim, size in zip(out, spec.shape, strict=True)]
        return [[*new_dim(n, "repeated", repeated=True), *dim] for dim, n in zip(out, times, strict=True)]

    def padded(self, node: OpNode) -> Value:
        source, spec = self.of(node.args["input"]), node.spec
        if source is None or not isinstance(spec, TensorSpec) or spec.ndim != len(source):
            return self.unknown(node)
        for dim, size in zip(source, spec.shape, strict=True):
            if size_of(dim) != size:
                block(dim, "padded")
        pairs = zip(source, spec.shape, strict=True)
        return [dim if size_of(dim) == size else new_dim(size, "padded") for dim, size in pairs]

    def picked(self, node: OpNode) -> Value:
        """Propagate through ``gather`` and ``index_select``, blocking the indexed dimension."""
        source, index, dim = self.of(node.args["input"]), self.of(node.args["index"]), node.args.get("dim")
        spec = node.spec
        if source is None or index is None or not isinstance(dim, int) or not isinstance(spec, TensorSpec):
            return self.unknown(node)
        at = dim % len(source)
        block(source[at], "picked from by position")
        if node.op == "index_select":
            return [*source[:at], index[0], *source[at + 1 :]]
        for i, (one, other) in enumerate(zip(source, index, strict=True)):
            if i != at and size_of(one) == size_of(other):
                equate(one, other)
        return index

    def written(self, node: OpNode) -> Value:
        """Propagate through ``copy_``, with the same dimensions in source and target."""
        target, source = (self.of(one) for one in list(operands(node.args))[:2])
        if target is None or source is None:
            return self.unknown(node)
        for one, other in zip(target[::-1], source[::-1], strict=False):
            if one and other:
                equate(one, other)
        return target

    def repeat_interleave(self, node: OpNode) -> Value:
        source, spec, dim = self.of(node.args["input"]), node.spec, node.args.get("dim")
        if source is None or not isinstance(spec, TensorSpec) or not isinstance(dim, int):
            return self.unknown(node)
        at, out = dim % len(source), list(source)
        times = spec.shape[at] // max(size_of(source[at]), 1)
        out[at] = [*source[at], *new_dim(times, "repeated", repeated=True)]
        return out if size_of(out[at]) == spec.shape[at] else self.unknown(node)

    def pieces(self, node: OpNode) -> Value:
        """Propagate through ``split``, ``chunk`` and ``unbind``.

        Equal pieces have the same inner factors; pieces of different sizes block the dimension.
        """
        source = self.of(node.args.get("tensor", node.args.get("input")))
        specs, dim = node.spec, node.args.get("dim", 0)
        if source is None or not isinstance(specs, (tuple, list)) or not isinstance(dim, int):
            return self.unknown(node)
        at = dim % len(source)
        if node.op == "unbind":
            pick(source[at])
            return tuple(source[:at] + source[at + 1 :] for _ in specs)
        inner = self.piece(source[at], [spec.shape[at] for spec in specs])
        if inner is not None:
            return tuple([*source[:at], inner, *source[at + 1 :]] for _ in specs)
        block(source[at], "split into pieces of different sizes")
        first = lead(source[at], specs[0].shape[at])
        fresh = [first, *(new_dim(spec.shape[at], "a piece of a dimension") for spec in specs[1:])]
        return tuple([*source[:at], one, *source[at + 1 :]] for one in fresh)

    def piece(self, dim: Dim, sizes: Sequence[int]) -> Dim | None:
        """Return the inner factors of a dimension split into equal pieces, or None if it cannot be split."""
        taken = take(dim, len(sizes)) if len(set(sizes)) == 1 and sum(sizes) == size_of(dim) else None
        if taken is None:
            return None
        pick(taken[0])
        return taken[1]

    def item(self, node: OpNode) -> Value:
        source, index = node.args["input"], node.args["index"]
        found = self.found.dims.get(source) if isinstance(source, OpNode) else None
        if isinstance(found, tuple):
            return found[index] if isinstance(index, int) and -len(found) <= index < len(found) else None
        dims, spec = self.of(source), node.spec
        if dims is None or not isinstance(spec, TensorSpec):
            return self.unknown(node) if dims is not None else self.fresh(spec, FACTORIES)
        indices = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(one, OpNode) and isinstance(one.spec, TensorSpec) for one in indices):
            return self.gathered(node, dims, indices, spec)
        return self.taken(dims, indices, spec)

    def taken(self, dims: Dims, indices: list[Any], spec: TensorSpec) -> Dims:
        """Return the dimensions after indexing with numbers and slices."""
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
            elif isinstance(one, (list, tuple)):
                block(rest.pop(0), "picked from by position")
                out.append(new_dim(len(one), "picked by position"))
            else:
                block(rest.pop(0), "picked from by position")
        return [*out, *rest]

    def stored(self, node: OpNode) -> Value:
        """Propagate through ``x[index] = value`` for a value with the rank of ``x[index]``."""
        target, value, index = self.of(node.args["input"]), node.args.get("value"), node.args["index"]
        given, indices = self.of(value), list(index) if isinstance(index, tuple) else [index]
        plain = not any(isinstance(one, OpNode) and isinstance(one.spec, TensorSpec) for one in indices)
        left = 0 if target is None else len(target) - sum(isinstance(one, int) for one in indices)
        if target is None or given is None or not plain or len(given) != left or not isinstance(value, OpNode):
            return self.unknown(node)
        for one, other in zip(self.taken(target, indices, value.spec), given, strict=True):
            equate(one, other)
        return target

    def sliced(self, dim: Dim, size: int, index: slice) -> Dim:
        whole = size_of(dim)
        if size == whole:
            return dim
        start, step = index.start or 0, index.step or 1
        if isinstance(start, int) and isinstance(step, int) and size > 1 and whole % size == 0:
            if step == 1 and start % size == 0:
                taken = take(dim, whole // size)
                if taken is not None:
                    pick(taken[0])
                    return taken[1]
            taken = take(dim, size) if step == whole // size else None
            if taken is not None:
                pick(taken[1])
                return taken[0]
        block(dim, "picked from by position")
        first = not start and step == 1 and size > 1
        return lead(dim, size) if first else new_dim(size, "a piece of a dimension")

    def gathered(self, node: OpNode, dims: Dims, indices: list[Any], spec: TensorSpec) -> Value:
        """Propagate through ``x[index]`` with a single index tensor, picking along dimension 0."""
        first = self.of(indices[0])
        if len(indices) == 1 and first is not None and spec.ndim == len(first) + len(dims) - 1 and spec.ndim:
            block(dims[0], "picked from by position")
            return [*first, *dims[1:]]
        return self.unknown(node)

    def joined(self, node: OpNode) -> Value:
        """Propagate through ``cat`` and ``stack``."""
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
