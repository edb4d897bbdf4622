"""String exchange between ranks through the process group's store, without collectives, so it cannot hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_rounds: Counter[str] = Counter()  # exchange → how often this rank took part in it


def exchanged_strings(about: str, own: str, ranks: Sequence[int], limit: float) -> dict[int, str | None]:
    """All-gather one string per rank.

    All of ``ranks`` must call this equally often for the same subject. Other ranks need not.

    Args:
        about: the subject of the exchange.
        own: the string of this rank.
        ranks: global ranks.
        limit: seconds to wait for each rank.

    Returns:
        rank → string; None for a rank that did not answer in time or died.
    """
    exchange = f"schedule/{about}/{'-'.join(map(str, sorted(ranks)))}"
    _rounds[exchange] += 1
    key, store = f"{exchange}/{_rounds[exchange]}", _store()
    store.set(f"{key}/{dist.get_rank()}", f"said {own}")  # a store may wait forever for an empty text
    return {rank: _heard(store, f"{key}/{rank}", limit) for rank in ranks}


def _store() -> dist.Store:
    world: Any = dist.group.WORLD  # torch raises if there is none
    store: dist.Store = world.get_group_store()
    return store


def _heard(store: dist.Store, key: str, limit: float) -> str | None:
    try:
        store.wait([key], timedelta(seconds=limit))
        return str(store.get(key).decode()).removeprefix("said ")
    except RuntimeError:
        return None
