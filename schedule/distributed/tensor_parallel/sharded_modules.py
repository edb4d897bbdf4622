"""Description of a sharded module: its sharded parameters and its collectives.

A projection (``nn.Linear``, transformers' ``Conv1D``) is *column-parallel* if its weight is sharded along the
outputs, and *row-parallel* if it is sharded along the inputs. The same holds for a convolution. An embedding with a
sharded vocabulary is row-parallel: each rank looks up the rows it has, and the results are all-reduced. A batch norm
or a grouped convolution works on separate *channels* on each rank. Any other module with its own parameters computes
on its shards of them. Inputs and outputs of a module are plain local tensors, as in Megatron-LM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from schedule.capture import is_basic, is_conv1d, original_class
from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.communication.resharding import Resharding
from schedule.distributed.tensor_parallel.experts import Experts
from schedule.distributed.tensor_parallel.linears import computes_linear

SHARDING = "_schedule_sharding"

Function = Callable[[Tensor], Tensor]
OUTPUTS = ("fwd_post", "bwd_pre")
"""Modes that synchronize what a module gives, or its gradient; the others what it takes."""
COLUMN, ROW, CHANNEL, OWN = "column", "row", "channel", "own"
LEFT = "dtensor"
"""The collective that is none: outputs stay where they are, in a DTensor."""
ATTENTION = "fwd_attention"
"""The mode of the all-gather of keys and values inside a module."""
MEANS = "fwd_mean"
"""The mode of the all-reduces of means over sharded features inside a module, and of their gradients."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Projection:
    """Layout of a projection class: the weight's axes and the names of its size attributes.

    Attributes:
        output: axis of the weight along the outputs.
        input: axis of the weight along the inputs.
        out_features: attribute with the number of outputs.
        in_features: attribute with the number of inputs.
        transposed: whether the weight is ``[out, in]``.
    """

    output: int
    input: int
    out_features: str
    in_features: str
    transposed: bool


LINEAR = Projection(0, 1, "out_features", "in_features", True)
CONV1D = Projection(1, 0, "nf", "nx", False)


def projection_of(module: nn.Module) -> Projection | None:
    """Return the projection layout of ``module``, or None if it is not a plain projection.

    A scheduled module counts as its original class.
    """
    cls = original_class(module)
    biased = module._parameters.get("bias") is not None
    if isinstance(module, nn.Linear) and computes_linear(cls, biased):  # type: ignore[arg-type]
        return LINEAR
    return CONV1D if is_conv1d(cls) else None


def stays_call(module: nn.Module) -> bool:
    """Return whether ``module`` stays a call when graphs are flattened for planning."""
    return is_basic(module) or projection_of(module) is not None


