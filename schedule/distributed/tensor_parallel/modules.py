"""What a sharded module is: which of its parameters are shared out, and which collectives it makes.

A projection (``nn.Linear``, transformers' ``Conv1D``) is *column-parallel* when the outputs of its weight are
shared out, and *row-parallel* when the inputs are; so is a convolution. An embedding with the vocabulary shared out
is row-parallel: each rank looks up what it has, and the results are added up. A batch norm, or a convolution in
groups, works on *channels* of its own; any other module with parameters of its own computes on its share of them.
What a module takes and gives are plain local tensors, as in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from schedule.capture.tracing.own_forward import is_basic, is_conv1d
from schedule.capture.tracing.specialization import original_class
from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.tensor_parallel.linears import computes_linear

SHARDING = "_schedule_sharding"

Function = Callable[[Tensor], Tensor]
OUTPUTS = ("fwd_post", "bwd_pre")
"""Modes that synchronize what a module gives, or its gradient; the others what it takes."""
COLUMN, ROW, CHANNEL, OWN = "column", "row", "channel", "own"
LEFT = "dtensor"
"""The collective that is none: outputs stay where they are, in a DTensor."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
    biased = module._parameters.get("bias") is not None
    if isinstance(module, nn.Linear) and computes_linear(cls, biased):  # type: ignore[arg-type]
        return LINEAR
    return CONV1D if is_conv1d(cls) else None


def stays_call(module: nn.Module) -> bool:
    """Whether ``module`` stays a call where graphs are flattened to be planned."""
    return is_basic(module) or projection_of(module) is not None


def is_torch_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's own layers, whose parameters have known meanings."""
    return original_class(module).__module__.startswith("torch.nn.")


def role_of(module: nn.Module, name: str, axis: int) -> str | None:
    """What sharing out ``axis`` of the parameter ``name`` makes of ``module``; None if its forward could not follow."""
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
    """Which dimension of what ``module`` takes and gives are the features, from the end."""
    if original_class(module) in CONVOLUTIONS:
        return -1 - len(module.kernel_size)  # type: ignore[arg-type]
    return -1


@dataclass(frozen=True)
class Split:
    """How one parameter is shared out.

    Attributes:
        axis: along which dimension.
        size: of the whole dimension.
        parts: each of so many equal packed parts is shared out.
        replicas: so many ranks after one another have the same share; the parameter itself stays whole.
        common: so many of the last are every rank's; the parameter itself stays whole.
    """

    axis: int
    size: int
    parts: int = 1
    replicas: int = 1
    common: int = 0

    @property
    def stays_whole(self) -> bool:
        """Whether every rank keeps the whole parameter, and computes with its share."""
        return self.replicas > 1 or self.common > 0

    def local(self, ranks: int, rank: int) -> int:
        """The size on one rank."""
        if self.parts > 1:
            return self.size // ranks
        begin, end = chunk_bounds(self.size - self.common, ranks // self.replicas, rank // self.replicas)
        return end - begin + self.common

    def __str__(self) -> str:
        packed = f", {self.parts} parts" if self.parts > 1 else ""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"axis {self.axis}{packed}{replicas}" + (f", {self.common} common" if self.common else "")


def own_features(module: nn.Module, name: str, split: Split, ranks: int, rank: int) -> dict[str, int]:
    """Attributes of ``module`` that count what is shared out with its parameter ``name``, and what they are here."""
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
        op: which.
        axis: the dimension that is shared out.
        argument: the input, or parameter, of a module that is no projection; None for its only one.
    """

    op: str | Function
    axis: int | None = None
    argument: str | None = None

    def __str__(self) -> str:
        return self.op if isinstance(self.op, str) else getattr(self.op, "__name__", "a function")


@dataclass(frozen=True)
class ModuleSharding:
    """How one module is shared out; kept on the module.

    Attributes:
        group: name of the process group.
        ranks: how many ranks share.
        splits: parameter name → :class:`Split`.
        syncs: mode, and argument if there is one (``"fwd_pre hidden_states"``) → :class:`Sync`.
    """

    group: str
    ranks: int
    splits: Mapping[str, Split] = field(default_factory=dict)
    syncs: Mapping[str, Sync] = field(default_factory=dict)

    def with_split(self, name: str, split: Split) -> ModuleSharding:
        """The same with one more parameter shared out."""
        return replace(self, splits={**self.splits, name: split})

    def with_sync(self, mode: str, sync: Sync) -> ModuleSharding:
        """The same with one more synchronization."""
        return replace(self, syncs={**self.syncs, sync_key(mode, sync.argument): sync})

    def role(self, module: nn.Module) -> str | None:
        """:data:`COLUMN`, :data:`ROW`, :data:`CHANNEL` or :data:`OWN`; None while the weight is whole."""
        if projection_of(module) is not None or is_torch_layer(module):
            split = self.splits.get("weight")
            return None if split is None else role_of(module, "weight", split.axis)
        return OWN if self.splits else None

    def reduces_gradients(self, module: nn.Module) -> bool:
        """Whether gradients of some input of ``module`` are added up over the ranks."""
        inputs = [sync for key, sync in self.syncs.items() if not key.startswith(OUTPUTS)]
        return any(s.op in ("all_reduce", "all_gather") and s.argument not in module._parameters for s in inputs)


def sync_key(mode: str, argument: str | None) -> str:
    """How :attr:`ModuleSharding.syncs` finds a synchronization."""
    return mode if argument is None else f"{mode} {argument}"


def sharding_of(module: nn.Module) -> ModuleSharding | None:
    """How ``module`` is shared out, or None."""
    return vars(module).get(SHARDING)


def is_sharded(root: nn.Module) -> bool:
    """Whether any module of ``root`` is shared out: then running it takes all ranks."""
    return any(sharding_of(module) is not None for module in root.modules())


def incomplete(module: nn.Module, sharding: ModuleSharding) -> str:
    """What is missing before ``module`` can run; "" if nothing is."""
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
