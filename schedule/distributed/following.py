"""What follows a sharded output through the module that calls it: sizes in attributes, heads, packed parts.

GPT-2's attention calls ``self.c_attn(x).split(self.split_size, dim=2)``: once ``c_attn`` gives half of its
outputs, ``split_size`` has to be half of what it was. The caller's traced graph, recorded before anything was
sharded, is followed from the sharded output on; a size of the shared dimension that comes from an attribute of
the caller is to be divided by the ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from schedule.distributed.modules import projection_of
from schedule.distributed.settings import Derived, Setting, outputs_of, settings_in
from schedule.errors import ShardError
from schedule.tracing.specs import TensorSpec

_WHOLE_HEADS = "use as many ranks as divide the heads, or leave these features whole"


@dataclass(frozen=True)
class Cut:
    """A dimension that the ranks share out, in each of ``parts`` equal packed parts; ``replicas`` have the same.

    If it is ``repeated``, the dimension after it repeats its data, and those share that one out.
    """

    dim: int
    parts: int = 1
    replicas: int = 1
    repeated: bool = False


Cuts = Cut | None | tuple["Cuts", ...]


def follow(
    graph: fx.Graph,
    caller: nn.Module,
    columns: Mapping[str, int],
    ranks: int,
    replicas: Mapping[str, int] | None = None,
    every: bool = False,
) -> dict[str, tuple[int, int]]:
    """Attributes of ``caller`` that hold sizes of a shared dimension: name → (whole, on one rank).

    Args:
        graph: from :func:`whole_forward`.
        caller: the module.
        columns: path of each child with shared outputs → in how many packed parts.
        ranks: how many share.
        replicas: path of each child of which several ranks have the same outputs → how many.
        every: these are all; what comes from elsewhere is whole.

    Raises:
        ShardError: the shared dimension is normalised, summed, selected from, or not to be divided.
    """
    following = _Following(caller, columns, ranks, replicas or {}, every)
    for node in graph.nodes:
        following.visit(node)
    following.settle()
    return following.settings


@dataclass(frozen=True)
class _Expected:
    """What a size has to be on one rank, once the attributes that it comes from are divided among ``shares``."""

    node: fx.Node
    size: Derived
    own: int
    shares: int

    def met(self, values: Mapping[str, int]) -> bool:
        return self.size.given(values) == self.own


class _Following:
    def __init__(
        self, caller: nn.Module, columns: Mapping[str, int], ranks: int, replicas: Mapping[str, int], every: bool
    ) -> None:
        self.every = every
        self.caller, self.columns, self.ranks, self.replicas = caller, columns, ranks, replicas
        self.cuts: dict[fx.Node, Cuts] = {}
        self.made: dict[fx.Node, dict[int, Setting]] = {}  # of constants: sizes from attributes, by dim from the end
        self.settings: dict[str, tuple[int, int]] = {}
        self.expected: list[_Expected] = []

    def visit(self, node: fx.Node) -> None:
        if node.op == "call_module":
            cut = self.through_module(node)
        elif node.op in ("call_function", "call_method"):
            cut = self.through_call(node)
        else:
            return
        if cut is not None:
            self.cuts[node] = cut

    def refuse(self, node: fx.Node, why: str, fix: str) -> ShardError:
        return ShardError(why, fix=fix, where=f"{node.format_node()}\n{node.meta.get('source', '')}".rstrip())

    # -- modules -----------------------------------------------------------------------------------------

    def through_module(self, node: fx.Node) -> Cuts:
        spec = node.meta.get("spec")
        if str(node.target) in self.columns and isinstance(spec, TensorSpec):
            path = str(node.target)
            return Cut(spec.ndim - 1, self.columns[path], self.replicas.get(path, 1))
        child = self.caller.get_submodule(str(node.target))
        source = self.source(node)
        if source is None or projection_of(child) is not None:
            return None  # a projection takes the shared features as a row-parallel one, sharded next
        shape = child.normalized_shape if isinstance(child, (nn.LayerNorm, nn.RMSNorm)) else ()
        if source.dim >= _rank(node) - len(shape):
            raise self.refuse(node, "a norm over shared features", "shard the modules after the norm instead")
        return self.elementwise(node)

    # -- functions and methods ---------------------------------------------------------------------------

    def through_call(self, node: fx.Node) -> Cuts:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        source = node.args[0] if node.args else None
        if name in _CONSTANTS:
            sizes = node.args[1] if name.startswith("new_") else source
            sizes = sizes if isinstance(sizes, (tuple, list)) else ()
            self.made[node] = {at - len(sizes): one for at, one in enumerate(sizes) if isinstance(one, Setting)}
            return None
        cut = self.cuts.get(source) if isinstance(source, fx.Node) else None
        if name in ("expand", "broadcast_to") and cut is None:
            sizes = _sizes(node)
            self.made[node] = {at - len(sizes): one for at, one in enumerate(sizes) if isinstance(one, Setting)}
            return None
        if name == "getitem" and isinstance(source, fx.Node):
            return self.item(node, source, cut)
        if isinstance(cut, Cut) and isinstance(source, fx.Node):
            handler = _HANDLERS.get(name)
            if handler is not None:
                result: Cuts = handler(self, node, source, cut)
                return result
        if name in ("matmul", "bmm", "baddbmm", "__matmul__"):
            return self.product(node)
        return self.elementwise(node)

    def source(self, node: fx.Node) -> Cut | None:
        """The first operand's cut that is one."""
        found = (self.cuts.get(operand) for operand in node.all_input_nodes)
        return next((cut for cut in found if isinstance(cut, Cut)), None)

    def elementwise(self, node: fx.Node) -> Cuts:
        """Any operation whose result has the shared dimension where an operand has it, from the right."""
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
        rank, indices = _rank(source), list(index) if isinstance(index, tuple) else [index]
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
                raise self.refuse(node, "picks from shared features by position", "leave these features whole")
            dim, made = dim + 1, made + (not isinstance(one, int))
        return replace(cut, dim=made + cut.dim - dim)

    def view(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        sizes = _sizes(node)
        before, spec = source.meta["spec"].shape, node.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return None
        first, last, to, end = _group(before, spec.shape, cut.dim)
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
            _WHOLE_HEADS,
        )

    def expand(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        sizes = _sizes(node)
        dim = cut.dim + _rank(node) - _rank(source)
        if len(sizes) != _rank(node):  # those of another tensor, whatever they are by then
            return replace(cut, dim=dim)
        shares, repeated = self.ranks // cut.replicas, cut.replicas > 1 and 0 <= dim + 1 < len(sizes)
        if 0 <= dim < len(sizes):
            self.divide(node, sizes[dim], shares)
        if repeated:  # heads repeated: fewer of them for each that is here
            self.divide(node, sizes[dim + 1], cut.replicas)
        self.keep(node, [*sizes[: max(dim, 0)], *sizes[dim + 1 + repeated :]], shares)
        return replace(cut, dim=dim, repeated=repeated)

    def split(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        pieces = node.meta.get("spec")
        if not isinstance(dim, int) or not isinstance(pieces, (tuple, list)):
            return None
        if dim % _rank(source) != cut.dim:
            return tuple(cut for _ in pieces)
        size = node.kwargs.get("split_size", node.args[1] if len(node.args) > 1 else None)
        equal = len({piece.shape for piece in pieces}) == 1
        if not equal or cut.parts % len(pieces):
            raise self.refuse(
                node,
                f"splits the shared features into {len(pieces)} pieces; they are shared out in {cut.parts} parts",
                f"shard them packed: parts={len(pieces)}" if equal else "pieces of different sizes stay whole",
            )
        if getattr(node.target, "__name__", node.target) != "chunk":
            self.divide(node, size, self.ranks // cut.replicas)
        return tuple(replace(cut, parts=cut.parts // len(pieces)) for _ in pieces)

    def permute(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        rank = _rank(source)
        name = getattr(node.target, "__name__", node.target)
        if name == "permute":
            order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
            return replace(cut, dim=[int(dim) % rank for dim in order].index(cut.dim))  # type: ignore[arg-type]
        one, other = (int(dim) % rank for dim in node.args[1:3])  # type: ignore[arg-type]
        return replace(cut, dim={one: other, other: one}.get(cut.dim, cut.dim))

    def unsqueeze(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        at = int(node.args[1]) % _rank(node)  # type: ignore[arg-type]
        return replace(cut, dim=cut.dim + (at <= cut.dim))

    def along(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        """A softmax, sum, mean, …: not along the shared dimension."""
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        dims = dims if isinstance(dims, (tuple, list)) else [dims]
        whole = dims == [None]
        if whole or cut.dim in [dim % _rank(source) for dim in dims if isinstance(dim, int)]:
            name = getattr(node.target, "__name__", node.target)
            raise self.refuse(node, f"{name} over shared features", "leave these features whole")
        return self.elementwise(node)

    def norm(self, node: fx.Node, source: fx.Node, cut: Cut) -> Cuts:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape", (1,))
        if cut.dim >= _rank(source) - len(shape):  # type: ignore[arg-type]
            raise self.refuse(node, "a norm over shared features", "shard the modules after the norm instead")
        return self.elementwise(node)

    def product(self, node: fx.Node) -> Cuts:
        """A matrix product: the shared dimension may be a batch dimension, rows or columns, not summed over."""
        matrices = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, fx.Node)][-2:]
        for operand in node.all_input_nodes:
            cut = self.cuts.get(operand)
            if not isinstance(cut, Cut):
                continue
            from_right = _rank(operand) - cut.dim
            summed = 1 if operand is matrices[0] else 2
            if operand in matrices and from_right == summed:
                raise self.refuse(node, "a product that sums over shared features", _WHOLE_HEADS)
            for other in node.all_input_nodes:
                setting = self.made.get(other, {}).get(-from_right)
                if setting is not None and int(setting) == operand.meta["spec"].shape[cut.dim]:
                    self.divide(node, setting, self.ranks // cut.replicas)
            return replace(cut, dim=_rank(node) - from_right)
        return None

    # -- sizes -------------------------------------------------------------------------------------------

    def keep(self, node: fx.Node, sizes: Sequence[Any], shares: int) -> None:
        """``sizes`` are of other dimensions: what they come from stays, or changes so that they stay."""
        derived = (size for size in sizes if isinstance(size, Derived))
        self.expected += [_Expected(node, size, int(size), shares) for size in derived]

    def settle(self) -> None:
        """Divide what else has to be, for the sizes worked out from attributes to be as expected.

        ``heads // key_heads + 2`` is the same only if both are divided.
        """
        whole = {one.size.name for one in self.expected if isinstance(one.size, Setting)}
        own = self.outputs() | {name: here for name, (_, here) in self.settings.items()}
        for one in self.expected:
            if one.met(own):
                continue
            free = {each.name: int(each) for each in one.size.settings() if each.name not in whole | own.keys()}
            divided = {name: size // one.shares for name, size in free.items() if "." not in name}
            found = [name for name, here in divided.items() if one.met({**own, name: here})]
            if len(found) == 1:
                own[found[0]] = divided[found[0]]
                self.settings[found[0]] = (free[found[0]], divided[found[0]])
        missed = [one for one in self.expected if not one.met(own)]
        if missed and self.every:
            names = " and ".join(sorted(missed[0].size.names))
            raise self.refuse(missed[0].node, f"a size worked out from {names} cannot follow", _WHOLE_HEADS)

    def outputs(self) -> dict[str, int]:
        """How many outputs the shared projections have here, by the name of the setting."""
        shares = {}
        for path in self.columns:
            projection = projection_of(self.caller.get_submodule(path))
            if projection is not None:
                shares[outputs_of(path, projection)] = self.ranks // self.replicas.get(path, 1)
        read = {one.name: int(one) for each in self.expected for one in each.size.settings()}
        return {name: read[name] // count for name, count in shares.items() if name in read}

    def divide(self, node: fx.Node, size: Any, shares: int) -> None:
        """``size`` is of a shared dimension: the attribute it comes from is to be divided.

        What the code works out from others is looked at when all are known: :meth:`settle`.
        """
        if isinstance(size, Derived) and not isinstance(size, Setting):
            self.expected.append(_Expected(node, size, int(size) // shares, shares))
            return
        if self.every and type(size) is int and size > 0:
            raise self.refuse(node, f"{size} of the shared features is a number in the code", _WHOLE_HEADS)
        settings = {s.name: s for s in settings_in(size)}
        if not settings and self.every and self.is_whole(size):
            raise self.refuse(node, "a size of the shared features is read off a tensor that is whole", _WHOLE_HEADS)
        if len(settings) != 1:
            return
        ((name, setting),) = settings.items()
        whole = int(setting)
        if whole % shares:
            raise self.refuse(
                node,
                f"{name} = {whole} cannot be divided among {shares} ranks",
                "use as many ranks as divide it, or leave these features whole",
            )
        self.settings[name] = (whole, whole // shares)

    def is_whole(self, size: Any) -> bool:
        """Whether ``size`` is read off a dimension of a tensor that is not the shared one."""
        if not isinstance(size, fx.Node) or size.target is not operator.getitem:
            return False
        sizes, dim = size.args
        known = isinstance(sizes, fx.Node) and isinstance(dim, int)
        if not known or not (sizes.target is getattr and sizes.args[1] == "shape"):  # type: ignore[union-attr]
            return False
        source = sizes.args[0]  # type: ignore[union-attr]
        cut = self.cuts.get(source)  # type: ignore[arg-type]
        return not (isinstance(cut, Cut) and cut.dim == dim % _rank(source))  # type: ignore[arg-type,operator]


_CONSTANTS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")

_HANDLERS: dict[str, Any] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _Following.view),
    **dict.fromkeys(("expand", "broadcast_to"), _Following.expand),
    **dict.fromkeys(("split", "chunk"), _Following.split),
    **dict.fromkeys(("transpose", "permute", "swapaxes"), _Following.permute),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _Following.along),
    **dict.fromkeys(("sum", "mean", "var", "amax", "amin"), _Following.along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _Following.norm),
    "unsqueeze": _Following.unsqueeze,
}


def _rank(node: fx.Node) -> int:
    spec = node.meta.get("spec")
    return spec.ndim if isinstance(spec, TensorSpec) else 0


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    """The sizes that a view or expand was given."""
    name = getattr(node.target, "__name__", node.target)
    if name in ("flatten", "unflatten"):
        return ()
    sizes = node.args[1:]
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else tuple(sizes)


def _group(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, int, int, int]:
    """The smallest runs of dims, one of each shape, that hold the same elements and contain ``dim``."""
    first = to = last = end = 0
    while last < len(before) or end < len(after):
        first, to = last, end
        left = before[last] if last < len(before) else 1
        right = after[end] if end < len(after) else 1
        last, end = min(last + 1, len(before)), min(end + 1, len(after))
        while left != right:
            if left < right:
                left, last = left * before[last], last + 1
            else:
                right, end = right * after[end], end + 1
        if first <= dim < last:
            break
    return first, last, to, end
