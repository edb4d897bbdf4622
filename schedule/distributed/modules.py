"""What a sharded module is: which of its parameters are shared out, and which collectives it makes.

A projection (``nn.Linear``, transformers' ``Conv1D``) is *column-parallel* when the outputs of its weight are
shared out, and *row-parallel* when the inputs are. What it takes and gives are plain local tensors, as in
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from schedule.tracing.specialisation import original_class

SHARDING = "_schedule_sharding"

Function = Callable[[Tensor], Tensor]
COLUMN, ROW = "column", "row"


@dataclass(frozen=True)
class Projection:
    """How a kind of module multiplies: the weight's axes, and the attributes that hold the sizes.

    Attributes:
        output: axis of the weight along the outputs.
        input: axis of the weight along the inputs.
        out_features: attribute with the number of outputs.
        in_features: attribute with the number of inputs.
        transposed: the weight is ``[out, in]``.
    """

    output: int
    input: int
    out_features: str
    in_features: str
    transposed: bool


LINEAR = Projection(0, 1, "out_features", "in_features", True)
CONV1D = Projection(1, 0, "nf", "nx", False)


def projection_of(module: nn.Module) -> Projection | None:
    """How ``module`` multiplies, None if it is no plain projection; a scheduled one counts as what it was."""
    cls = original_class(module)
    if cls is nn.Linear:
        return LINEAR
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return CONV1D
    return None


@dataclass(frozen=True)
class Split:
    """How one parameter is shared out: along ``axis``, in each of ``parts`` equal packed parts."""

    axis: int
    parts: int = 1


@dataclass(frozen=True)
class Sync:
    """One synchronisation of a module: a collective by name, or a function of the tensor."""

    op: str | Function
    axis: int | None = None

    def __str__(self) -> str:
        return self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "a function")


@dataclass(frozen=True)
class ModuleSharding:
    """How one module is shared out; kept on the module.

    Attributes:
        group: name of the process group.
        ranks: how many ranks share.
        splits: parameter name → :class:`Split`.
        syncs: mode → :class:`Sync`.
    """

    group: str
    ranks: int
    splits: Mapping[str, Split] = field(default_factory=dict)
    syncs: Mapping[str, Sync] = field(default_factory=dict)

    def with_split(self, name: str, split: Split) -> ModuleSharding:
        """The same with one more parameter shared out."""
        return replace(self, splits={**self.splits, name: split})

    def with_sync(self, mode: str, sync: Sync) -> ModuleSharding:
        """The same with one more synchronisation."""
        return replace(self, syncs={**self.syncs, mode: sync})

    def role(self, module: nn.Module) -> str | None:
        """:data:`COLUMN`, :data:`ROW`, or None while the weight is whole."""
        projection, split = projection_of(module), self.splits.get("weight")
        if projection is None or split is None:
            return None
        return COLUMN if split.axis == projection.output else ROW


def sharding_of(module: nn.Module) -> ModuleSharding | None:
    """How ``module`` is shared out, or None."""
    return vars(module).get(SHARDING)


def incomplete(module: nn.Module, sharding: ModuleSharding) -> str:
    """What is missing before ``module`` can run; "" if nothing is."""
    if module._parameters.get("bias") is None:
        return ""
    weight, bias = sharding.role(module) == COLUMN, "bias" in sharding.splits
    if weight and not bias:
        return 'the weight is sharded along its outputs and the bias is whole: .shard("bias", axis=0) as well'
    if bias and not weight:
        projection = projection_of(module)
        axis = projection.output if projection else 0
        return f'the bias is sharded and the weight is whole: .shard("weight", axis={axis}) as well'
    return ""
