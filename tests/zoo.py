"""Tiny models of real architectures, with random weights, and batches for them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

_BASE = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GQA = dict(_BASE, num_key_value_heads=2)
_GPT = dict(vocab_size=64, bos_token_id=1, eos_token_id=2)

CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))
"""The name that transformers gives to a cache in inputs and outputs: ``cache`` from 5.24 on."""

CAUSAL, MASKED = hf.AutoModelForCausalLM, hf.AutoModelForMaskedLM

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "gpt2": (CAUSAL, lambda: hf.GPT2Config(**_GPT, n_layer=2, n_embd=32, n_head=4, n_positions=64)),
    "bert": (MASKED, lambda: hf.BertConfig(**_BASE)),
    "roberta": (MASKED, lambda: hf.RobertaConfig(**_BASE)),
    "albert": (MASKED, lambda: hf.AlbertConfig(**_BASE, embedding_size=16)),
    "distilbert": (
        MASKED,
        lambda: hf.DistilBertConfig(
            vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64
        ),
    ),
    "electra": (MASKED, lambda: hf.ElectraConfig(**_BASE, embedding_size=16)),
    "opt": (
        CAUSAL,
        lambda: hf.OPTConfig(
            **_GPT,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            pad_token_id=0,
        ),
    ),
    "bloom": (CAUSAL, lambda: hf.BloomConfig(**_GPT, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)),
    "gpt_neo": (
        CAUSAL,
        lambda: hf.GPTNeoConfig(
            **_GPT,
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=4,
            max_position_embeddings=64,
            window_size=4,
        ),
    ),
    "gpt_neox": (CAUSAL, lambda: hf.GPTNeoXConfig(**_BASE)),
    "gptj": (
        CAUSAL,
        lambda: hf.GPTJConfig(**_GPT, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    ),
    "t5": (
        hf.AutoModelForSeq2SeqLM,
        lambda: hf.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
    ),
    "llama": (CAUSAL, lambda: hf.LlamaConfig(**_GQA)),
    "mistral": (CAUSAL, lambda: hf.MistralConfig(**_GQA, sliding_window=8)),
    "qwen3": (CAUSAL, lambda: hf.Qwen3Config(**_GQA, head_dim=8)),
    "gemma3": (CAUSAL, lambda: hf.Gemma3TextConfig(**_GQA, head_dim=8, sliding_window=8)),
    "phi3": (CAUSAL, lambda: hf.Phi3Config(**_GQA)),
    "falcon": (
        CAUSAL,
        lambda: hf.FalconConfig(**_GPT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    ),
    "vit": (
        hf.AutoModelForImageClassification,
        lambda: hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
        ),
    ),
    "whisper": (
        hf.AutoModelForSpeechSeq2Seq,
        lambda: hf.WhisperConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
            suppress_tokens=None,
        ),
    ),
}


def build(name: str, attention: str = "eager", seed: int = 0) -> nn.Module:
    """A tiny model of architecture ``name`` with random weights."""
    auto, config = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model: nn.Module = auto.from_config(config(), attn_implementation=attention)
    return model


def batch(name: str, rows: int = 2, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """A training batch for ``name``: ``rows`` sequences of ``length`` (or images, or mel frames), with labels."""
    generator = torch.Generator().manual_seed(seed + 97 * rows + length)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    if name == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator)
        return dict(pixel_values=pixels, labels=torch.randint(0, 2, (rows,), generator=generator))
    if name == "whisper":
        mel = torch.randn(rows, 8, 32, generator=generator)
        return dict(input_features=mel, decoder_input_ids=ids, labels=ids.clone())
    mask = torch.ones(rows, length, dtype=torch.long)
    if rows > 1:
        mask[-1, -2:] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.clone())
