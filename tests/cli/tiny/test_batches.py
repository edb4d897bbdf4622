"""Batches repaired by what an error says."""

from __future__ import annotations

import pytest
import torch

from fxschedule.cli.tiny.repairs import repaired


def test_a_wave_is_cut_to_whole_frames() -> None:
    wave = torch.randn(2, 1024)
    with pytest.raises(RuntimeError) as caught:
        wave.reshape(2, -1, 80)
    (batch,) = repaired({"input_values": wave, "mask": torch.ones(2, 1024).bool()}, caught.value)
    assert batch["input_values"].shape == (2, 1040) and torch.equal(batch["input_values"][:, :1024], wave)


def test_text_becomes_as_long_as_what_is_added_to_it() -> None:
    text = {"input_ids": torch.ones(2, 12).long(), "features": torch.randn(2, 8, 12)}
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 12, 4) + torch.zeros(2, 8, 4)
    (batch,) = repaired(text, caught.value)
    assert batch["input_ids"].shape == (2, 8) and batch["features"] is text["features"]


def test_images_become_as_large_as_what_is_added_to_them() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 3, 8, 8) + torch.zeros(2, 3, 20, 20)
    (batch,) = repaired({"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": torch.ones(2, 8).long()}, caught.value)
    assert batch["pixel_values"].shape == (2, 3, 20, 20) and batch["input_ids"].shape == (2, 8)


def test_images_that_are_put_together_are_scaled_together() -> None:
    halves = {"pixel_values": torch.randn(2, 3, 8, 8), "masks": torch.ones(2, 3, 8, 8).long(), "ids": torch.ones(2, 8)}
    error = ValueError("Input image size (16*8) doesn't match model (8*8).")
    (batch,) = repaired(halves, error)
    assert [tuple(value.shape) for value in batch.values()] == [(2, 3, 4, 8), (2, 3, 4, 8), (2, 8)]


def test_an_error_that_names_no_size_repairs_nothing() -> None:
    assert not list(repaired({"input_ids": torch.ones(2, 12)}, ValueError("no")))
    assert not list(repaired({"input_ids": torch.ones(2, 12)}, ValueError("7 is not a multiple of 3"))), "no size is 7"
