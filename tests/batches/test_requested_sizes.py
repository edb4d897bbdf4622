"""Sizes that only a docstring or a refusal of the model tells, and the questions where nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from fxschedule.cli.tiny.repairs import repaired
from schedule.batches import example_inputs
from schedule.util.errors import NotApplicable


class Audio(nn.Module):
    """Frames of a size that no config tells."""

    def __init__(self, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.config, self.take = hf.WhisperConfig(num_mel_bins=16, max_source_positions=32), take

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        return self.take(input_features)


def in_windows(features: torch.Tensor) -> torch.Tensor:
    """As qwen3_asr cuts sound up."""
    if features.shape[-1] % 50:
        raise ValueError(f"expects the length to be a multiple of `n_window` (50), but got {features.shape[-1]}.")
    return features


def whole_frames(features: torch.Tensor) -> torch.Tensor:
    """As muse_spark checks a wave."""
    if features.shape[-1] % 48:
        raise ValueError(f"length {features.shape[-1]} is not a multiple of 48. Prepare it with an extractor.")
    return features


@pytest.mark.parametrize(
    ("take", "shape"),
    [
        (nn.Linear(24, 4), (2, 16, 24)),
        (nn.Conv1d(24, 4, 3), (2, 24, 64)),
        (nn.LayerNorm(24), (2, 16, 24)),
        (in_windows, (2, 16, 100)),
        (whole_frames, (2, 16, 96)),
    ],
)
def test_sizes_that_a_refusal_tells(take: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    batch = example_inputs(Audio(take), repair=repaired)
    assert tuple(batch["input_features"].shape) == shape


class Embedded(nn.Module):
    """Has no embeddings of its own, though it would take ids."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig(vocab_size=64, hidden_size=8)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> Any:
        if input_ids is not None:
            raise ValueError("`input_ids` is expected to be `None`")
        return inputs_embeds * 2


def test_embeddings_in_place_of_ids() -> None:
    batch = example_inputs(Embedded())
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"inputs_embeds": (2, 12, 8)}


class Parts(nn.Module):
    """Generates with its parts, as bark does."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig()
        self.coarse, self.fine = nn.Linear(2, 2), nn.Linear(2, 2)


def test_which_part_is_meant() -> None:
    with pytest.raises(NotApplicable, match="Parts has no forward of its own") as caught:
        schedule.optimize(Parts())
    assert caught.value.fix == "schedule its parts one by one: model.coarse, model.fine"


class Picky(nn.Module):
    """Refuses everything, for a reason of its own."""

    def __init__(self, error: type[Exception] = ValueError) -> None:
        super().__init__()
        self.config, self.error = hf.BertConfig(vocab_size=64), error

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        raise self.error("Which language?\nAsk a person.")


@pytest.mark.parametrize("error", [ValueError, UnboundLocalError, AssertionError])
def test_the_question_says_what_was_tried_and_where_it_was_refused(error: type[Exception]) -> None:
    with pytest.raises(NotApplicable) as caught:
        schedule.optimize(Picky(error))
    refusal = f"the model refused input_ids [2, 12], attention_mask [2, 12]: {error.__name__}: Which language?"
    assert refusal in caught.value.why and "test_requested_sizes.py:" in caught.value.why
    assert caught.value.where == "Picky.forward(input_ids, attention_mask=…)"
    assert caught.value.fix == "pass a batch: batch=dict(input_ids=…)"


class Session(nn.Module):
    """Takes an object that nothing can make."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig()

    def forward(self, session: Any) -> torch.Tensor:
        raise AssertionError("never called")


def test_the_question_names_what_nothing_is_known_of() -> None:
    with pytest.raises(NotApplicable, match="the config does not say what session should be"):
        example_inputs(Session())


class Seeing(nn.Module):
    """A model whose method for features asks for more than an example has at first."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.LlavaConfig(
            text_config={"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
            vision_config={"image_size": 32, "patch_size": 16, "hidden_size": 32, "num_attention_heads": 2},
            image_token_id=7,
        )
        self.embed = nn.Embedding(64, 8)

    def get_image_features(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor) -> torch.Tensor:
        return pixel_values.flatten(2)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) + pixel_values.mean()


def test_a_method_that_asks_for_more_is_no_error_of_ours() -> None:
    batch = example_inputs(Seeing(), repair=repaired)
    assert {"input_ids", "pixel_values"} <= batch.keys()
