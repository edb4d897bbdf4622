"""What a forward uses of Python besides its arguments, and a graph cannot: caches, lengths, random numbers."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

from schedule.errors import TraceError


@contextmanager
def results_uncached(module: nn.Module) -> Iterator[None]:
    """Within, what is under ``functools.lru_cache`` runs: what it computed before is no part of a graph.

    Nor would the next call of the model want values without data. That goes for methods, functions of the files that
    the classes are from, and einops. Caches of transformers' own kind are passed by as under ``torch.compile``, in this
    thread.
    """
    classes = _classes(module)
    with ExitStack() as patches:
        for owner in (*classes, *_files(classes, "einops.einops")):
            for name, member in list(vars(owner).items()):
                if isinstance(member, functools._lru_cache_wrapper):
                    patches.enter_context(mock.patch.object(owner, name, member.__wrapped__))
        theirs: Any = sys.modules.get("transformers.pytorch_utils")
        if theirs is not None:
            asked = _answered_here(theirs.is_torchdynamo_compiling)
            patches.enter_context(mock.patch.object(theirs, "is_torchdynamo_compiling", asked))
        yield


def _classes(module: nn.Module) -> set[type]:
    return {cls for child in module.modules() for cls in type(child).__mro__}


def _files(classes: set[type], *further: str) -> list[Any]:
    """The files that ``classes`` are from, but for torch's own."""
    names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")}
    return [sys.modules[name] for name in (*names, *further) if name in sys.modules]


@contextmanager
def lengths_followed(module: nn.Module) -> Iterator[None]:
    """Within, ``len`` and ``range`` in the files that the classes are from leave open what they can.

    ``len(x)`` is ``x.shape[0]``, and a graph with the rounds of ``range(0, n, 128)`` holds for as many rounds.
    """
    with ExitStack() as patches:
        for file in _files(_classes(module)):
            if file.__name__ != "builtins":
                patches.enter_context(mock.patch.object(file, "len", _length, create=True))
                patches.enter_context(mock.patch.object(file, "range", _Range, create=True))
        yield


def _length(value: Any) -> Any:
    """``len(value)``; the first size of a tensor as whoever watches torch's functions gives it."""
    if isinstance(value, torch.Tensor) and value.ndim and torch._C._len_torch_function_stack():
        return value.shape[0]
    return len(value)


class _Ranges(type):
    def __call__(cls, *bounds: Any) -> range:
        """``range(…)``; of a symbolic end only the number of rounds is asked for."""
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        if not isinstance(stop, torch.SymInt) or type(start) is not int or type(step) is not int or step <= 0:
            return range(*bounds)
        rounds = int((stop - start + step - 1) // step)
        return range(start, start + rounds * step, step)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, range)


class _Range(metaclass=_Ranges):
    """Stands for ``range`` in the files of a module that is traced."""


@contextmanager
def masks_broadcast() -> Iterator[None]:
    """Within, in this thread, transformers' functions of masks are given all indices at once, not one by one.

    The result is the same (it is how transformers makes most masks, :func:`sdpa_mask` there); what ``torch.vmap`` does
    cannot be watched.
    """
    theirs: Any = sys.modules.get("transformers.masking_utils")
    if theirs is None:
        yield
        return
    thread, one_by_one, indexing = threading.get_ident(), theirs._vmap_expansion_sdpa, theirs.TransformGetItemToIndex

    def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
        if threading.get_ident() != thread:
            mask: Callable[..., Any] = one_by_one(function)
            return mask
        return lambda *indices: function(*theirs._non_vmap_expansion_sdpa(*indices)).expand(*map(_length, indices))

    def of_scalars() -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = nullcontext() if threading.get_ident() == thread else indexing()
        return block

    with (
        mock.patch.object(theirs, "_vmap_expansion_sdpa", expanded),
        mock.patch.object(theirs, "TransformGetItemToIndex", of_scalars),
    ):
        yield


@contextmanager
def flags_decided() -> Iterator[None]:
    """Within, in this thread, attention is told whether it is causal by a plain bool, which guards the graph.

    ``length > 1 and mask is None`` is a comparison of sizes where the first part is false, and torch takes none.
    """
    thread, attention = threading.get_ident(), torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def decided(*args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.get_ident() == thread and isinstance(kwargs.get("is_causal"), torch.SymBool):
            kwargs["is_causal"] = bool(kwargs["is_causal"])
        return attention(*args, **kwargs)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", decided):
        yield


@contextmanager
def modules_unmoved(guard_dtype: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within, in this thread, ``module.to(…)`` gives the module where nothing has to be moved, else it is refused.

    Args:
        guard_dtype: is given each tensor whose dtype was asked for.
    """
    thread, move = threading.get_ident(), nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if threading.get_ident() != thread:
            return move(module, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        for tensor in (*module.parameters(), *module.buffers()):
            cast = dtype is not None and tensor.is_floating_point()
            if (cast and tensor.dtype != dtype) or (device is not None and tensor.device != device):
                raise TraceError(
                    f"the forward moves a module to {dtype or device}, which changes its parameters",
                    fix="move it before the model is scheduled",
                )
            if cast:
                guard_dtype(tensor)
        return module

    with mock.patch.object(nn.Module, "to", to):
        yield


def _answered_here(question: Callable[[], bool]) -> Callable[[], bool]:
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread or question()


@contextmanager
def random_numbers_refused() -> Iterator[None]:
    """Refuse a forward that draws from Python's or numpy's random numbers: a graph would repeat the number seen.

    Raises:
        TraceError: one was drawn within; the random state is given back.
    """
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)
    before = pickle.dumps(arrays)
    try:
        yield
        now = None if numpy is None else numpy.random.get_state(legacy=False)
        if random.getstate() != python or pickle.dumps(now) != before:
            raise TraceError(
                "the forward draws a random number outside torch, which a graph would repeat for ever",
                fix="draw it with torch, or keep the module that draws it a leaf (`leaves=(…,)`)",
            )
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
