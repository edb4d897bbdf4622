"""Module-by-module weight initialization for a model on the meta device.

Each tensor is initialized as a whole tensor, and each rank keeps only its shard. All ranks draw all random numbers in
the order a single device would, so the same seed gives the same weights on any number of ranks. A first pass on tensors
without data finds out which tensors each module's initialization writes, since it may reach into submodules (GPT-2's
attention scales its projection's weight). A tensor is whole from the first module that writes it to the last one, so a
rank needs memory for its shards plus about the largest module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fused.torch_internals.modes import TorchDispatchMode
from fused.torch_internals.schemas import written_arguments
from fused.torch_internals.tensor_kinds import FakeTensorMode, storage_of
from schedule.distributed.checkpoint.slots import Slot
from schedule.util.errors import NotApplicable, ScheduleError
from schedule.util.generators import generator_states, restore_generators
from schedule.util.internal_errors import InternalError, perform
from schedule.util.user_code import UserCodeError, user_code

Initialize = Callable[[nn.Module], Any]


def initialize(
    root: nn.Module,
    slots: Sequence[Slot],
    init: Initialize | None,
    device: torch.device,
    own: Collection[int] | None = None,
) -> None:
    """Initialize every tensor in ``slots``.

    Args:
        root: the model.
        slots: the tensors without data.
        init: called with each module, children first, as ``nn.Module.apply`` does. None selects each module's default
            initializer: ``_init_weights`` of the enclosing transformers model, else ``reset_parameters``.
        device: device of the initialized tensors.
        own: ids of the tensors this rank keeps; the others are drawn and discarded. None keeps all.

    Raises:
        NotApplicable: no module's initialization writes some of the tensors.
    """
    ways = {module: init or way for module, way in _own_ways(root)}
    writes = _written(root, ways, slots)
    _refuse_unwritten(slots, writes)
    last = {slot: module for module, written in writes.items() for slot in written}
    whole: dict[Slot, Tensor] = {}
    scratch, lasting = _Scratch(device), partial(torch.empty, device=device)
    try:
        for module, written in writes.items():
            for slot in written:
                if slot not in whole:
                    stays_whole = not slot.layout.indices and (own is None or id(slot.tensor) in own)
                    whole[slot] = slot.allocate(lasting if stays_whole else scratch.take)
            with torch.no_grad():
                ways[module](module)
            for slot in written:
                if last[slot] is module:
                    made, whole[slot] = whole[slot].detach(), slot.tensor
                    if own is None or id(slot.tensor) in own:
                        slot.fill(slot.layout.local(made))
                    else:
                        slot.put_back()
                    scratch.give_back(made)
    finally:
        for slot in whole:
            slot.put_back()


class _Scratch:
    """Reusable memory for temporarily whole tensors, since freeing each one would fragment memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, reusing the smallest free buffer large enough."""
        size = torch.Size(shape).numel() * dtype.itemsize
        fitting = sorted((buffer for buffer in self._free if len(buffer) >= size), key=len)
        buffer = fitting[0] if fitting else torch.empty(size, dtype=torch.uint8, device=self.device)
        self._free = [other for other in self._free if other is not buffer]
        self._taken[storage_of(buffer)] = buffer
        return buffer[:size].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Release the memory of ``tensor`` for reuse if :meth:`take` returned it."""
        buffer = self._taken.pop(storage_of(tensor), None)
        if buffer is not None:
            self._free.append(buffer)


def _own_ways(root: nn.Module) -> Iterator[tuple[nn.Module, Initialize]]:
    """Yield each module once with its initializer, children first."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, models_own: Initialize | None) -> Iterator[tuple[nn.Module, Initialize]]:
        if module in seen:
            return
        seen.add(module)
        models_own = getattr(module, "_init_weights", models_own)
        for child in module.children():
            yield from walk(child, models_own)
        yield module, models_own or _reset

    return walk(root, None)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


# -- written tensors ------------------------------------------------------------------------------------------


def _written(root: nn.Module, ways: dict[nn.Module, Initialize], slots: Sequence[Slot]) -> dict[nn.Module, list[Slot]]:
    """Return the slots written by each module's initialization, for modules with any, without changing the model."""
    watching = _Writes()
    found: dict[nn.Module, list[Slot]] = {}
    states = generator_states(root)
    try:
        with without_data(root) as empty:
            numbers = {storage_of(slot.allocate(empty)): slot for slot in slots}
            below = {id(table): table for slot in slots for table, _ in slot.owners}
            for module, way in ways.items():
                tables = [t for m in module.modules() for t in (m._parameters, m._buffers) if id(t) in below]
                if not tables:
                    continue
                watching.seen.clear()
                try:
                    with user_code(), torch.no_grad(), watching:
                        way(module)
                except InternalError:
                    raise
                except (ScheduleError, UserCodeError):  # it may need data: assume it writes every tensor below
                    watching.seen |= dict.fromkeys(
                        storage_of(t) for table in tables for t in table.values() if t is not None
                    )
                written = [numbers[number] for number in watching.seen if number in numbers]
                if written:
                    found[module] = written
    finally:
        restore_generators(states)
    return found


def _refuse_unwritten(slots: Sequence[Slot], writes: dict[nn.Module, list[Slot]]) -> None:
    written = {slot for some in writes.values() for slot in some}
    missing = [slot.paths[0] for slot in slots if slot not in written]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise NotApplicable(
            f"nothing initializes {', '.join(missing[:5])}{more}",
            fix="build(sch, init_weights=function): called with each module, it fills what is directly in it",
        )


@contextmanager
def without_data(root: nn.Module) -> Iterator[Callable[..., Tensor]]:
    """Temporarily replace every tensor of the model with a fake tensor.

    Tied tensors stay tied. The context manager yields the function that creates the fake tensors.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # torch.nn.init skips meta tensors entirely

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with fake:
            return torch.empty(shape, dtype=dtype)

    tables: list[dict[str, Any]] = [t for module in root.modules() for t in (module._parameters, module._buffers)]
    before = [dict(table) for table in tables]
    twins: dict[int, Tensor] = {}
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                twin = empty(tensor.shape, tensor.dtype)
                made = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
                table[name] = twins.setdefault(id(tensor), made)
    try:
        yield empty
    finally:
        for table, values in zip(tables, before, strict=True):
            table.update(values)


class _Writes(TorchDispatchMode):
    """Dispatch mode recording the storages written by operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen |= dict.fromkeys(map(storage_of, written_arguments(func, args, kwargs)))
        return perform(func, *args, **kwargs)
