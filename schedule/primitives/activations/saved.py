"""Bytes kept for backward by each module of a model, and the cost of its recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from fused.sharding import local_part
from fused.torch_internals.modes import TorchDispatchMode
from schedule.capture import as_call, intercepted_calls, tensors, undisturbed
from schedule.util.internal_errors import perform

FLOPS_PER_BYTE = 50
"""FLOPs in the time to move one byte: an accelerator's 100 TFLOP/s over its 2 TB/s."""


@dataclass
class ModuleCost:
    """Cost of one module in one training forward.

    Attributes:
        saved: storages kept for the backward pass by operations inside, storage number → bytes.
        inputs: storages of the tensors passed to its calls, storage number → bytes.
        work: work of the forward in bytes moved; FLOPs are converted by :data:`FLOPS_PER_BYTE`.
    """

    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    work: float = 0.0


class SavedBytes:
    """Tensors kept for backward by one training forward.

    Attributes:
        modules: path → :class:`ModuleCost`, including submodules.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleCost] = {}
        self.savers: dict[int, set[str]] = {}
        self.sizes: dict[int, int] = {}

    def saved(self, recomputed: frozenset[str] = frozenset()) -> int:
        """Return the bytes saved if the modules at these paths, none inside another, are recomputed."""
        paths = frozenset(f"{path}." for path in recomputed)
        needed = {
            number
            for number, savers in self.savers.items()
            if any(not any(f"{saver}.".startswith(path) for path in paths) for saver in savers)
        }
        for path in recomputed:
            needed |= self.modules[path].inputs.keys()
        return sum(self.sizes[number] for number in needed)


def measure_saved(model: nn.Module, batch: Any) -> SavedBytes:
    """Run one training forward of ``model`` and measure the tensors it saves for backward.

    Model, random state and gradients do not change. Each storage counts once; parameters and buffers do not count.

    Args:
        model: the whole model; on the meta device nothing is computed.
        batch: as for ``create_schedule``.
    """
    watch = _Watch(model)
    args, kwargs = as_call(batch)
    with undisturbed(model, args, kwargs), torch.enable_grad(), intercepted_calls(model, watch.on_call):
        model.train()
        with saved_tensors_hooks(watch.on_save, lambda tensor: tensor), watch.counting:
            model(*args, **kwargs)
    return watch.seen


class _Watch:
    """Observer of one forward: the running modules, the saved tensors and the inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = SavedBytes()
        self._paths = {module: path for path, module in model.named_modules()}
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._alive: list[Any] = []  # keeps the addresses of storages from being reused meanwhile
        self._running: list[str] = []
        self.counting = _Counting(self._worked)

    def on_call(self, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[module]
        cost = self.seen.modules.setdefault(path, ModuleCost())
        for tensor in tensors((args, kwargs)):
            self._note(tensor, cost.inputs)
        with self._inside(path):
            return call(*args, **kwargs)

    @contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        self._running.append(path)
        try:
            yield
        finally:
            self._running.pop()

    def on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._note(tensor)
        if number is not None:
            for path in self._running:
                self.seen.modules[path].saved[number] = self.seen.sizes[number]
            self.seen.savers.setdefault(number, set()).add(self._running[-1] if self._running else "")
        return tensor

    def _note(self, tensor: torch.Tensor, table: dict[int, int] | None = None) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        storage = local_part(tensor).untyped_storage()
        if storage._cdata in self._own:
            return None
        self._alive.append(storage)
        self.seen.sizes[storage._cdata] = storage.nbytes()
        if table is not None:
            table[storage._cdata] = storage.nbytes()
        return storage._cdata

    def _worked(self, work: float) -> None:
        for path in self._running:
            self.seen.modules[path].work += work


class _Counting(TorchDispatchMode):
    """Dispatch mode to report each operation's work: bytes of its results, plus FLOPs if torch has a formula."""

    def __init__(self, worked: Any) -> None:
        super().__init__()
        self.worked = worked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = perform(func, *args, **(kwargs or {}))
        if not func.is_view:
            work = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors(result)))
            flops = flop_registry.get(func._overloadpacket)
            if flops is not None:
                work += flops(*args, **(kwargs or {}), out_val=result) / FLOPS_PER_BYTE
            self.worked(work)
        return result
