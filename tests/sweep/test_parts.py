"""Parts of models get what their wholes give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from schedule.util.errors import NotApplicable
from tests.needs import needs_architectures
from tests.sweep.models import build, model_class, model_classes
from tests.sweep.parts import holders, inputs_for, part_of, received


def tiny() -> hf.CLIPModel:
    """A whole with two parts."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "projection_dim": 16}
    sizes["num_attention_heads"] = 2
    text = hf.CLIPTextConfig(**sizes, vocab_size=64, bos_token_id=1, eos_token_id=2)
    vision = hf.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def test_wholes_are_found_by_their_configs() -> None:
    assert list(holders(hf.CLIPTextConfig)) == [("clip", "text_config")]
    assert not list(holders(hf.BertConfig))


@needs_architectures("voxtral_realtime")
def test_a_whole_is_found_by_the_default_of_its_config() -> None:
    assert list(holders(hf.VoxtralRealtimeTextConfig)) == [("voxtral_realtime", "text_config")]


def test_a_part_gets_what_its_whole_gives_it() -> None:
    whole = tiny()
    part, batch = part_of(whole, hf.CLIPVisionConfig)
    assert batch.keys() == {"pixel_values"} and tuple(batch["pixel_values"].shape) == (2, 3, 16, 16)
    assert all(part is not module for module in whole.modules()), "the whole stays as it is"
    part.eval()
    assert torch.equal(part(**batch).last_hidden_state, whole.eval().vision_model(**batch).last_hidden_state)
    assert tuple(inputs_for(part, 3, 9)["pixel_values"].shape) == (3, 3, 16, 16)
    assert inputs_for(whole, 3, 9)["input_ids"].shape == (3, 9), "a whole has examples of its own"


def test_a_part_that_is_not_called() -> None:
    whole = tiny()
    text = {"input_ids": torch.ones(2, 4).long(), "pixel_values": torch.randn(2, 3, 16, 16)}
    assert received(whole, whole.vision_model.encoder, text) is not None
    assert received(whole, torch.nn.Linear(2, 2), text) is None
    with pytest.raises(NotApplicable, match="calls no part that is made of BertConfig"):
        part_of(whole, hf.BertConfig)


class Choosy(torch.nn.Module):
    """Goes with a session, which no example holds."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.BertConfig()

    def forward(self, x: torch.Tensor, session: object = None) -> torch.Tensor:
        if session is None:
            raise KeyError("session")
        return x


def test_a_part_that_refuses_what_it_is_given() -> None:
    whole = tiny()
    embeddings = whole.vision_model.embeddings
    embeddings.choosy = Choosy()
    embeddings.register_forward_hook(lambda module, args, output: module.choosy(output, session=object()))
    with pytest.raises(NotApplicable, match="calls no part that is made of BertConfig"):
        part_of(whole, hf.BertConfig)


@needs_architectures("sam_mask_decoder")
def test_a_part_without_a_model_of_its_own() -> None:
    built = build("sam_mask_decoder")
    assert type(built.model).__name__ == "SamMaskDecoder" and built.batch["sparse_prompt_embeddings"] is None
    assert {len(inputs_for(built.model, rows, 9)["image_embeddings"]) for rows in (1, 3)} == {1, 3}


def test_a_model_without_a_forward_is_built_in_parts() -> None:
    assert type(build("bark").model).__name__ == "BarkSemanticModel"


@needs_architectures("internlm3")
def test_models_of_another_architecture() -> None:
    assert model_class("internlm3") is hf.LlamaForCausalLM


def test_models_without_a_head() -> None:
    assert hf.MaskFormerModel in model_classes("maskformer")
