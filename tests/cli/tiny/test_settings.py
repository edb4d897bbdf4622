"""Tiny settings keep what belongs together."""

from __future__ import annotations

import pytest

from fxschedule.cli.tiny.small_settings import reduced

UNET = {
    "sample_size": 128,
    "in_channels": 4,
    "down_block_types": ("Cross", "Cross", "Cross", "Down"),
    "up_block_types": ("Up", "Cross", "Cross", "Cross"),
    "block_out_channels": (320, 640, 1280, 1280),
    "kernel": (1, 2, 2),
    "layers_per_block": 2,
    "cross_attention_dim": 1280,
    "num_layers": 28,
    "dropout": 0.5,
    "act_fn": "silu",
    "time_embedding_dim": None,
}


def test_stages_and_sizes_are_reduced() -> None:
    small = next(reduced(UNET))
    assert small["down_block_types"] == ("Cross", "Down") and small["up_block_types"] == ("Up", "Cross")
    assert small["block_out_channels"] == (32, 128) and small["sample_size"] == 64
    assert (small["num_layers"], small["cross_attention_dim"]) == (2, 64)
    same = ("in_channels", "kernel", "layers_per_block", "dropout", "act_fn", "time_embedding_dim")
    assert {name: small[name] for name in same} == {name: UNET[name] for name in same}


@pytest.mark.parametrize("kept", ["cross_attention_dim", "num_layers"])
def test_each_size_in_turn_stays_as_it_is(kept: str) -> None:
    first = next(reduced(UNET))
    assert {**first, kept: UNET[kept]} in list(reduced(UNET))
    assert len({str(settings) for settings in reduced({"num_layers": 28, "hidden_dim": 512})}) == 4
