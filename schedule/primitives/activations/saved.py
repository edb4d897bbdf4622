"""What each module of a model keeps for its backward pass, and what running it again would cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from fused.torch_internals.modes import TorchDispatchMode
from schedule.capture.recording.calls import intercepted_calls
from schedule.capture.recording.recording import as_call, undisturbed
from schedule.capture.recording.structure import tensors
from schedule.util.tensors import local_part

FLOPS_PER_BYTE = 50
"""Arithmetic that takes as long as moving one byte: an accelerator's 100 TFLOP/s over its 2 TB/s."""


@dataclass
class ModuleCost:
    """One module in one forward of training.

    Attributes:
        saved: storages that operations inside keep for the backward pass, number → bytes.
        inputs: storages of tensors that the calls received.
        work: of the forward, in bytes moved; arithmetic counts as :data:`FLOPS_PER_BYTE` says.
    """

    saved: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    work: float = 0.0


class SavedBytes:
    """What one forward of training keeps.

    Attributes:
        modules: path → :class:`ModuleCost`, with all that is inside.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleCost] = {}
        self.savers: dict[int, set[str]] = {}
        self.sizes: dict[int, int] = {}

    def kept(self, recomputed: frozenset[str] = frozenset()) -> int:
        """Bytes kept if the modules at these paths, none inside another, are computed again."""
        paths = frozenset(f"{path}." for path in recomputed)
        needed = {
            number
            for number, savers in self.savers.items()
            if any(not any(f"{saver}.".startswith(path) for path in paths) for saver in savers)
        }
        for path in recomputed:
            needed |= self.modules[path].inputs.keys()
        return sum(self.sizes[number] for number in needed)


def measure_saved(model: nn.Module, example_inputs: Any) -> SavedBytes:
    """Run ``model`` forward once as in training; it, the random state and gradients stay as they were.

    Each storage counts once; parameters and buffers do not count.

    Args:
        model: the whole model; on the meta device nothing is computed.
        example_inputs: as for ``create_schedule``.
    """
    watch = _Watch(model)
    args, kwargs = as_call(example_inputs)
    with undisturbed(model, args, kwargs), torch.enable_grad(), intercepted_calls(model, watch.on_call):
        model.train()
        with saved_tensors_hooks(watch.on_save, lambda tensor: tensor), watch.counting:
            model(*args, **kwargs)
    return watch.seen


class _Watch:
    """Follows one forward: which module is running, what is saved, what is received."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = SavedBytes()
        self._paths = {module: path for path, module in model.named_modules()}
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._alive: list[Any] = []  # numbers of storages are not given out again meanwhile
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
    """Reports the work of every operation: arithmetic of products, bytes of results of all."""

    def __init__(self, worked: Any) -> None:
        super().__init__()
        self.worked = worked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            work = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors(result)))
            flops = flop_registry.get(func._overloadpacket)
            if flops is not None:
                work += flops(*args, **(kwargs or {}), out_val=result) / FLOPS_PER_BYTE
            self.worked(work)
        return result
