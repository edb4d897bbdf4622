"""docs/scaling.md against the model that it describes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.scaling import NODES, NVLINK, SHAPES, step

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "scaling.md").read_text()


def test_the_text_is_what_the_model_gives() -> None:
    largest = step(SHAPES["70B"], 8, 128)
    assert f"the last row would be {largest.of_peak(hiding=False):.0%}".replace("%", " %") in DOCUMENT
    assert f"would make the {largest.tensor:.2f} s twelve" in DOCUMENT
    assert round(largest.tensor * NVLINK.bandwidth / NODES.bandwidth) == 12
    assert f"α {NVLINK.alpha * 1e6:.0f} µs, {NVLINK.bandwidth / 1e9:.0f} GB/s a GPU" in DOCUMENT
    assert f"α {NODES.alpha * 1e6:.0f} µs, {NODES.bandwidth / 1e9:.0f} GB/s a GPU" in DOCUMENT


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


def test_rings() -> None:
    """Two ranks send all of it once, many ranks twice."""
    assert NODES.all_reduce(25e9, 2) == pytest.approx(1.0, rel=1e-4)
    assert NODES.all_reduce(25e9, 10**3) == pytest.approx(1.998 + 1998e-5, rel=1e-4)
    assert NODES.all_reduce(25e9, 1) == 0.0
