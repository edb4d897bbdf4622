"""Vocabularies sharded over two simulated ranks, and tables that stay whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.distributed.constructs import planned, sharded


class TwoVocabularies(nn.Module):
    """An encoder's embedding, and a decoder's that is tied to the head, of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 8), nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.target.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.source(input_ids) + self.target(input_ids))
        return result


def test_a_head_goes_with_the_embedding_that_it_is_tied_to() -> None:
    plan, _ = planned(TwoVocabularies(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert [[step.path for step in group.shards] for group in plan.groups] == [["source"], ["target"]]


class TwoStacks(nn.Module):
    """Embeddings of one weight, the first of which is not called, and a head of its own: an untied T5."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.source, self.target = (nn.Embedding(40, 8) for _ in range(3))
        self.source.weight = self.target.weight = self.shared.weight
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 40, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.source(input_ids) + self.target(input_ids).tanh()))
        return result


def test_an_embedding_of_two_stacks_is_shared_out_once() -> None:
    plan, _ = planned(TwoStacks(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert sharded(plan) == {"source": 0, "head": 0} and len(plan.shards) == 2


class OwnEmbedding(nn.Module):
    """Looks rows up in code of its own, which knows nothing of shares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.plain = OwnEmbedding(), nn.Embedding(40, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + self.plain(input_ids)
        result: Tensor = self.head(x) @ self.plain.weight.t()
        return result


def test_tables_that_other_code_reads_stay_whole() -> None:
    plan, _ = planned(Looks(), {"input_ids": torch.tensor([[1, 2, 39]])})
    assert not plan.shards
    assert "read by the code of another module" in plan.whole["plain.weight"]
