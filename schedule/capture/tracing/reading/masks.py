"""transformers' functions of masks, given all indices at once in place of one by one.

The result is the same (it is how transformers makes most masks, ``sdpa_mask``); what ``torch.vmap`` does cannot be
watched.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch


def expanded(function: types.FunctionType, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The mask function for all indices, where ``function`` would give the one that goes by ``torch.vmap``."""
    theirs: Any = sys.modules.get("transformers.masking_utils")
    if theirs is None or function is not getattr(theirs, "_vmap_expansion_sdpa", None):
        return None
    (of_one,) = args
    return lambda *indices: of_one(*theirs._non_vmap_expansion_sdpa(*indices)).expand(*map(_length, indices))


def is_indexing(value: Any) -> bool:
    """Whether ``value`` is the block under which ``torch.vmap`` may index."""
    theirs: Any = sys.modules.get("transformers.masking_utils")
    kind = getattr(theirs, "TransformGetItemToIndex", None)
    return isinstance(kind, type) and isinstance(value, kind)


def _length(indices: Any) -> Any:
    return indices.shape[0] if isinstance(indices, torch.Tensor) else len(indices)
