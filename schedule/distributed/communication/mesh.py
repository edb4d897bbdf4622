"""The tensor-parallel dimension of the schedule's mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from schedule.distributed.communication.agreement import Noted
from schedule.distributed.communication.groups import SimulatedRanks
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR_PARALLEL, EXPERT_PARALLEL, CONTEXT_PARALLEL = "tp", "ep", "cp"

_MAKE_MESH = 'pass create_schedule(…, mesh=init_device_mesh("cuda", (n,), mesh_dim_names=("tp",)))'


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel dimension of a mesh.

    Attributes:
        mesh: this dimension alone, as a one-dimensional mesh; None for simulated ranks.
        group: name of its process group; collectives in graphs look it up by name.
        size: number of ranks.
        rank: the rank of this process.
    """

    mesh: DeviceMesh | None
    group: str
    size: int
    rank: int

    def noted(self, line: str) -> list[Noted]:
        """Return the edit recording ``line``, or none for simulated ranks, all scheduled by one process."""
        return [] if self.mesh is None else [Noted(self.group, line)]


@dataclass(frozen=True)
class SimulatedMesh:
    """Replacement for a mesh, with ranks simulated as threads of this process and plain tensors as shards."""

    ranks: SimulatedRanks
    rank: int


def checked_mesh(mesh: Any) -> Any:
    """Return ``mesh`` after checking for a ``DeviceMesh`` with a tensor-parallel dimension.

    None and a :class:`SimulatedMesh` are returned unchecked.

    Raises:
        ShardError: ``mesh`` is something else, or has no such dimension.
    """
    if mesh is not None and not isinstance(mesh, SimulatedMesh):
        _dimension(mesh)
    return mesh


def tensor_parallel(mesh: DeviceMesh | SimulatedMesh | None) -> TensorParallel:
    """Return the dimension named ``"tp"`` of ``mesh``, else ``"cp"``, or its only dimension.

    Raises:
        ShardError: there is no mesh, no such dimension, or no process group, or this rank is not part of the mesh.
    """
    if mesh is None:
        raise ShardError("the schedule has no mesh to shard over", fix=_MAKE_MESH)
    if isinstance(mesh, SimulatedMesh):
        return TensorParallel(None, mesh.ranks.name, mesh.ranks.size, mesh.rank)
    name = _dimension(mesh)
    if not (dist.is_available() and dist.is_initialized()):
        raise ShardError(
            "the process group is not initialized",
            fix="start with torchrun and call torch.distributed.init_process_group before making the mesh",
        )
    own = mesh if name is None or mesh.ndim == 1 else mesh[name]
    if own.get_coordinate() is None:
        raise ShardError(
            f"rank {dist.get_rank()} is not part of the mesh {mesh}",
            fix="schedule on the ranks of the mesh only",
        )
    return TensorParallel(own, own.get_group().group_name, own.size(), own.get_local_rank())


def has_expert_dimension(mesh: Any) -> bool:
    """Return whether ``mesh`` has dimensions named ``"ep"`` and ``"tp"``."""
    return isinstance(mesh, DeviceMesh) and {TENSOR_PARALLEL, EXPERT_PARALLEL} <= set(mesh.mesh_dim_names or ())


def expert_ranks(mesh: DeviceMesh | SimulatedMesh | None) -> int:
    """Return the number of ranks of the dimensions ``"ep"`` and ``"tp"`` of ``mesh``, without communication.

    Simulated ranks are those of ``"tp"``.

    Raises:
        ShardError: as :func:`tensor_parallel` does, or there are no two dimensions of these names.
    """
    size = tensor_parallel(mesh).size
    return math.prod(mesh[name].size() for name in _expert_dimensions(mesh)) if isinstance(mesh, DeviceMesh) else size


def expert_parallel(mesh: DeviceMesh | SimulatedMesh | None) -> TensorParallel:
    """Return the dimensions ``"ep"`` and ``"tp"`` of ``mesh`` as a single one. All ranks must call it.

    Simulated ranks are those of ``"tp"``.

    Raises:
        ShardError: as :func:`expert_ranks` does.
    """
    tp = tensor_parallel(mesh)
    if not isinstance(mesh, DeviceMesh):
        return tp
    wanted = tuple(name for name in _expert_dimensions(mesh) if mesh[name].size() > 1)
    if EXPERT_PARALLEL not in wanted:
        return tp
    own = mesh[wanted[0]] if len(wanted) == 1 else mesh[wanted]._flatten()
    return TensorParallel(own, own.get_group().group_name, own.size(), own.get_local_rank())


def _expert_dimensions(mesh: DeviceMesh) -> list[str]:
    names = mesh.mesh_dim_names or ()
    if not has_expert_dimension(mesh):
        has = ", ".join(map(repr, names)) or f"{mesh.ndim} without names"
        raise ShardError(
            f'experts are spread over the dimensions "ep" and "tp" of a mesh, and this mesh has {has}',
            fix='init_device_mesh("cuda", (n, 1), mesh_dim_names=("ep", "tp")), if nothing else is sharded',
        )
    return [name for name in names if name in (TENSOR_PARALLEL, EXPERT_PARALLEL)]


def check_context(mesh: DeviceMesh | SimulatedMesh | None) -> None:
    """Raise unless the ranks of a schedule with this mesh can share sequences.

    Raises:
        ShardError: of several dimensions, none is named ``"cp"``, or another is named ``"tp"``.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1 or _dimension(mesh) == CONTEXT_PARALLEL:
        return
    dims = ", ".join(mesh.mesh_dim_names or ())
    raise ShardError(
        f'the mesh has the dimensions {dims}, of which a schedule shards over "tp", and context parallelism needs "cp"',
        fix='a schedule for mesh["cp"] alone: one schedule shards features or sequences, not both',
    )


def _dimension(mesh: Any) -> str | None:
    """Return the name of the tensor-parallel dimension, or None for a one-dimensional mesh without names."""
    if not isinstance(mesh, DeviceMesh):
        raise ShardError(f"a mesh is a DeviceMesh of torch.distributed, no {type(mesh).__name__}", fix=_MAKE_MESH)
    names = mesh.mesh_dim_names or ()
    for name in (TENSOR_PARALLEL, CONTEXT_PARALLEL):
        if name in names:
            return name
    if mesh.ndim == 1:
        return names[0] if names else None
    dims = ", ".join(names) or f"{mesh.ndim} unnamed ones"
    raise ShardError(
        f'the mesh has {mesh.ndim} dimensions ({dims}) and none is named "tp"',
        fix='name the tensor-parallel one: mesh_dim_names=("dp", "tp"), or the context-parallel one: ("dp", "cp")',
    )
