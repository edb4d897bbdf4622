"""Exchange of strings between ranks, without processes: a store in memory, and the rank as a number."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from schedule.distributed.communication import exchange


def test_groups_of_ranks_take_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that met others twice before still meets one that it never met."""
    store = dist.HashStore()
    monkeypatch.setattr(exchange, "_store", lambda: store)

    def say(rank: int, text: str, ranks: list[int], limit: float = 0.05) -> dict[int, str | None]:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return exchange.exchanged_strings("verdict", text, ranks, limit)

    assert say(0, "a", [0, 1]) == {0: "a", 1: None}
    assert say(0, "b", [0, 1]) == {0: "b", 1: None}
    assert say(0, "c", [0, 2]) == {0: "c", 2: None}
    exchange._rounds.clear()  # another process now
    assert say(2, "d", [0, 2]) == {0: "c", 2: "d"}
    assert say(1, "e", [0, 1]) == {0: "a", 1: "e"}
