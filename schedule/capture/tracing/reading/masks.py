"""transformers' mask functions, called with all indices at once instead of one by one.

The result is the same (transformers makes most masks in this way, see ``sdpa_mask``). Code under ``torch.vmap`` cannot
be followed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from fused.assumptions import holds


def expanded(function: types.FunctionType, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the mask function over all indices if ``function`` is transformers' ``torch.vmap`` version, else None."""
    theirs = _masking()
    if theirs is None or function is not theirs._vmap_expansion_sdpa:
        return None
    (of_one,) = args
    return lambda *indices: of_one(*theirs._non_vmap_expansion_sdpa(*indices)).expand(*map(_length, indices))


def is_indexing(value: Any) -> bool:
    """Check whether ``value`` is transformers' context manager for indexing under ``torch.vmap``."""
    theirs = _masking()
    return theirs is not None and isinstance(value, theirs.TransformGetItemToIndex)


def _masking() -> Any:
    """Return transformers' module of mask functions if it is loaded and as assumed, else None."""
    loaded = sys.modules.get("transformers.masking_utils")
    return loaded if loaded is not None and holds("masks of transformers") else None


def _length(indices: Any) -> Any:
    return indices.shape[0] if isinstance(indices, torch.Tensor) else len(indices)
