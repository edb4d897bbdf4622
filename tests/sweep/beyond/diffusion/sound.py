"""Transformers of diffusers that make sound, and encoders of conditions: a tiny config and what it is called with."""

from __future__ import annotations

import torch

from tests.sweep.beyond.case import L, N, given, indices, ones, times

SOUND = {
    "AceStepTransformer1DModel": (
        dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            in_channels=12,
            audio_acoustic_hidden_dim=4,
            sliding_window=4,
            encoder_hidden_size=16,
        ),
        given(
            hidden_states=(N, 16, 4),
            timestep=(N,),
            timestep_r=(N,),
            encoder_hidden_states=(N, L, 16),
            context_latents=(N, 16, 8),
        ),
    ),
    "AnimaTextConditioner": (
        dict(
            source_dim=16,
            target_dim=16,
            model_dim=16,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=32,
            min_sequence_length=16,
        ),
        given(source_hidden_states=(N, L, 16), target_input_ids=indices(32, N, L)),
    ),
    "LongCatAudioDiTTransformer": (
        dict(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4, ff_mult=2.0),
        given(
            hidden_states=(N, 16, 4),
            encoder_hidden_states=(N, L, 16),
            encoder_attention_mask=ones(N, L, dtype=torch.bool),
            timestep=(N,),
            latent_cond=(N, 16, 4),
        ),
    ),
    "MiniMaxMusic3ConditionEncoder": (
        dict(condition_hidden_dim=16, num_condition_layers=2, out_dim=16),
        given(hidden_states=(N, L, 32)),
    ),
    "MiniMaxMusic3RVQDepthDecoder": (
        dict(hidden_size=32, num_layers=2, num_attention_heads=2, intermediate_size=64, audio_vocab_size=16),
        given(inputs_embeds=(N, L, 32)),
    ),
    "MiniMaxMusic3Transformer1DModel": (
        dict(
            in_channels=4,
            condition_dim=16,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            ff_inner_dim=64,
            rotary_dim=8,
            fourier_embedding_dim=8,
        ),
        given(hidden_states=(N, 4, 16), timestep=(N,), encoder_hidden_states=(N, 16, 16)),
    ),
    "StableAudioDiTModel": (
        dict(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            cross_attention_dim=16,
            time_proj_dim=8,
            global_states_input_dim=16,
            cross_attention_input_dim=16,
        ),
        given(
            hidden_states=(N, 4, 16),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            global_hidden_states=(N, 1, 16),
            rotary_embedding=[(17, 8), (17, 8)],
        ),
    ),
    "StableAudio3DiTModel": (
        dict(
            io_channels=4,
            embed_dim=32,
            depth=2,
            num_heads=2,
            cond_token_dim=16,
            global_cond_dim=16,
            local_add_cond_dim=5,
            timestep_features_dim=8,
            num_memory_tokens=2,
        ),
        given(
            hidden_states=(N, 4, 16),
            timestep=(N,),
            encoder_hidden_states=(N, L, 16),
            global_hidden_states=(N, 16),
            local_add_cond=(N, 5, 16),
        ),
    ),
    "T5FilmDecoder": (
        dict(
            input_dims=8, targets_length=16, d_model=32, num_layers=2, num_heads=2, d_kv=16, d_ff=64, dropout_rate=0.0
        ),
        given(
            encodings_and_masks=lambda rows, length: [(torch.randn(rows, length, 32), torch.ones(rows, length))],
            decoder_input_tokens=(N, 16, 8),
            decoder_noise_time=lambda rows, length: torch.rand(rows),
        ),
    ),
}
