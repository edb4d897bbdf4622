"""Recipes of transformers' models, from a file on to fresh models, and from 2 layers on to 12."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import schedule
from schedule import Recipe, Schedule
from tests.recipes.helpers import observed, round_trip

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


def gpt2(layers: int) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=layers, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(config)


def bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(**SMALL, num_hidden_layers=layers, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config)


def batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(16).reshape(2, 8) % 7, "labels": torch.arange(16).reshape(2, 8) % 5}


LAYERS = {gpt2: "transformer.h.*", llama: "model.layers.*", bert: "bert.encoder.layer.*"}
RULE = {gpt2: ("mlp", "bias_gelu_tanh"), llama: ("mlp", "gated_silu"), bert: ("intermediate", "bias_gelu")}


def scheduled(make: Callable[[int], nn.Module], layers: int) -> Schedule:
    """By one find and fuse, by checkpointing, and by all rules."""
    sch = schedule.create_schedule(made(make, layers), batch())
    every, (below, rule) = LAYERS[make], RULE[make]
    part = sch[f"{every}.{below}"]
    part.fuse(part.find(rule, expect=layers))
    sch[every].checkpoint(every=2)
    schedule.optimize(sch, rules="all", cost_guard=False)
    return sch


def made(make: Callable[[int], nn.Module], layers: int) -> nn.Module:
    torch.manual_seed(0)
    return make(layers)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)
def test_on_a_fresh_model_and_on_a_deeper_one(make: Callable[[int], nn.Module]) -> None:
    sch = scheduled(make, 2)
    assert len(sch.history) > 2
    recipe = round_trip(sch, lambda: made(make, 2), batch())
    deep = made(make, 12)
    twin = copy.deepcopy(deep)
    again = schedule.replay(deep, Recipe.from_json(recipe.to_json()), batch())
    assert again.recipe() == recipe
    assert len(again.history[0].touched) == 12 and len(again.history[1].touched) == 6
    expected: list[Any] = observed(twin, batch())
    assert all(torch.isfinite(value).all() for value in expected)
    assert torch.allclose(observed(deep, batch())[1], expected[1], atol=1e-5)
