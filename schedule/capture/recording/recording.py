"""The calls of all submodules in one forward of the root, by metadata.

A tensor becomes a :class:`TensorSpec`, and a cache becomes a copy of itself without data. For each module, the first
call of each signature is saved.
"""

from __future__ import annotations

import copy
import enum
import numbers
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fused.linear import linear
from fused.torch_internals.modes import DisableTorchFunction, EnableTorchFunction
from fused.torch_internals.tensor_kinds import FakeTensor, FakeTensorMode, ObservingFakeMode
from fused.torch_internals.torch_modules import are_parametrizations_cached
from schedule.capture.recording.data_dependence import Seen, depends_on_data, writes_number
from schedule.capture.recording.interception import intercepted_calls
from schedule.capture.recording.structure import Path, TensorSpec, leaves, map_structure, tensors
from schedule.capture.snapshots.contents import entries_as_after
from schedule.capture.snapshots.run_effects import Entry, modes_restored
from schedule.capture.snapshots.snapshot import Snapshot, restored
from schedule.util.errors import NotApplicable
from schedule.util.generators import generator_states, restore_generators
from schedule.util.internal_errors import perform
from schedule.util.user_code import UserCodeError, refused_batch, user_code

MAX_SIGNATURES = 4
_IMMUTABLE: tuple[type, ...] = (numbers.Number, str, bytes, type(None), range, enum.Enum)
_IMMUTABLE += (torch.dtype, torch.device, torch.Size)


class Opaque:
    """A stateful object, such as a cache: its structure with data-free tensors."""

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": None}  # data-free tensors live in one process only

    def __repr__(self) -> str:
        return f"Opaque({type(self.snapshot).__name__})"


@dataclass(frozen=True)
class Call:
    """Metadata of one call of a module.

    Attributes:
        args: positional arguments; tensors are specs, caches are :class:`Opaque`.
        kwargs: keyword arguments, likewise.
        output: the result, likewise.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def key(self) -> tuple[Any, ...]:
        """Return the key of the signature: structure and constants, dtypes and ranks, not sizes."""
        return tuple((path, _kind(leaf)) for path, leaf in leaves((self.args, self.kwargs)))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return (leaf.dtype, leaf.ndim)
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)


@dataclass
class Recording:
    """The calls of each module of one root.

    Attributes:
        fake_mode: the mode of all data-free tensors of this recording.
        calls: the first call of each module and each signature, in order of appearance.
        computed: module → functions of torch that it called itself, not through its submodules.
        seen: module → data-dependent results of its own calls.
        read: module → positions in its output of the tensors read after it returned, or returned by the root. Only for
            modules that return several tensors.
        traced: graphs already made in this recording, by structural key.
        returned: (module, mode) → traced calls and their results.
        assumed: module → metadata of the result of its calls, whatever they receive.
        changing: modules that change a tensor they are given in place.
        grad_enabled: whether forwards are traced with gradients enabled.
        set_by_run: attributes and entries of dicts set by the run and restored after it.
    """

    fake_mode: ObservingFakeMode = field(default_factory=lambda: ObservingFakeMode(allow_non_fake_inputs=True))
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    computed: dict[nn.Module, set[Any]] = field(default_factory=dict)
    seen: dict[nn.Module, Seen] = field(default_factory=dict)
    read: dict[nn.Module, set[Path]] = field(default_factory=lambda: defaultdict(set), repr=False)
    traced: dict[Any, list[Any]] = field(default_factory=dict, repr=False)
    returned: dict[tuple[nn.Module, bool], list[tuple[Call, Any]]] = field(
        default_factory=lambda: defaultdict(list), repr=False
    )
    assumed: dict[nn.Module, Any] = field(default_factory=dict, repr=False)
    changing: set[nn.Module] = field(default_factory=set, repr=False)
    grad_enabled: bool = True
    set_by_run: list[Entry] = field(default_factory=list, repr=False)
    _data_free: Any = field(default_factory=WeakIdKeyDictionary, repr=False)

    def as_after_run(self) -> AbstractContextManager[None]:
        """Set in the block everything that the run set, such as lazily created caches, as it is for every later run."""
        return entries_as_after(self.set_by_run)

    def describe(self, value: Any) -> Any:
        """Return ``value`` without data."""
        return map_structure(value, self._describe_leaf)

    def _describe_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return TensorSpec.of(leaf)
        if isinstance(leaf, _IMMUTABLE) or callable(leaf) or isinstance(leaf, nn.Module):
            return leaf
        return Opaque(self.snapshot(leaf))

    def snapshot(self, value: Any) -> Any:
        """Return a deep copy of ``value`` with data-free tensors, or ``value`` itself if it cannot be copied."""
        try:
            with EnableTorchFunction(), _DataFreeCopies(self.fake_mode, self._data_free):
                return copy.deepcopy(value)
        except Exception:  # whatever a class raises that is not made to be copied, in modes that it does not know
            return value

    def materialize(self, value: Any) -> Any:
        """Return ``value`` with data-free tensors in place of specs, the inverse of :meth:`describe`."""
        return map_structure(value, self._materialize_leaf)

    def _materialize_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            with self.fake_mode:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return self.snapshot(leaf.snapshot) if isinstance(leaf, Opaque) else leaf

    def add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Save a call if its signature is new."""
        known = self.calls.setdefault(module, [])
        if len(known) >= MAX_SIGNATURES:
            return
        call = Call(args, kwargs, output)
        if all(call.key() != other.key() for other in known):
            known.append(call)


