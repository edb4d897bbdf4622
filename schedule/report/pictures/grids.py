"""Tables of pipeline stages and of tensor-parallel shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fused.sharding import local_part
from schedule.distributed.tensor_parallel.sharded_modules import ModuleSharding, Split, sharding_of
from schedule.report.pictures.paths import ranged
from schedule.util.wording import size_text

if TYPE_CHECKING:
    from schedule.capture import Recording
    from schedule.core.node import Node

MOST_RANKS = 16


@dataclass
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: from 0.
        modules: its modules, whole subtrees by their topmost module.
        nbytes: bytes of its parameters, on one rank.
    """

    number: int
    modules: list[str] = field(default_factory=list)
    nbytes: int = 0

    @property
    def size(self) -> str:
        """Size of its parameters, formatted with a unit."""
        return size_text(self.nbytes)


def stages(sch: Node, recording: Recording | None) -> list[Stage]:
    """Return the stages between the cuts of ``sch``, in execution order, or none if nothing was cut.

    A module without parameters runs in any stage that needs it, and does not belong to one.
    """
    cuts = sch.tree.stage_ends
    if not cuts:
        return []
    root = sch.tree.root
    order = list(root.modules()) if recording is None else list(recording.calls)
    found, stage_of = [Stage(number) for number in range(len(cuts) + 1)], dict[nn.Module, int]()
    number = 0
    for module in order:
        if any(True for _ in module.parameters(recurse=False)):
            stage_of[module] = number
        number += module in cuts
    counted: set[Tensor] = set()
    for module, at in stage_of.items():
        fresh = [p for p in module.parameters(recurse=False) if p not in counted]
        counted.update(fresh)
        found[at].nbytes += sum(_local_bytes(parameter) for parameter in fresh)
    _cover(root, "", stage_of, found)
    for stage in found:
        stage.modules = ranged(stage.modules)
    return found


def _cover(module: nn.Module, path: str, stage_of: dict[nn.Module, int], found: Sequence[Stage]) -> None:
    """Add ``module`` to its stage if all of it is in one, else its parameters and children separately."""
    inside = {stage_of[each] for each in module.modules() if each in stage_of}
    if len(inside) == 1:
        found[inside.pop()].modules.append(path or "all of it")
        return
    if module in stage_of:
        found[stage_of[module]].modules.append(f"{path or 'the root'} (its own parameters)")
    for name, child in module.named_children():
        _cover(child, f"{path}.{name}" if path else name, stage_of, found)


def _local_bytes(parameter: Tensor) -> int:
    own = local_part(parameter)
    return int(own.numel() * own.element_size())


@dataclass(frozen=True)
class Share:
    """Shard of a parameter on one rank.

    Attributes:
        shape: of the shard.
        spans: (begin, end) along the axis, as fractions; several for a parameter with packed parts.
    """

    shape: str
    spans: tuple[tuple[float, float], ...]


@dataclass
class ShardRow:
    """A sharded parameter, together with similar ones in other layers.

    Attributes:
        modules: paths of the modules with the parameter.
        name: of the parameter.
        role: of the module, such as ``column``.
        upright: whether the axis is drawn from left to right.
        whole: shape of the whole parameter.
        shares: the shard of each rank, up to the first :data:`MOST_RANKS`.
        syncs: the collectives of the module.
    """

    modules: list[str]
    name: str
    role: str
    upright: bool
    whole: str
    shares: tuple[Share, ...]
    syncs: tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """Sharding of a model over tensor-parallel ranks.

    Attributes:
        ranks: number of ranks.
        rows: the sharded parameters.
        shared: size of the sharded parameters on each rank.
        whole: size of the parameters whole on every rank.
    """

    ranks: int
    rows: list[ShardRow]
    shared: str
    whole: str

    @property
    def columns(self) -> int:
        """Number of ranks drawn."""
        return min(self.ranks, MOST_RANKS)


def sharding(sch: Node) -> Sharding | None:
    """Return the sharding of the model of ``sch``, or None if it is not sharded."""
    rows: dict[tuple[object, ...], ShardRow] = {}
    ranks, shared = 0, dict[Tensor, int]()
    for path, node in sch.root.named_schedules():
        own = sharding_of(node.module)
        if own is None:
            continue
        ranks = own.ranks
        shared |= {p: _local_bytes(p) for n, p in node.module.named_parameters(recurse=False) if n in own.splits}
        for row in _rows(node.module, own):
            key = (path.rpartition(".")[2], row.name, row.role, row.whole, row.shares, row.syncs)
            rows.setdefault(key, row).modules.append(path)
    if not rows:
        return None
    whole = {p: _local_bytes(p) for p in sch.tree.root.parameters() if p not in shared}
    for row in rows.values():
        row.modules = ranged(row.modules)
    return Sharding(ranks, list(rows.values()), size_text(sum(shared.values())), size_text(sum(whole.values())))


def _rows(module: nn.Module, own: ModuleSharding) -> list[ShardRow]:
    tables = {**module._parameters, **module._buffers}
    syncs = tuple(f"{mode}: {sync}" for mode, sync in own.syncs.items())
    rows = []
    for name, split in own.splits.items():
        tensor = tables.get(name)
        shape = [] if tensor is None else list(tensor.shape)
        if shape:
            shape[split.axis] = split.size
        shares = tuple(_share(shape, split, own.ranks, rank) for rank in range(min(own.ranks, MOST_RANKS)))
        upright = split.axis == len(shape) - 1
        rows.append(ShardRow([], name, own.role(module) or "own", upright, _sizes(shape), shares, syncs))
        syncs = ()  # only once per module
    return rows or [ShardRow([], "", "whole", False, "", (), syncs)]


def _share(shape: Sequence[int], split: Split, ranks: int, rank: int) -> Share:
    group, position = ranks // split.replicas, rank // split.replicas
    sizes = [split.local(ranks, other * split.replicas) for other in range(group)]
    begin = (sum(sizes[:position]) - position * split.common) / max(split.size, 1) / split.parts
    length = (sizes[position] - split.common) / max(split.size, 1) / split.parts
    spans = tuple((part / split.parts + begin, part / split.parts + begin + length) for part in range(split.parts))
    if split.common:
        spans = (*spans, (1 - split.common / split.size, 1.0))
    return Share(_sizes([sizes[position] if axis == split.axis else size for axis, size in enumerate(shape)]), spans)


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
