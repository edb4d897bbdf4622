"""Propagation of a sharded output through its caller: sizes in attributes, heads, packed parts.

GPT-2's attention calls ``self.c_attn(x).split(self.split_size, dim=2)``: once ``c_attn`` returns half of its
outputs, ``split_size`` has to be half of its former value. The caller's graph, traced before any module was
sharded, is followed from the sharded output on. If an attribute of the caller is a size of the sharded dimension,
it is divided by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.distributed.tensor_parallel.cuts import (
    WHOLE_HEADS,
    Cut,
    Cuts,
    Sizes,
    arguments,
    group_of,
    operation_name,
    rank_of,
    sizes_of,
)
from schedule.distributed.tensor_parallel.sharded_modules import CHANNEL, ROW, features_dim, projection_of, role_of
from schedule.distributed.tensor_parallel.size_settings import Derived, Setting


def follow(
    graph: fx.Graph,
    caller: nn.Module,
    columns: Mapping[str, int],
    ranks: int,
    replicas: Mapping[str, int] | None = None,
    common: Mapping[str, int] | None = None,
    every: bool = False,
) -> dict[str, tuple[int, int]]:
    """Return the attributes of ``caller`` with sizes of a sharded dimension: name → (whole, on one rank).

    Args:
        graph: from :func:`whole_forward`.
        caller: the calling module.
        columns: path of each child with sharded outputs → number of packed parts.
        ranks: number of ranks.
        replicas: path of each child with the same outputs on several ranks → number of these ranks.
        common: path of each child with last outputs replicated on every rank → number of these outputs.
        every: whether these are all sharded children, so that all other values are whole.

    Raises:
        ShardError: the sharded dimension is normalized, summed, indexed by position, or not divisible.
    """
    cuts = {
        path: Cut(0, n, (replicas or {}).get(path, 1), common=(common or {}).get(path, 0))
        for path, n in columns.items()
    }
    following = _Following(caller, cuts, ranks, every)
    for node in graph.nodes:
        following.visit(node)
    following.settle()
    return following.settings


class _Following(Sizes):
    """Propagation of cuts through the nodes in order."""

    def visit(self, node: fx.Node) -> None:
        if node.op == "call_module":
            cut = self.through_module(node)
        elif node.op in ("call_function", "call_method"):
            cut = self.through_call(node)
        else:
            return
        if cut is not None:
            self.cuts[node] = cut

    # -- modules -----------------------------------------------------------------------------------------

    def through_module(self, node: fx.Node) -> Cuts:
        spec, child = node.meta.get("spec"), self.caller.get_submodule(str(node.target))
        channels = rank_of(node) + features_dim(child)
        if str(node.target) in self.columns and isinstance(spec, TensorSpec):
            return replace(self.columns[str(node.target)], dim=channels)
        source = self.source(node)
        if source is None or role_of(child, "weight", 1) == ROW or projection_of(child) is not None:
            return None  # it takes the shared features as a row-parallel module, sharded next
        if role_of(child, "weight", 0) == CHANNEL and source.dim == channels:
            return source  # a grouped convolution may have more outputs than inputs
        shape = child.normalized_shape if isinstance(child, (nn.LayerNorm, nn.RMSNorm)) else ()
        if source.dim >= rank_of(node) - len(shape):
            raise self.refuse(node, "a norm over shared features", "shard the modules after the norm instead")
        return self.elementwise(node)

    # -- functions and methods ---------------------------------------------------------------------------

    def through_call(self, node: fx.Node) -> Cuts:
        name, source = operation_name(node), node.args[0] if node.args else None
        if name in _CONSTANTS:
            sizes = node.args[1] if name.startswith("new_") else source
            self.of_sizes(node, sizes if isinstance(sizes, (tuple, list)) else ())
            return None
        cut = self.cuts.get(source) if isinstance(source, fx.Node) else None
        if name in ("expand", "broadcast_to") and cut is None:
            self.of_sizes(node, sizes_of(node))
            return None
        if name == "getitem" and isinstance(source, fx.Node):
            return self.item(node, source, cut)
        if isinstance(cut, Cut) and name in _HANDLERS:
            if cut.common and name not in _BESIDE:
                raise self.refuse(node, f"{name} of shared features beside whole ones", WHOLE_HEADS)
            result: Cuts = (_BESIDE if cut.common else _HANDLERS)[name](self, node, source, cut)
            return result
        if name in ("matmul", "bmm", "baddbmm"):
            return self.product(node)
        return self.elementwise(node)

    def of_sizes(self, node: fx.Node, sizes: Sequence[Any]) -> None:
        """Record the sizes of a newly created tensor read from attributes of the module."""
        self.made[node] = {at - len(sizes): one for at, one in enumerate(sizes) if isinstance(one, Setting)}

    def source(self, node: fx.Node) -> Cut | None:
        """Return the first cut among the operands, without tuples of cuts."""
        found = (self.cuts.get(operand) for operand in node.all_input_nodes)
        return next((cut for cut in found if isinstance(cut, Cut)), None)

    def elementwise(self, node: fx.Node) -> Cuts:
        """Return the cut of a result aligned with an operand from the right, as in broadcasting."""
        spec = node.meta.get("spec")
        if isinstance(spec, (tuple, list)):
            return tuple(self._same_dim(node, one) for one in spec)
        return self._same_dim(node, spec)

    def _same_dim(self, node: fx.Node, spec: Any) -> Cut | None:
        if not isinstance(spec, TensorSpec):
            return None
        for operand in node.all_input_nodes:
            self.made.setdefault(node, {}).update(self.made.get(operand, {}))
        for operand in node.all_input_nodes:
            cut, own = self.cuts.get(operand), operand.meta.get("spec")
            if isinstance(cut, Cut) and isinstance(own, TensorSpec):
                dim = cut.dim + spec.ndim - own.ndim
                if dim >= 0 and spec.shape[dim] == own.shape[cut.dim]:
                    setting = self.made[node].get(dim - spec.ndim)
                    if setting is not None and int(setting) == spec.shape[dim]:
                        self.divide(node, setting, self.ranks // cut.replicas)
                    return replace(cut, dim=dim)
        return None

    def item(self, node: fx.Node, source: fx.Node, cut: Cuts) -> Cuts:
        index = node.args[1]
        if isinstance(cut, tuple):
            return cut[index] if isinstance(index, int) and -len(cut) <= index < len(cut) else None
        if cut is None:
            return None
        rank, indices = rank_of(source), list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in indices:
            at = indices.index(Ellipsis)
            used = sum(1 for one in indices if one is not None and one is not Ellipsis)
            indices[at : at + 1] = [slice(None)] * (rank - used)
        dim = made = 0
        for one in indices:
            if one is None:
                made += 1
                continue
            if dim == cut.dim:
                if one == slice(None):
                    return replace(cut, dim=made)
                if cut.common:
                    return self.taken(node, replace(cut, dim=made), one, source.meta["spec"].shape[dim])
                raise self.refuse(node, "picks from shared features by position", "leave these features whole")
            dim, made = dim + 1, made + (not isinstance(one, int))
        return replace(cut, dim=made + cut.dim - dim)

    def taken(self, node: fx.Node, cut: Cut, index: Any, size: int) -> Cuts:
        """Return the cut after indexing a dimension of ``size`` with replicated elements at its end.

        The index takes either all sharded elements or, counted from the end, only replicated ones (no cut).
        """
        start, stop = (index.start, index.stop) if isinstance(index, slice) else (None, None)
        if isinstance(index, slice) and not start and index.step in (None, 1):
            if stop == -cut.common:
                return replace(cut, common=0)
            if isinstance(stop, Derived) and stop == size - cut.common:
                self.expect(node, stop, replace(cut, common=0))
                return replace(cut, common=0)
        behind = [start] if isinstance(index, slice) else list(index) if isinstance(index, (list, tuple)) else [index]
        if all(isinstance(one, int) and -cut.common <= one < 0 for one in behind):
            return None
        raise self.refuse(node, "picks from shared features by position", "leave these features whole")

    def pieces(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        """Return the cuts of a ``split`` into the sharded features and the replicated ones after them."""
        given = arguments(node)
        dim, sizes, specs = given["dim"], given["split_size_or_sections"], node.meta.get("spec")
        if not isinstance(dim, int) or not isinstance(specs, (tuple, list)):
            return None
        if dim % rank_of(source) != cut.dim:
            return tuple(cut for _ in specs)
        shared = source.meta["spec"].shape[cut.dim] - cut.common
        if not isinstance(sizes, (tuple, list)) or specs[0].shape[cut.dim] != shared:
            raise self.refuse(node, "splits the shared features otherwise", WHOLE_HEADS)
        self.expect(node, sizes[0], replace(cut, common=0))
        self.keep(node, sizes[1:], self.ranks)
        return (replace(cut, common=0), *(None for _ in specs[1:]))

    def beside(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        """Return the cut of a view of sharded features and replicated ones after them, both in whole heads."""
        sizes, before, spec = sizes_of(node), source.meta["spec"].shape, node.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return None
        first, last, to, end = group_of(before, spec.shape, cut.dim)
        inner = math.prod(spec.shape[to + 1 : end])
        if last - first != 1 or cut.common % inner:
            raise self.refuse(node, "a view of shared features beside whole ones", WHOLE_HEADS)
        cut = replace(cut, dim=to, common=cut.common // inner)
        if to < len(sizes):
            self.expect(node, sizes[to], cut, spec.shape[to])
        self.keep(node, [*sizes[:to], *sizes[to + 1 :]], self.ranks)
        return cut

    def view(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        sizes = sizes_of(node)
        before, spec = source.meta["spec"].shape, node.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return None
        first, last, to, end = group_of(before, spec.shape, cut.dim)
        if cut.repeated and cut.dim + 1 < last:
            cut = replace(cut, replicas=1, repeated=False)
        outer = math.prod(before[first : cut.dim]) * cut.parts
        identity = last - first == 1 and end - to == 1
        for dim in range(to, end):
            size = spec.shape[dim]
            if size == 1 and end - to > 1:
                continue
            if outer > 1 and outer % size == 0:
                outer //= size
                continue
            if size % outer or (not identity and (size // outer) % (self.ranks // cut.replicas)):
                break
            shares = self.ranks // cut.replicas
            if dim < len(sizes):
                self.divide(node, sizes[dim], shares)
            self.keep(node, [*sizes[:dim], *sizes[dim + 1 :]], shares)
            return replace(cut, dim=dim, parts=outer)
        raise self.refuse(
            node,
            f"{spec.shape[to:end]} of the shared features cannot be divided among {self.ranks} ranks",
            WHOLE_HEADS,
        )

    def expand(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        sizes = sizes_of(node)
        dim = cut.dim + rank_of(node) - rank_of(source)
        if len(sizes) != rank_of(node):  # those of another tensor, whatever they are by then
            return replace(cut, dim=dim)
        shares, repeated = self.ranks // cut.replicas, cut.replicas > 1 and 0 <= dim + 1 < len(sizes)
        if 0 <= dim < len(sizes):
            self.divide(node, sizes[dim], shares)
        if repeated:  # heads repeated: fewer of them for each that is here
            self.divide(node, sizes[dim + 1], cut.replicas)
        self.keep(node, [*sizes[: max(dim, 0)], *sizes[dim + 1 + repeated :]], shares)
        return replace(cut, dim=dim, repeated=repeated)

    def split(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        given = arguments(node)
        dim, pieces = given["dim"], node.meta.get("spec")
        if not isinstance(dim, int) or not isinstance(pieces, (tuple, list)):
            return None
        if dim % rank_of(source) != cut.dim:
            return tuple(cut for _ in pieces)
        equal = len({piece.shape for piece in pieces}) == 1
        if not equal or cut.parts % len(pieces):
            raise self.refuse(
                node,
                f"splits the shared features into {len(pieces)} pieces; they are sharded in {cut.parts} parts",
                f"shard them packed: parts={len(pieces)}" if equal else "pieces of different sizes stay whole",
            )
        if "split_size_or_sections" in given:
            self.divide(node, given["split_size_or_sections"], self.ranks // cut.replicas)
        return tuple(replace(cut, parts=cut.parts // len(pieces)) for _ in pieces)

    def permute(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        rank, given = rank_of(source), arguments(node)
        if "dims" in given:
            return replace(cut, dim=[int(dim) % rank for dim in given["dims"]].index(cut.dim))
        one, other = (int(given[name]) % rank for name in ("dim0", "dim1"))
        return replace(cut, dim={one: other, other: one}.get(cut.dim, cut.dim))

    def unsqueeze(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        at = int(arguments(node)["dim"]) % rank_of(node)
        return replace(cut, dim=cut.dim + (at <= cut.dim))

    def along(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        """Return the cut of a softmax, sum, mean, …, or raise if it is along the sharded dimension."""
        dims = arguments(node)["dim"]
        dims = dims if isinstance(dims, (tuple, list)) else [dims]
        along = {dim % rank_of(source) for dim in dims if isinstance(dim, int)}
        if dims == [None] or cut.dim in along:
            raise self.refuse(node, f"{operation_name(node)} over shared features", "leave these features whole")
        if rank_of(node) == rank_of(source):
            return self.elementwise(node)
        return replace(cut, dim=cut.dim - sum(dim < cut.dim for dim in along))  # without these dimensions

    def norm(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        if cut.dim >= rank_of(source) - len(arguments(node)["normalized_shape"]):
            raise self.refuse(node, "a norm over shared features", "shard the modules after the norm instead")
        return self.elementwise(node)

    def product(self, node: fx.Node) -> Cuts:
        """Return the cut of a matrix product, or raise if it sums over the sharded dimension.

        The sharded dimension may be a batch dimension, rows or columns.
        """
        matrices = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, fx.Node)][-2:]
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if not isinstance(cut, Cut):
                continue
            from_right = rank_of(operand) - cut.dim
            summed = 1 if operand is matrices[0] else 2
            if operand in matrices and from_right == summed:
                raise self.refuse(node, "a product that sums over shared features", WHOLE_HEADS)
            for other in node.all_input_nodes:
                setting = self.made.get(other, {}).get(-from_right)
                if setting is not None and int(setting) == operand.meta["spec"].shape[cut.dim]:
                    self.divide(node, setting, self.ranks // cut.replicas)
            return replace(cut, dim=rank_of(node) - from_right)
        return None


_CONSTANTS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")

_HANDLERS: dict[str, Any] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _Following.view),
    **dict.fromkeys(("expand", "broadcast_to"), _Following.expand),
    **dict.fromkeys(("split", "chunk"), _Following.split),
    **dict.fromkeys(("transpose", "permute"), _Following.permute),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _Following.along),
    **dict.fromkeys(("sum", "mean", "var", "amax", "amin"), _Following.along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _Following.norm),
    "unsqueeze": _Following.unsqueeze,
}

_BESIDE: dict[str, Any] = {
    **dict.fromkeys(("view", "reshape", "unflatten"), _Following.beside),
    "split": _Following.pieces,
    **dict.fromkeys(("transpose", "permute"), _Following.permute),
    "unsqueeze": _Following.unsqueeze,
}
"""Where every rank has something behind what is shared."""
