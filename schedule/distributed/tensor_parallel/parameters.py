"""Conversion of parameters to DTensors on the mesh and back, with their names, gradients and attributes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fused.sharding import full_tensor, local_part
from fused.torch_internals.sharded import StridedShard
from schedule.distributed.communication.chunks import part_of
from schedule.distributed.communication.mesh import TensorParallel
from schedule.util.errors import ShardError

Owner = tuple[nn.Module, str]


def owners(root: nn.Module, tensor: Tensor) -> list[Owner]:
    """Return all locations of this parameter object below ``root``, several if it is tied."""
    return [
        (module, name)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is tensor
    ]


def check_untied(root: nn.Module, module: nn.Module) -> None:
    """Raise if a parameter of ``module`` has another location below ``root``.

    Raises:
        ShardError: names the parameter.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None and len(owners(root, parameter)) > 1:
            raise ShardError(f"{name} is tied to another parameter", fix="untie them first")


def placement(axis: int, parts: int) -> Placement:
    """Return the DTensor placement for sharding ``axis``.

    Of ``parts`` equal packed parts each rank gets a shard of every one. The strided placement keeps the
    order of the whole tensor, so gathering it restores the packed layout.
    """
    return Shard(axis) if parts == 1 else StridedShard(axis, split_factor=parts)


def distributed(tensor: Tensor, tp: TensorParallel, axis: int, parts: int) -> Tensor:
    """Return this rank's shard of ``tensor`` without communication. Every rank has the whole tensor."""
    whole = tensor.detach().contiguous()
    local = part_of(whole, axis, parts, tp.size, tp.rank)
    if tp.mesh is None:
        return local
    how = [placement(axis, parts)]
    return DTensor.from_local(local, tp.mesh, how, run_check=False, shape=whole.shape, stride=whole.stride())


def sharded_parameter(parameter: Tensor, tp: TensorParallel, axis: int, parts: int) -> Tensor:
    """Return ``parameter`` as a DTensor parameter with the same flags and attributes and a sharded gradient.

    A buffer becomes a plain DTensor.
    """
    if not isinstance(parameter, nn.Parameter):
        return distributed(parameter, tp, axis, parts)
    made = nn.Parameter(distributed(parameter, tp, axis, parts), parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    if parameter.grad is not None:
        made.grad = distributed(parameter.grad, tp, axis, parts)
    return made


class ShardedTensor:
    """One parameter, whole and sharded, of which one holds the data at a time.

    Sharding frees the memory of the whole one; gathering puts the current values back into that very object.

    Args:
        whole: the parameter as the user's model has it.
        slots: every module and name that holds it.
    """

    def __init__(self, whole: Tensor, slots: list[Owner], tp: TensorParallel, axis: int, parts: int) -> None:
        self.whole, self.slots = whole, slots
        self.tp, self.axis, self.parts = tp, axis, parts
        self.sharded: Tensor | None = None
        self._freed = False

    def shard(self) -> None:
        """Register the sharded parameter at every location."""
        fresh = sharded_parameter(self.whole, self.tp, self.axis, self.parts)
        if self.sharded is None:
            self.sharded = fresh
        else:  # sharded again: the same object, so that optimizers made for it still hold it
            self.sharded.requires_grad_(fresh.requires_grad)
            with torch.no_grad():
                local_part(self.sharded).copy_(local_part(fresh))
            self.sharded.grad = fresh.grad
        for module, name in self.slots:
            table_of(module, name)[name] = self.sharded

    def free(self) -> None:
        """Free the memory of the whole tensor. :meth:`gather` restores it."""
        if self.tp.mesh is None:
            return  # simulated ranks cannot be gathered: what their shards learn is thrown away
        self.whole.grad = None
        self.whole.data = self.whole.data.new_empty(0)
        self._freed = True

    def gather(self) -> None:
        """Register the whole parameter at every location again, with the current values of the shards."""
        sharded = self.sharded
        if sharded is not None and self._freed:
            data = full_tensor(sharded.detach())
            grad = None if sharded.grad is None else full_tensor(sharded.grad)
            self.whole.data = data.contiguous()
            self.whole.requires_grad_(sharded.requires_grad)
            self.whole.grad = grad
            self._freed = False
        for module, name in self.slots:
            table_of(module, name)[name] = self.whole


def table_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the table of parameters or of buffers of ``module`` with ``name`` in it."""
    return module._parameters if name in module._parameters else module._buffers


class LoadWhole:
    """Hook to shard the whole tensors of a ``state_dict`` before it is loaded.

    They get the placements of the module's parameters and buffers.

    Registered as a ``load_state_dict`` pre-hook of every module with sharded parameters.
    """

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        """Replace whole tensors in ``state`` by DTensors with the placements of the module's parameters."""
        for name, own in _sharded(module):
            if own.device_mesh.ndim != 1:
                continue  # another library shards it over a second dimension, and loads it
            given = state.get(prefix + name)
            if isinstance(given, DTensor):
                if given.placements == own.placements and given.device_mesh == own.device_mesh:
                    continue
                given = full_tensor(given)
            if isinstance(given, Tensor) and given.shape == own.shape:
                given = given.to(own.to_local().device)
                (how,) = own.placements
                axis, parts = getattr(how, "dim", 0), getattr(how, "split_factor", 1)
                mesh = own.device_mesh
                ranks = TensorParallel(mesh, "", mesh.size(), mesh.get_local_rank())
                state[prefix + name] = distributed(given, ranks, axis, parts)


def _sharded(module: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if isinstance(tensor, DTensor):
            yield name, tensor
