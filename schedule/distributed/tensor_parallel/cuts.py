"""Sharded dimensions of values and the dependent sizes in a module's code."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.distributed.tensor_parallel.sharded_modules import projection_of
from schedule.distributed.tensor_parallel.size_settings import Derived, Setting, outputs_of, settings_in
from schedule.patterns.ops import CannotBind, find_form
from schedule.util.errors import ShardError

WHOLE_HEADS = "use as many ranks as divide the heads, or leave these features whole"


@dataclass(frozen=True)
class Cut:
    """A sharded dimension of a value.

    Each of ``parts`` equal packed parts is sharded; ``replicas`` ranks have the same shard. If it is ``repeated``, the
    next dimension repeats its data and is sharded over these replicas. In a dimension that is not packed, the last
    ``common`` elements may be replicated on every rank.
    """

    dim: int
    parts: int = 1
    replicas: int = 1
    repeated: bool = False
    common: int = 0


Cuts = Cut | None | tuple["Cuts", ...]


@dataclass(frozen=True)
class _Expected:
    """Expected size on one rank after dividing the attributes behind it by ``shares``."""

    node: fx.Node
    size: Derived
    own: int
    shares: int

    def met(self, values: Mapping[str, int]) -> bool:
        return self.size.given(values) == self.own


class Sizes:
    """Known sizes of the values in one caller's forward.

    Args:
        caller: the calling module.
        columns: path of each child with sharded outputs → cut of its outputs.
        ranks: number of ranks.
        every: whether these are all sharded children, so that all other values are whole.
    """

    def __init__(self, caller: nn.Module, columns: Mapping[str, Cut], ranks: int, every: bool) -> None:
        self.caller, self.columns, self.ranks, self.every = caller, columns, ranks, every
        self.cuts: dict[fx.Node, Cuts] = {}
        self.made: dict[fx.Node, dict[int, Setting]] = {}  # of constants: sizes from attributes, by dim from the end
        self.settings: dict[str, tuple[int, int]] = {}
        self.expected: list[_Expected] = []

    def refuse(self, node: fx.Node, why: str, fix: str) -> ShardError:
        """Return the error with the source line of ``node``."""
        return ShardError(why, fix=fix, where=f"{node.format_node()}\n{node.meta.get('source', '')}".rstrip())

    def expect(self, node: fx.Node, size: Any, cut: Cut, whole: int | None = None) -> None:
        """Expect ``size`` to be the size of the sharded dimension on one rank, including its replicated elements."""
        whole = int(size) if whole is None else whole
        if (whole - cut.common) % self.ranks:
            raise self.refuse(node, f"{whole - cut.common} cannot be divided among {self.ranks} ranks", WHOLE_HEADS)
        own = (whole - cut.common) // self.ranks + cut.common
        if isinstance(size, Derived):
            self.expected.append(_Expected(node, size, own, self.ranks))
        else:
            self.refuse_fixed(node, size)

    def refuse_fixed(self, node: fx.Node, size: Any) -> None:
        """Raise if a size of the sharded dimension is fixed, provided all sharded children are known."""
        if self.every and type(size) is int and size > 0:
            raise self.refuse(node, f"{size} of the shared features is a number in the code", WHOLE_HEADS)
        if self.every and self.is_whole(size):
            raise self.refuse(node, "a size of the shared features is read off a tensor that is whole", WHOLE_HEADS)

    def keep(self, node: fx.Node, sizes: Sequence[Any], shares: int) -> None:
        """Expect sizes of other dimensions to stay the same, even if attributes behind them change."""
        derived = (size for size in sizes if isinstance(size, Derived))
        self.expected += [_Expected(node, size, int(size), shares) for size in derived]

    def settle(self) -> None:
        """Divide further attributes to give all computed sizes their expected values.

        For example, ``heads // key_heads + 2`` stays the same only if both are divided.
        """
        whole = {one.size.name for one in self.expected if isinstance(one.size, Setting) and one.own == one.size}
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
            raise self.refuse(missed[0].node, f"a size worked out from {names} cannot follow", WHOLE_HEADS)

    def outputs(self) -> dict[str, int]:
        """Return the numbers of outputs of the sharded projections on one rank, by setting name."""
        found, read = {}, {one.name: int(one) for each in self.expected for one in each.size.settings()}
        for path, cut in self.columns.items():
            projection = projection_of(self.caller.get_submodule(path))
            name = "" if projection is None else outputs_of(path, projection)
            if name in read:
                found[name] = (read[name] - cut.common) * cut.replicas // self.ranks + cut.common
        return found

    def divide(self, node: fx.Node, size: Any, shares: int) -> None:
        """Divide the attribute behind a size of a sharded dimension.

        Computed sizes are handled later by :meth:`settle`, once all sizes are known.
        """
        if isinstance(size, Derived) and not isinstance(size, Setting):
            self.expected.append(_Expected(node, size, int(size) // shares, shares))
            return
        self.refuse_fixed(node, size)
        settings = {s.name: s for s in settings_in(size)}
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
        """Return whether ``size`` is read from the shape of a tensor at an unsharded dimension."""
        if not isinstance(size, fx.Node) or size.target is not operator.getitem:
            return False
        sizes, dim = size.args
        known = isinstance(sizes, fx.Node) and isinstance(dim, int)
        if not known or not (sizes.target is getattr and sizes.args[1] == "shape"):  # type: ignore[union-attr]
            return False
        source = sizes.args[0]  # type: ignore[union-attr]
        cut = self.cuts.get(source)  # type: ignore[arg-type]
        return not (isinstance(cut, Cut) and cut.dim == dim % rank_of(source))  # type: ignore[arg-type,operator]


def rank_of(node: fx.Node) -> int:
    """Return the number of dimensions of the value of ``node``, or 0 if it is not a tensor."""
    spec = node.meta.get("spec")
    return spec.ndim if isinstance(spec, TensorSpec) else 0


def operation_name(node: fx.Node) -> str:
    """Return the name that the vocabulary has for an operation, or else the name of what is called."""
    form = find_form(node.op, node.target)
    if form is not None:
        return form.definition.name
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a torch operation by name, however they were passed; empty for unknown code."""
    form = find_form(node.op, node.target)
    try:
        return {} if form is None else form.bind(node.args, node.kwargs)[0]
    except CannotBind:
        return {}


def sizes_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes passed to a view or expand, one per dimension, with None where the code passes none."""
    given = arguments(node)
    sizes = next((given[name] for name in ("size", "shape", "sizes") if name in given), ())
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    kept = given["dim"] % rank_of(given["input"]) if "sizes" in given else 0  # unflatten
    return (*(None for _ in range(kept)), *sizes)


def group_of(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, int, int, int]:
    """Return the smallest matching runs of dims in both shapes around ``dim``.

    The result is ``(first, last, to, end)``: ``before[first:last]`` contains ``dim`` and has as many elements as
    ``after[to:end]``.
    """
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
