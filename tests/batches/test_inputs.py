"""Example inputs, made from models of every kind: the model takes them, gives a loss, and is left as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from schedule.batches import example_inputs
from schedule.batches.config_values import Configs
from schedule.util.errors import NotApplicable
from tests.fingerprint import fingerprint
from tests.needs import needs, needs_architectures, needs_default_qwen2_vl
from tests.small import small
from tests.sweep.models import build
from tests.zoo import ARCHITECTURES
from tests.zoo import build as build_zoo

pytestmark = pytest.mark.filterwarnings("ignore")

# architecture → arguments of the example
KINDS: dict[str, set[str]] = {
    "resnet": {"pixel_values", "labels"},
    "swin": {"pixel_values", "labels"},
    "segformer": {"pixel_values", "labels"},
    "videomae": {"pixel_values", "labels"},
    "wav2vec2": {"input_values"},
    "audio-spectrogram-transformer": {"input_values", "labels"},
    "clap": {"input_ids", "attention_mask", "input_features"},
    "encodec": {"input_values"},
    "clip": {"input_ids", "attention_mask", "pixel_values"},
    "siglip": {"input_ids", "attention_mask", "pixel_values"},
    "llava": {"input_ids", "attention_mask", "pixel_values", "labels"},
    "qwen2_vl": {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids", "labels"},
    "gemma3": {"input_ids", "attention_mask", "pixel_values", "token_type_ids", "labels"},
    "audioflamingo3": {"input_ids", "attention_mask", "input_features", "input_features_mask", "labels"},
    "bart": {"input_ids", "attention_mask", "decoder_input_ids", "labels"},
    "mt5": {"input_ids", "attention_mask", "decoder_input_ids", "labels"},
    "speech_to_text": {"input_features", "decoder_input_ids", "labels"},
    "layoutlm": {"input_ids", "attention_mask", "bbox", "labels"},
    "autoformer": {"past_values", "past_time_features", "past_observed_mask"},
    "patchtst": {"past_values", "past_observed_mask"},
    "kosmos-2": {"input_ids", "attention_mask", "pixel_values", "image_embeds_position_mask", "labels"},
    "gemma4_vision": {"pixel_values", "pixel_position_ids"},
    "minicpm_ocr_vision": {"pixel_values", "target_sizes"},
    "qwen2_5_omni_audio_encoder": {"input_features", "feature_lens", "aftercnn_lens"},
    "gemma3n_audio": {"audio_mel", "audio_mel_mask"},
    "instructblipvideo": {
        "pixel_values",
        "qformer_input_ids",
        "input_ids",
        "attention_mask",
        "decoder_input_ids",
        "labels",
    },
    "musicgen_decoder": {"input_ids", "attention_mask"},
    "speech-encoder-decoder": {"input_values", "decoder_input_ids", "labels"},
    "decision_transformer": {"states", "actions", "rewards", "returns_to_go", "timesteps"},
}


def output_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """What the model returns in eval mode."""
    with torch.no_grad():
        return model.eval()(**batch)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_zoo(name: str) -> None:
    model = build_zoo(name)
    batch = example_inputs(model)
    assert "labels" in batch and torch.isfinite(output_of(model, batch).loss)
    assert all(value.shape[0] == 2 for value in batch.values())
    assert {value.shape[0] for value in example_inputs(model, rows=3).values()} == {3}


def _has_default(config: type[hf.PreTrainedConfig]) -> bool:
    try:
        return bool(config())
    except ValueError:
        return False


_MARKS = {
    "qwen2_vl": needs_default_qwen2_vl,
    "speech-encoder-decoder": needs(_has_default(hf.SpeechEncoderDecoderConfig), "default SpeechEncoderDecoderConfig"),
}
OF_KINDS = {name: pytest.param(name, marks=_MARKS.get(name, needs_architectures(name))) for name in KINDS}


@pytest.mark.parametrize("name", OF_KINDS.values())
def test_other_kinds(name: str) -> None:
    built = build(name)
    assert built.batch.keys() == KINDS[name]
    output = output_of(built.model, built.batch)
    assert ("labels" not in built.batch) or torch.isfinite(output.loss)


def test_ids_are_ordinary_tokens() -> None:
    batch = example_inputs(build_zoo("gpt2"), rows=8, length=64)
    assert batch["input_ids"].max() < 64 and batch["input_ids"].unique().numel() > 40
    assert not set(batch["input_ids"].unique().tolist()) & {1, 2}


@pytest.mark.parametrize("name", ["llava", OF_KINDS["qwen2_vl"]])
def test_as_many_placeholders_as_features(name: str) -> None:
    built = build(name)
    token = Configs(built.model.config).find("image_token_id", "image_token_index")
    given = {k: v for k, v in built.batch.items() if k in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        features = built.model.get_image_features(**given).pooler_output
    placeholders = built.batch["input_ids"] == token
    assert int(placeholders.sum()) == sum(len(each.reshape(-1, each.shape[-1])) for each in features) > 0
    assert bool((built.batch["labels"][placeholders] == -100).all())
    other = dict(built.batch, pixel_values=built.batch["pixel_values"] + 1)
    changed = output_of(built.model, other).logits - output_of(built.model, built.batch).logits
    assert changed.abs().max() > 1e-4, "the image does not matter"


def test_the_model_is_left_as_it_was() -> None:
    model = build_zoo("bert").train()
    example_inputs(model)  # the hooks that transformers puts on at a first call are there from now on
    sch = schedule.create_schedule(model)
    before = fingerprint(sch)
    example_inputs(model)
    assert fingerprint(sch) == before
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_no_statistics_are_kept_where_placeholders_are_counted() -> None:
    model = build("granite_speech").model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    example_inputs(model)
    assert any("num_batches" in name for name in before)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_same_each_time() -> None:
    one, two = (example_inputs(build_zoo("whisper")) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


class Asking(nn.Module):
    """Takes what nothing is known about."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig(vocab_size=64)

    def forward(self, input_ids: torch.Tensor, molecules: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return input_ids + molecules


def test_asks_for_what_is_missing() -> None:
    with pytest.raises(NotApplicable) as caught:
        example_inputs(Asking())
    assert "what is Asking called with?" in str(caught.value)
    assert "batch=dict(molecules=…)" in str(caught.value) and "forward(" in str(caught.value)


def test_asks_for_arguments_of_a_model_without_a_config() -> None:
    with pytest.raises(NotApplicable, match=r"no config(?s:.*)dict\(ids=…\)"):
        example_inputs(small())


def test_taken_when_none_are_given() -> None:
    model = build_zoo("gpt2")
    applied = schedule.optimize(model, cost_guard=False).applied
    assert (applied["attention_softmax"], applied["bias_gelu_tanh"]) == (2, 2)
    sch = schedule.create_schedule(build_zoo("gpt2"))
    assert sch["transformer.h.*.mlp"].find("bias_gelu_tanh", expect=2)


def test_a_batch_of_the_users_own_is_taken_as_it_is() -> None:
    model = build_zoo("gpt2")
    told = lambda module, args, kwargs: warnings.warn(f"got {set(kwargs)}", stacklevel=2)  # noqa: E731
    model.register_forward_pre_hook(told, with_kwargs=True)
    with pytest.warns(UserWarning, match="got") as seen:  # a list that the hook filled would be put back
        schedule.optimize(model, {"input_ids": torch.ones(1, 5, dtype=torch.long)}, cost_guard=False)
    assert all("labels" not in str(each.message) for each in seen)
