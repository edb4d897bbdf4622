"""Sharded forward of a module other than a projection: its class's forward on local shards, with collectives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedule.capture import original_class, rebuilt_sequence
from schedule.distributed.communication import collectives
from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.communication.groups import group_rank, group_size
from schedule.distributed.tensor_parallel.contexts import AttentionOverRanks, own_part, refuse_objects
from schedule.distributed.tensor_parallel.experts import Experts, dispatched
from schedule.distributed.tensor_parallel.means import MeansOverRanks
from schedule.distributed.tensor_parallel.parameters import table_of
from schedule.distributed.tensor_parallel.sharded_modules import (
    COLUMN,
    CONVOLUTIONS,
    MEANS,
    OUTPUTS,
    OWN,
    ROW,
    ModuleSharding,
    Sync,
    features_dim,
    incomplete,
    input_names,
)
from schedule.util.errors import ShardError


class ShardedForward:
    """Forward of a class on sharded parameters, with synchronized inputs and outputs.

    Args:
        module: a module of the class. No reference to it is stored.
        sharding: its sharding.
    """

    def __init__(self, module: nn.Module, sharding: ModuleSharding) -> None:
        self.cls, self.sharding = original_class(module), sharding
        self.role, self.features = sharding.role(module), features_dim(module)
        self.missing = incomplete(module, sharding)
        own = {name for table in (module._parameters, module._buffers) for name in table}
        syncs = sorted(sharding.syncs.items(), key=lambda each: each[0].startswith("bwd"))  # nearest the forward
        given = [(sync, key) for key, sync in syncs if not key.startswith((*OUTPUTS, MEANS))]
        self.inputs = [(sync, key.split()[0]) for sync, key in given if sync.argument not in own]
        self.partial = tuple(sync.argument for sync, _ in given if sync.argument in own)
        self.output, self.result = (sharding.syncs.get(mode) for mode in OUTPUTS)
        self._names = input_names(module)
        self.__qualname__ = f"{self.cls.__qualname__}.forward"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.cls.forward)

    @property
    def is_local(self) -> bool:
        """Whether it is the forward of the class on local shards, without communication."""
        inside = self.sharding.experts is not None or self.sharding.context is not None
        return not self.missing and not self.sharding.syncs and not inside

    @property
    def is_fresh(self) -> bool:
        """Whether the result shares memory with no other value: that of a layer, given to no function of the user."""
        return self.role not in (OWN, None) and not any(callable(sync.op) for sync in self.sharding.syncs.values())

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward on this rank's shards."""
        if self.missing:
            raise ShardError(f"a half-sharded module was called: {self.missing}")
        for sync, mode in self.inputs:
            given = partial(self._input, sync, mode)
            args, kwargs = self._with_argument(sync.argument, given, args, kwargs)
        if self.sharding.context is not None:
            refuse_objects({**dict(zip(self._names, args, strict=False)), **kwargs})
        for one in self.sharding.context or ():
            given = partial(own_part, steps=one.steps, axis=one.axis, group=self.sharding.group)
            args, kwargs = self._with_argument(one.argument, given, args, kwargs)
        context = nullcontext() if self.sharding.context is None else AttentionOverRanks(self.sharding.group)
        means = MeansOverRanks(self.sharding.group) if MEANS in self.sharding.syncs else nullcontext()
        with self._own_share(module), context, means:
            if self.role == ROW and isinstance(module, nn.Embedding):
                result = self._looked_up(module, *args, **kwargs)
            elif self.sharding.experts is not None:
                result = self._dispatched(self.sharding.experts, module, *args, **kwargs)
            else:
                result = self.cls.forward(module, *args, **kwargs)
        result = self._reduced(result)
        if self.role == ROW and self.cls in CONVOLUTIONS and module._parameters.get("bias") is not None:
            result = result + self._bias(module._parameters["bias"], result.ndim)  # type: ignore[arg-type]
        if self.result is not None:
            result = on_first_tensor(result, lambda y: collectives.copy_to_tensor_parallel(y, self.sharding.group))
        return result

    def _bias(self, bias: Tensor, rank: int) -> Tensor:
        """Return the bias of a row-parallel convolution, to add to the reduced sum of ``rank`` dimensions.

        After a reduce-scatter each rank adds it to its own part of the sum: its gradient is a partial sum.
        """
        bias = bias.reshape(-1, *[1] * (-self.features - 1))
        if self.output is None or self.output.op != "reduce_scatter":
            return bias
        group, axis = self.sharding.group, self.features if self.output.axis is None else self.output.axis
        bias = collectives.copy_to_tensor_parallel(bias, group)
        if axis % rank != self.features % rank:
            return bias
        begin, end = chunk_bounds(bias.shape[0], group_size(group), group_rank(group))
        return bias[begin:end]

    # -- parameters --------------------------------------------------------------------------------------

    @contextmanager
    def _own_share(self, module: nn.Module) -> Iterator[None]:
        """Replace parameters and buffers by this rank's plain local tensors, and restore them on exit.

        So are sharded ones of submodules that the forward reads itself. What the forward assigns to an unsharded name
        stays.

        Raises:
            ShardError: the forward assigned a sharded parameter or buffer.
        """
        sharded = {*self.sharding.splits, *self.sharding.reads}
        replaced: list[tuple[dict[str, Any], str, str, Any, Any]] = []
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        slots = [(table, name, name) for table in tables for name in table]
        for path in self.sharding.reads:
            inner, _, name = path.rpartition(".")
            slots.append((table_of(module.get_submodule(inner), name), name, path))
        try:
            for table, name, path in slots:
                whole = table[name]
                table[name] = self._share(path, whole)
                replaced.append((table, name, path, whole, table[name]))
            yield
        finally:
            assigned = [path for table, name, path, _, own in replaced if table.get(name) is not own]
            for table, name, path, whole, _ in replaced:
                if path not in assigned or path in sharded:
                    table[name] = whole
        if not sharded.isdisjoint(assigned):
            raise ShardError(
                f"{self.__qualname__} assigns {', '.join(assigned)}, which is sharded",
                fix="change it in place, or leave it whole",
            )

    def _share(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or (name == "bias" and self.role == ROW and self.cls in CONVOLUTIONS):
            return None  # a row-parallel convolution adds its bias to the reduced sum
        if isinstance(tensor, DTensor):
            local, experts = tensor.to_local(), self.sharding.experts
            return local if experts is None else experts.averaged(local)
        if name in self.partial:
            return collectives.copy_to_tensor_parallel(tensor, self.sharding.group)
        return tensor

    def _looked_up(self, module: nn.Module, input: Tensor) -> Any:
        """Look up the embedding rows on this rank, with zeros for the rows on other ranks."""
        split, group = self.sharding.splits["weight"], self.sharding.group
        begin, end = chunk_bounds(split.size, group_size(group), group_rank(group))
        outside = (input < begin) | (input >= end)
        padding = module.padding_idx
        module.padding_idx = None if padding is None or not begin <= padding < end else padding - begin  # type: ignore
        try:
            rows = self.cls.forward(module, (input - begin).masked_fill(outside, 0))
        finally:
            module.padding_idx = padding
        return rows.masked_fill(outside.unsqueeze(-1), 0.0)

    def _dispatched(self, experts: Experts, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Send the tokens to their experts, and compute this rank's experts for those received."""
        bound = inspect.signature(self.cls.forward).bind(module, *args, **kwargs)

        def run(*given: Tensor) -> Any:
            bound.arguments.update(zip(experts.names, given, strict=True))
            return self.cls.forward(*bound.args, **bound.kwargs)

        with experts.counted(module, experts.count // self.sharding.ranks):
            return dispatched(run, experts, self.sharding.group, *[bound.arguments[name] for name in experts.names])

    # -- inputs and outputs ------------------------------------------------------------------------------

    def _with_argument(
        self, argument: str | None, function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with ``function`` applied to one argument, the first if None."""
        name = self._names[0] if argument is None else argument
        at = self._names.index(name) if name in self._names else len(args)
        if at < len(args):
            return (*args[:at], function(args[at]), *args[at + 1 :]), kwargs
        if name in kwargs:
            return args, {**kwargs, name: function(kwargs[name])}
        return args, kwargs

    def _input(self, sync: Sync, mode: str, value: Any) -> Any:
        group = self.sharding.group
        if not isinstance(value, Tensor):
            return value
        if callable(sync.op):
            return collectives.on_gradient(value, sync.op) if mode == "bwd_post" else sync.op(value)
        if mode == "bwd_post":
            return collectives.copy_to_tensor_parallel(value, group)
        axis = self.features if sync.axis is None else sync.axis
        if sync.op == "all_gather":
            return collectives.gather_from_sequence_parallel(value, group, axis)
        return collectives.scatter_to_tensor_parallel(value, group, axis)

    def _reduced(self, result: Any) -> Any:
        return result if self.output is None else on_first_tensor(result, self._output)

    def _output(self, y: Tensor) -> Tensor:
        sync, group = self.output, self.sharding.group
        if sync is None:
            return y
        if callable(sync.op):
            return sync.op(y)
        axis = self.features if sync.axis is None else sync.axis
        if sync.op == "all_reduce":
            return collectives.reduce_from_tensor_parallel(y, group)
        if sync.op == "reduce_scatter":
            return collectives.reduce_scatter_to_sequence_parallel(y, group, axis)
        if sync.op == "scatter":
            return collectives.scatter_to_tensor_parallel(y, group, axis)
        whole = self.sharding.splits["weight"].size if self.role == COLUMN else None
        return collectives.gather_from_tensor_parallel(y, group, axis, whole)


def on_first_tensor(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``result`` with ``function`` applied to its first tensor, the main output of a module.

    Raises:
        ShardError: it is not a tensor, and not a tuple, list or dict with a tensor in it.
    """
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, (tuple, list, dict)):
        items = result.items() if isinstance(result, dict) else enumerate(result)
        at = next((at for at, item in items if isinstance(item, Tensor)), None)
        if at is not None:
            copied: Any = list(result) if isinstance(result, tuple) else copy.copy(result)  # a module may keep it
            copied[at] = function(result[at])
            return rebuilt_sequence(result, copied) if isinstance(result, tuple) else copied
    raise ShardError(
        f"it returns a {type(result).__name__}, in which there is no tensor to synchronize",
        fix="sync the module inside that computes it",
    )
