"""From a parameter to a DTensor on the mesh and back: every name it goes by, its gradient, its attributes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fused.torch_internals.sharded import StridedShard
from schedule.distributed.communication.chunks import part_of
from schedule.distributed.communication.mesh import TensorParallel
from schedule.util.tensors import local_part

Owner = tuple[nn.Module, str]


def owners(root: nn.Module, tensor: Tensor) -> list[Owner]:
    """Every place below ``root`` that holds this very parameter: several if it is tied."""
    return [
        (module, name)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is tensor
    ]


def placement(axis: int, parts: int) -> Placement:
    """How ``axis`` is shared out; of ``parts`` equal packed parts each rank gets a share of every one.

    The strided placement keeps the order of the whole tensor: gathering it gives the packed layout back.
    """
    return Shard(axis) if parts == 1 else StridedShard(axis, split_factor=parts)


def distributed(tensor: Tensor, tp: TensorParallel, axis: int, parts: int) -> Tensor:
    """This rank's share of ``tensor``, which every rank holds whole; nothing is communicated."""
    whole = tensor.detach().contiguous()
    local = part_of(whole, axis, parts, tp.size, tp.rank)
    if tp.mesh is None:
        return local
    how = [placement(axis, parts)]
    return DTensor.from_local(local, tp.mesh, how, run_check=False, shape=whole.shape, stride=whole.stride())


def sharded_parameter(parameter: Tensor, tp: TensorParallel, axis: int, parts: int) -> Tensor:
    """``parameter`` as a DTensor parameter: same flags, attributes and (sharded) gradient; a buffer as a DTensor."""
    if not isinstance(parameter, nn.Parameter):
        return distributed(parameter, tp, axis, parts)
    made = nn.Parameter(distributed(parameter, tp, axis, parts), parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    if parameter.grad is not None:
        made.grad = distributed(parameter.grad, tp, axis, parts)
    return made


def full_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` whole, on every rank; a plain tensor is whole already. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
        """Put the sharded parameter into every place."""
        fresh = sharded_parameter(self.whole, self.tp, self.axis, self.parts)
        if self.sharded is None:
            self.sharded = fresh
        else:  # sharded again: the same object, so that optimizers made for it still hold it
            self.sharded.requires_grad_(fresh.requires_grad)
            with torch.no_grad():
                local_part(self.sharded).copy_(local_part(fresh))
            self.sharded.grad = fresh.grad
        for module, name in self.slots:
            _table(module, name)[name] = self.sharded

    def free(self) -> None:
        """Let go of the whole tensor's memory; :meth:`gather` brings it back."""
        if self.tp.mesh is None:
            return  # simulated ranks cannot be gathered: what their shards learn is thrown away
        self.whole.grad = None
        self.whole.data = self.whole.data.new_empty(0)
        self._freed = True

    def gather(self) -> None:
        """Put the whole parameter back into every place, with the values the shards have now."""
        sharded = self.sharded
        if sharded is not None and self._freed:
            data = full_tensor(sharded.detach())
            grad = None if sharded.grad is None else full_tensor(sharded.grad)
            self.whole.data = data.contiguous()
            self.whole.requires_grad_(sharded.requires_grad)
            self.whole.grad = grad
            self._freed = False
        for module, name in self.slots:
            _table(module, name)[name] = self.whole


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else module._buffers


class LoadWhole:
    """Before a ``state_dict`` is loaded, shares out the whole tensors in it the way the module's own are.

    Registered as a ``load_state_dict`` pre-hook of every module with sharded parameters.
    """

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        """Replace whole tensors in ``state`` by DTensors placed like the module's parameters."""
        for name, own in _sharded(module):
            if own.device_mesh.ndim != 1:
                continue  # another library shards it over a second dimension, and loads it
            given = state.get(prefix + name)
            if isinstance(given, DTensor):
                if given.placements == own.placements and given.device_mesh == own.device_mesh:
                    continue
                given = given.full_tensor()
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
