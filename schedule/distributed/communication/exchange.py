"""String exchange between ranks through the process group's store, without collectives, so it cannot hang."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from fused.torch_internals.process_groups import default_store


def exchanged_strings(key: str, own: str, ranks: Sequence[int], limit: float) -> dict[int, str | None]:
    """All-gather one string per rank.

    All of ``ranks`` must call this with the same key, and each key may be used only once.

    Args:
        key: key of the exchange in the store.
        own: the string of this rank.
        ranks: global ranks.
        limit: seconds to wait for each rank.

    Returns:
        rank → string; None for a rank that did not answer in time or died.
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