class _WatchingFunctions(TorchFunctionMode):
    """Mode to record the functions of torch that each module calls itself, and their data-dependent results."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._now: set[Any] = set()
        self._seen = Seen()
        self._returned: Any = WeakIdKeyDictionary()  # tensor → the modules that returned it, and where

    def returned(self, module: nn.Module, output: Any) -> None:
        """Record from now on which tensors of ``output``, returned by ``module``, are read."""
        found = [(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
        for path, leaf in found if len(found) > 1 else ():
            self._returned.setdefault(leaf, []).append((module, path))

    def reads(self, values: Any) -> None:
        """Record that ``values`` are read outside of the modules that returned them."""
        for tensor in tensors(values) if self._returned else ():
            for module, path in self._returned.get(tensor, ()):
                self._recording.read[module].add(path)

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Attribute the calls in the block to ``module``."""
        before = self._now, self._seen
        self._now = self._recording.computed.setdefault(module, set())
        self._seen = self._recording.seen.setdefault(module, Seen())
        try:
            yield
        finally:
            self._now, self._seen = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now.add(func)
        kwargs = kwargs or {}
        self.reads((args, kwargs))
        result = _computed(func, args, kwargs)
        if writes_number(func, args):
            self._seen.add(torch.Tensor.item, args[0].item())
        if depends_on_data(func, args, kwargs):
            self._seen.add(func, self._recording.describe(result))
        return result


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of ``func``. Products use the faster library, because no record depends on the last bits."""
    if func is F.linear:
        return linear(*args, **kwargs)
    if func is torch.addmm and not kwargs and args[0].ndim == 1:
        bias, x, matrix = args
        return linear(x, matrix.t(), bias)
    return perform(func, *args, **kwargs)


class _DataFreeCopies(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` of a tensor returns a data-free tensor."""

    def __init__(self, fake_mode: FakeTensorMode, known: Any) -> None:
        super().__init__()
        self.fake_mode, self.known = fake_mode, known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            with DisableTorchFunction():
                return perform(func, *args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._data_free(tensor)
        return memo[id(tensor)]

    def _data_free(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor  # its storage must never be read
        if tensor not in self.known:  # a cache goes to every layer, with the tensors of all layers before
            with DisableTorchFunction(), self.fake_mode:
                self.known[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self.known[tensor]


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` for a model from a dict, a tuple or a single tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def record(root: nn.Module, batch: Any) -> Recording:
    """Run ``root`` once in eval mode and record the calls of all submodules.

    All state is restored afterwards: see :func:`undisturbed`.

    Args:
        root: the model.
        batch: a dict of keyword arguments, a tuple of positional ones, or one tensor.

    Raises:
        NotApplicable: the model raises for these inputs; its error is the cause.
    """
    return recorded(root, None, *as_call(batch))


def recorded(
    root: nn.Module, forward: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Recording:
    """Record one call, as :func:`record` does.

    Args:
        root: the model.
        forward: its forward, unbound, to run in place of a call of ``root``; None for the call.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        NotApplicable: the model raises for these inputs; its error is the cause.
    """
    recording = Recording()
    watching = _WatchingFunctions(recording)

    def keep(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with DisableTorchFunction():  # describing reads shapes, which is not a read by the model
            received = recording.describe(args), recording.describe(kwargs)
            versions = [(given, given._version) for given in tensors((args, kwargs)) if not given.is_inference()]
        with watching.inside(module):
            output = perform(call, *args, **kwargs)
        with DisableTorchFunction():
            if any(given._version != version for given, version in versions):
                recording.changing.add(module)
            recording.add(module, *received, recording.describe(output))
        watching.returned(module, output)
        return output

    def run() -> Any:
        return root(*args, **kwargs) if forward is None else keep(root, partial(forward, root), args, kwargs)

    with undisturbed(root, args, kwargs) as before, torch.no_grad(), intercepted_calls(root, keep):
        root.eval()
        try:
            with user_code(), watching:
                watching.reads(run())
            recording.set_by_run = before.changed_entries()
        except UserCodeError as failed:
            raise refused_batch(root, "the model refused the example inputs", failed) from failed.error
    return recording


@contextmanager
def undisturbed(root: nn.Module, *inputs: Any) -> Iterator[Snapshot]:
    """Restore all state after the block, also if it raises.

    Flags, buffers, plain attributes and everything else reachable from ``root`` and ``inputs`` are restored, and so are
    random generators, torch's modes and sharded parameters.

    Args:
        root: the model.
        inputs: its inputs.

    Yields:
        A snapshot of the state before the block.

    Raises:
        NotApplicable: the block changed something that cannot be restored, or parametrizations are cached.
    """
    if are_parametrizations_cached():
        raise NotApplicable(
            "torch.nn.utils.parametrize.cached() is active, and would keep tensors without data",
            fix="schedule the model outside of that block",
        )
    for _, state in _sharded(root):
        state._lazy_init()  # else the first forward registers hooks, which are not leftovers
    flags = [(module, module.training) for module in root.modules()]
    generators = generator_states(root)
    with modes_restored(), restored({"self": root, "example inputs": inputs}) as before:
        try:
            yield before
        finally:
            for module, training in flags:
                module.training = training
            restore_generators(generators)
            for sharded, _ in _sharded(root):
                sharded.reshard()  # outside a step, `parameters()` are the sharded ones


def is_fully_sharded(module: nn.Module) -> bool:
    """Check whether ``fully_shard`` was applied to ``module`` itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _sharded(root: nn.Module) -> list[tuple[Any, Any]]:
    """Return the modules in ``root`` sharded by ``fully_shard``, outer ones first, with torch's states of them."""
    found: list[tuple[Any, Any]] = []
    for module in root.modules():
        if is_fully_sharded(module):
            with suppress(ValueError, RuntimeError):  # a copy that is traced has no state
                found.append((module, module._get_fsdp_state()))  # type: ignore[operator]
    return found
