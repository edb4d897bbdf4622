"""Texts that ranks tell each other through the store of the process group: no collective, so none can hang."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from fused.torch_internals.process_groups import default_store


def exchanged_strings(key: str, own: str, ranks: Sequence[int], limit: float) -> dict[int, str | None]:
    """What each rank says; all of ``ranks`` must call this with the same key, which is used once.

    Args:
        key: what it is about.
        own: what this rank says.
        ranks: of the default group.
        limit: seconds to wait for each.

    Returns:
        By rank; None for one that says nothing in time, or died.
    """
    store = default_store()
    store.set(f"schedule/{key}/{dist.get_rank()}", f"said {own}")  # a store may wait for ever for an empty text
    return {rank: _heard(store, f"schedule/{key}/{rank}", limit) for rank in ranks}


def _heard(store: dist.Store, key: str, limit: float) -> str | None:
    try:
        store.wait([key], timedelta(seconds=limit))
        return str(store.get(key).decode()).removeprefix("said ")
    except RuntimeError:
        return None
