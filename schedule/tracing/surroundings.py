"""What a forward uses of Python besides its arguments, and a graph cannot: caches of results, random numbers."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from schedule.errors import TraceError


@contextmanager
def results_uncached(module: nn.Module) -> Iterator[None]:
    """Within, what is under ``functools.lru_cache`` runs: what it computed before is no part of a graph.

    Nor would the next call of the model want values without data. That goes for methods, functions of the files that
    the classes are from, and einops. Caches of transformers' own kind are passed by as under ``torch.compile``, in this
    thread.
    """
    classes = {cls for child in module.modules() for cls in type(child).__mro__}
    names = {cls.__module__ for cls in classes if not cls.__module__.startswith("torch.")} | {"einops.einops"}
    files = [sys.modules[name] for name in names if name in sys.modules]
    with ExitStack() as patches:
        for owner in (*classes, *files):
            for name, member in list(vars(owner).items()):
                if isinstance(member, functools._lru_cache_wrapper):
                    patches.enter_context(mock.patch.object(owner, name, member.__wrapped__))
        theirs: Any = sys.modules.get("transformers.pytorch_utils")
        if theirs is not None:
            asked = _answered_here(theirs.is_torchdynamo_compiling)
            patches.enter_context(mock.patch.object(theirs, "is_torchdynamo_compiling", asked))
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
    try:
        yield
        now = None if numpy is None else numpy.random.get_state(legacy=False)
        if random.getstate() != python or repr(now) != repr(arrays):
            raise TraceError(
                "the forward draws a random number outside torch, which a graph would repeat for ever",
                fix="draw it with torch, or keep the module that draws it a leaf (`leaves=(…,)`)",
            )
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
