"""Arguments that only the docstring of a forward tells."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from fxschedule.cli.documented import Documented, documented, documented_inputs
from schedule.batches.config_values import Configs
from schedule.util.errors import NotApplicable


class Told(nn.Module):
    """Arguments that nothing but a docstring knows."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig(vocab_size=64, hidden_size=32)
        self.kinds = nn.Embedding(2, 32)

    def forward(self, task_input_ids: Any, options: Any, kind_ids: Any, mask: Any, scale: int = 1) -> torch.Tensor:
        """
        task_input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
            Words.
        options (`torch.FloatTensor` of shape `(total_options (>= batch_size), 3 * num_hidden_layers, hidden_size)`):
            Numbers.
        kind_ids (`torch.LongTensor` of shape (batch_size, sequence_length), *optional*):
            Of two kinds.
        mask (`torch.BoolTensor` of shape `(num_options,)`):
            Which count.
        """
        if mask.dtype is not torch.bool or task_input_ids.max() >= 64:
            raise ValueError("no")
        return self.kinds(kind_ids) + task_input_ids[..., None] + options.sum() * scale


def test_shapes_of_a_docstring() -> None:
    batch = documented_inputs(Told())
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "task_input_ids": (2, 12),
        "options": (2, 36, 32),
        "kind_ids": (2, 12),
        "mask": (2,),
    }
    assert documented_inputs(Told(), rows=3, length=5)["kind_ids"].shape == (3, 5)


def test_dimensions_are_read_as_they_are_written() -> None:
    said = documented(Told.forward)
    assert said["options"] == Documented("torch.FloatTensor", ("total_options", "3 * num_hidden_layers", "hidden_size"))
    assert said["mask"].dimensions == ("num_options",) and "scale" not in said
    configs = Configs(hf.BertConfig(hidden_size=8))
    assert dataclasses.replace(said["mask"], dimensions=("hidden_size", "unheard")).shape(configs, {}) == (8, 2)


class Asking(nn.Module):
    """Asks for an argument that may be left out, in words."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.config, self.name = hf.BertConfig(vocab_size=64, hidden_size=8), name

    def forward(self, input_ids: Any, attention_mask: Any = None, context: Any = None, other: Any = None) -> Any:
        """
        context (`torch.FloatTensor` of shape `(batch_size, 5)`, *optional*):
            What it is about.
        """
        if {"context": context, "other": other}[self.name] is None:
            raise ValueError(f"`{self.name}` cannot be `None` without a retriever")
        return input_ids + context.sum()


def test_an_argument_that_a_refusal_names_is_made() -> None:
    batch = documented_inputs(Asking("context"))
    assert list(batch) == ["input_ids", "attention_mask", "context"] and batch["context"].shape == (2, 5)


def test_an_argument_that_a_refusal_names_is_asked_for() -> None:
    with pytest.raises(NotApplicable) as caught:
        documented_inputs(Asking("other"))
    assert caught.value.fix == "pass a batch: batch=dict(input_ids=…, other=…)"
