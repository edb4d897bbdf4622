"""Batches of other shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.batches import cut, small_shapes
from schedule.verify import other_shapes


def shapes(batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in batch.items()}


def test_every_tensor_with_the_sequence_length_follows() -> None:
    batch = {
        "input_ids": torch.arange(20).view(2, 10),
        "attention_mask": torch.zeros(2, 1, 10, 10),
        "position_ids": torch.arange(10).view(1, 10),
        "labels": torch.arange(2),
        "decoder_input_ids": torch.arange(14).view(2, 7),
    }
    first, second, third, apart = other_shapes(batch)
    assert shapes(first) == {
        "input_ids": [3, 13],
        "attention_mask": [3, 1, 13, 13],
        "position_ids": [1, 13],
        "labels": [3],
        "decoder_input_ids": [3, 10],
    }
    assert first["position_ids"].tolist() == [list(range(13))]
    assert first["input_ids"][0].tolist() == [*range(10), 0, 1, 2]
    assert shapes(second)["input_ids"] == [1, 8] and shapes(second)["decoder_input_ids"] == [1, 5]
    assert shapes(third)["input_ids"] == [4, 6]
    assert shapes(apart)["input_ids"] == [5, 17] and shapes(apart)["decoder_input_ids"] == [5, 13]
    assert batch["input_ids"].shape == (2, 10)


def test_lengths_that_ranks_share() -> None:
    """Each a multiple, longer, shorter and apart from all others."""
    batch = {"input_ids": torch.arange(20).view(2, 10), "decoder_input_ids": torch.arange(14).view(2, 7)}
    lengths = [
        (one["input_ids"].shape[1], one["decoder_input_ids"].shape[1]) for one in other_shapes(batch, multiple=4)
    ]
    assert lengths == [(16, 12), (8, 8), (8, 4), (4 * 17, 4 * 13)]


def test_images_vary_in_rows_alone() -> None:
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    assert [shapes(b) for b in other_shapes(batch)] == [
        {"pixel_values": [rows, 3, 8, 8], "labels": [rows]} for rows in (3, 1, 4, 5)
    ]


def test_embeddings_keep_their_hidden_size_even_if_it_is_the_length() -> None:
    assert [list(b.shape) for b in other_shapes(torch.randn(2, 8, 8))] == [[3, 11, 8], [1, 6, 8], [4, 5, 8], [5, 11, 8]]


def test_features_are_no_sequence() -> None:
    assert [list(b.shape) for b in other_shapes(torch.randn(1, 8))] == [[2, 8], [2, 8], [3, 8], [5, 8]]


def test_tuples_keep_their_structure() -> None:
    batch = (torch.ones(2, 4, dtype=torch.long), {"mask": torch.ones(2, 4, dtype=torch.bool)}, None, 3)
    first = other_shapes(batch)[0]
    assert isinstance(first, tuple) and first[2:] == (None, 3)
    assert first[0].shape == first[1]["mask"].shape == (3, 7)


def test_no_row_loses_its_last_token() -> None:
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
    for batch in other_shapes({"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": mask}):
        assert bool((batch["attention_mask"].sum(1) > 0).all())
    longer = other_shapes({"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": mask})[0]
    assert longer["attention_mask"][1].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]


def test_a_cache_has_a_size_of_its_own() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.ones(2, 3)

    batch: dict[str, Any] = {"input_ids": torch.ones(2, 4, dtype=torch.long), "past_key_values": Cache()}
    assert other_shapes(batch) == []


def test_small_batches_are_small_and_keep_lengths_apart() -> None:
    batch = {"input_ids": torch.zeros(64, 512).long(), "decoder_input_ids": torch.zeros(64, 256).long()}
    assert [shapes(small) for small in small_shapes(batch)] == [
        {"input_ids": [3, 17], "decoder_input_ids": [3, 13]},
        {"input_ids": [1, 11], "decoder_input_ids": [1, 8]},
    ]
    for small in small_shapes({"input_ids": torch.zeros(3, 4).long()}):
        assert small["input_ids"].shape[0] != 3 and small["input_ids"].shape[1] != 4


def test_a_batch_is_cut_where_it_is_larger() -> None:
    batch = {"input_ids": torch.arange(40).view(4, 10), "labels": torch.arange(40).view(4, 10)}
    assert shapes(cut(batch, 2, 6)) == {"input_ids": [2, 6], "labels": [2, 6]}
    assert shapes(cut(batch, 8, 64)) == shapes(batch)
    held = {"input_ids": torch.ones(4, 10, dtype=torch.long), "cache": object()}
    assert shapes({"input_ids": cut(held, 2, 6)["input_ids"]}) == {"input_ids": [2, 6]}


def test_sizes_do_not_agree_by_accident() -> None:
    embeddings, ids = torch.randn(1, 5, 7), torch.zeros(1, 5).long()
    *_, apart = other_shapes({"embeddings": embeddings, "ids": ids})
    assert shapes(apart) == {"embeddings": [11, 17, 7], "ids": [11, 17]}
    small, _ = small_shapes({"embeddings": torch.randn(1, 5, 8), "ids": ids})
    assert shapes(small) == {"embeddings": [3, 9, 8], "ids": [3, 9]}


def test_positions_in_several_dimensions_go_on() -> None:
    positions = torch.arange(12).view(1, 12, 1).expand(2, 12, 3)
    longer = other_shapes({"hidden_states": torch.randn(2, 12, 4), "position_ids": positions})[0]["position_ids"]
    assert torch.equal(longer, torch.arange(15).view(1, 15, 1).expand(3, 15, 3))


class OwnError(Exception):
    """No kind of exception that models usually raise."""


class Refusing(nn.Module):
    """It takes no batch of three."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(8, 8), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise self.error("of its own")
        return F.gelu(self.layer(x), approximate="tanh")


@pytest.mark.parametrize("error", [ValueError, StopIteration, OwnError, OSError, LookupError, RecursionError])
def test_a_shape_that_the_model_refuses_by_any_exception_is_left_out(error: type[Exception]) -> None:
    report = schedule.optimize(Refusing(error), torch.randn(2, 8), cost_guard=False).verify(steps=1)
    assert report.equal
    assert len([each for each in report.skipped if f"the original raises {error.__name__}: of its own" in each]) == 2