def is_torch_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer from ``torch.nn``, with parameters of known meaning."""
    return original_class(module).__module__.startswith("torch.nn.")


def role_of(module: nn.Module, name: str, axis: int) -> str | None:
    """Return the role of ``module`` after sharding ``axis`` of parameter ``name``, or None if unsupported."""
    cls, projection = original_class(module), projection_of(module)
    if projection is not None:
        if name == "bias":
            return COLUMN
        return COLUMN if axis == projection.output else ROW
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return None if not plain else ROW if axis == 0 else COLUMN
    if cls in CONVOLUTIONS:
        grouped = module.groups > 1  # type: ignore[operator]
        return (CHANNEL if grouped else COLUMN) if axis == 0 else ROW if axis == 1 and not grouped else None
    if cls in BATCH_NORMS:
        return CHANNEL
    return None if is_torch_layer(module) or cls.__name__ == "Conv1D" else OWN


def features_dim(module: nn.Module) -> int:
    """Return the feature dimension of the inputs and outputs of ``module``, as a negative index."""
    if original_class(module) in CONVOLUTIONS:
        return -1 - len(module.kernel_size)  # type: ignore[arg-type]
    return -1


@dataclass(frozen=True)
class Split:
    """Sharding of one parameter.

    Attributes:
        axis: the sharded dimension.
        size: whole size of that dimension.
        parts: number of equal packed parts, each of them sharded.
        replicas: number of consecutive ranks with the same shard; the parameter itself stays whole.
        common: number of last elements replicated on every rank; the parameter itself stays whole.
    """

    axis: int
    size: int
    parts: int = 1
    replicas: int = 1
    common: int = 0

    @property
    def stays_whole(self) -> bool:
        """Whether every rank stores the whole parameter and computes with its shard."""
        return self.replicas > 1 or self.common > 0

    def local(self, ranks: int, rank: int) -> int:
        """Return the size of the sharded dimension on one rank."""
        if self.parts > 1:
            return self.size // ranks
        begin, end = chunk_bounds(self.size - self.common, ranks // self.replicas, rank // self.replicas)
        return end - begin + self.common

    def __str__(self) -> str:
        packed = f", {self.parts} parts" if self.parts > 1 else ""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"axis {self.axis}{packed}{replicas}" + (f", {self.common} common" if self.common else "")


def own_features(module: nn.Module, name: str, split: Split, ranks: int, rank: int) -> dict[str, int]:
    """Return the size attributes of ``module`` affected by a split of ``name``, with their values on this rank."""
    cls, projection, own = original_class(module), projection_of(module), split.local(ranks, rank)
    if cls in BATCH_NORMS:
        return {"num_features": own}
    if name != "weight":
        return {}
    if projection is not None:
        return {projection.out_features if split.axis == projection.output else projection.in_features: own}
    if isinstance(module, nn.Embedding):  # of shared rows each rank still takes any index
        return {"embedding_dim": own} if split.axis == 1 else {}
    if isinstance(module, CONVOLUTIONS) and module.groups > 1:
        return {"groups": module.groups // ranks, "in_channels": module.in_channels // ranks, "out_channels": own}
    return {("out_channels", "in_channels")[split.axis]: own} if cls in CONVOLUTIONS else {}


@dataclass(frozen=True)
class Sync:
    """One synchronization of a module: a collective by name, or a function of the tensor.

    Attributes:
        op: the collective or function.
        axis: the sharded dimension.
        argument: the input or parameter of a module other than a projection; None for the first input or the output.
    """

    op: str | Function
    axis: int | None = None
    argument: str | None = None

    def __str__(self) -> str:
        return self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "a function")

    @property
    def reshards(self) -> bool:
        """Whether it is a resharding."""
        return isinstance(self.op, Resharding)


@dataclass(frozen=True)
class ContextInput:
    """An input, besides the hidden states, of a module working on a part of the sequence.

    Attributes:
        argument: the name of the argument.
        steps: the indices that lead to the tensor in it.
        axis: the dimension along the sequence, of which each rank takes its part; None if the tensor stays whole.
    """

    argument: str
    steps: tuple[int, ...]
    axis: int | None


@dataclass(frozen=True)
class ModuleSharding:
    """Sharding of one module, stored on the module.

    Attributes:
        group: name of the process group.
        ranks: number of ranks in the group.
        splits: parameter name → :class:`Split`.
        syncs: mode, with the argument if given (``"fwd_pre hidden_states"``) → :class:`Sync`.
        experts: description of the experts, if the ranks of the group have different ones.
        context: inputs of a module that works on a part of the sequence, its attention on the whole; None for others.
        reads: sharded parameters and buffers of submodules, such as ``"conv1d.weight"``, that its own code reads.
    """

    group: str
    ranks: int
    splits: Mapping[str, Split] = field(default_factory=dict)
    syncs: Mapping[str, Sync] = field(default_factory=dict)
    experts: Experts | None = None
    context: tuple[ContextInput, ...] | None = None
    reads: tuple[str, ...] = ()

    def with_split(self, name: str, split: Split) -> ModuleSharding:
        """Return a copy with one more sharded parameter."""
        return replace(self, splits={**self.splits, name: split})

    def with_sync(self, mode: str, sync: Sync) -> ModuleSharding:
        """Return a copy with one more synchronization."""
        return replace(self, syncs={**self.syncs, sync_key(mode, sync.argument): sync})

    def role(self, module: nn.Module) -> str | None:
        """Return :data:`COLUMN`, :data:`ROW`, :data:`CHANNEL` or :data:`OWN`, or None while the weight is whole."""
        if projection_of(module) is not None or is_torch_layer(module):
            split = self.splits.get("weight")
            return None if split is None else role_of(module, "weight", split.axis)
        return OWN if self.splits else None

    def reduces_gradients(self, module: nn.Module) -> bool:
        """Return whether gradients of some input of ``module`` are reduced over the ranks."""
        inputs = [sync for key, sync in self.syncs.items() if not key.startswith((*OUTPUTS, MEANS))]
        return any(s.op in ("all_reduce", "all_gather") and s.argument not in module._parameters for s in inputs)


def sync_key(mode: str, argument: str | None) -> str:
    """Return the key of a synchronization in :attr:`ModuleSharding.syncs`."""
    return mode if argument is None else f"{mode} {argument}"


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the inputs of the forward of ``module``'s class, in order."""
    return [name for name in inspect.signature(original_class(module).forward).parameters if name != "self"]


def sharding_of(module: nn.Module) -> ModuleSharding | None:
    """Return the sharding of ``module``, or None."""
    return vars(module).get(SHARDING)


def is_sharded(root: nn.Module) -> bool:
    """Return whether any module of ``root`` is sharded. All ranks must then run it together."""
    return any(sharding_of(module) is not None for module in root.modules())


def ranks_sharing_evenly(root: nn.Module) -> int:
    """Return the number of ranks that share a dimension of activations in equal parts, such as the sequence, or 1."""
    found = (sharding for module in root.modules() if (sharding := sharding_of(module)) is not None)
    even = (one.ranks for one in found if any(map(_needs_even_parts, one.syncs.values())))
    return next(even, 1)


def _needs_even_parts(sync: Sync) -> bool:
    return sync.reshards or (sync.axis is not None and sync.op != "all_gather")


def incomplete(module: nn.Module, sharding: ModuleSharding) -> str:
    """Describe the shards still needed before ``module`` can run. Return "" if it is complete."""
    if original_class(module) in BATCH_NORMS and sharding.splits:
        tables = {**module._parameters, **module._buffers}
        whole = [n for n, t in tables.items() if t is not None and t.ndim and n not in sharding.splits]
        return f'{", ".join(whole)} whole: .shard("{whole[0]}", axis=0) as well' if whole else ""
    layer = projection_of(module) is not None or is_torch_layer(module)
    if not layer or module._parameters.get("bias") is None:
        return ""
    weight, bias = sharding.role(module) in (COLUMN, CHANNEL), "bias" in sharding.splits
    if weight and not bias:
        return 'the weight is sharded along its outputs and the bias is whole: .shard("bias", axis=0) as well'
    if bias and not weight:
        projection = projection_of(module)
        axis = projection.output if projection else 0
        return f'the bias is sharded and the weight is whole: .shard("weight", axis={axis}) as well'
    return ""
