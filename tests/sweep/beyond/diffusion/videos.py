"""Transformers of diffusers that make videos: a tiny config and what it is called with."""

from __future__ import annotations

import torch

from tests.sweep.beyond.case import L, N, given, indices, ones, times

_HEADS = dict(num_attention_heads=2, attention_head_dim=16, num_layers=2)
_LATENT = dict(hidden_states=(N, 4, 2, 8, 8), timestep=times)
_TEXT = dict(**_LATENT, encoder_hidden_states=(N, L, 16))
_MASK = dict(encoder_attention_mask=ones(N, L, dtype=torch.long))
_FRAMES_FIRST = {**_TEXT, "hidden_states": (N, 2, 4, 8, 8)}
_CHANNELS = dict(in_channels=4, out_channels=4)
_WAN = dict(**_HEADS, **_CHANNELS, text_dim=16, freq_dim=16, ffn_dim=32)
_FLOW = {**_FRAMES_FIRST, "timestep": indices(9, N, 2), "r_timestep": indices(9, N, 2)}
_COG = dict(
    **_HEADS,
    **_CHANNELS,
    time_embed_dim=8,
    text_embed_dim=16,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    max_text_seq_length=12,
)
_HUNYUAN = dict(
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=1,
    num_refiner_layers=1,
    patch_size=2,
    text_embed_dim=16,
    rope_axes_dim=(4, 6, 6),
)
_JOY = dict(in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, num_layers=2, rope_dim_list=[4, 6, 6])
_KANDINSKY = dict(
    in_visual_dim=4,
    out_visual_dim=4,
    in_text_dim=16,
    in_text_dim2=16,
    time_dim=16,
    model_dim=32,
    ff_dim=64,
    num_text_blocks=1,
    num_visual_blocks=1,
    axes_dims=(4, 6, 6),
)
_SOUND = dict(
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=8,
    audio_cross_attention_dim=16,
)
_COSMOS = dict(num_attention_heads=2, attention_head_dim=16, text_embed_dim=16, adaln_lora_dim=8, max_size=(4, 16, 16))

VIDEOS = {
    "AllegroTransformer3DModel": (
        {
            **_HEADS,
            **_CHANNELS,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 2,
            "caption_channels": 16,
        },
        given(
            **_TEXT,
            attention_mask=ones(N, 2, 8, 8),
            **_MASK,
            image_rotary_emb=[[[(4, 4), (4, 4)]] * 3, [indices(2, 1, 32)] * 3],
        ),
    ),
    "AnyFlowTransformer3DModel": (_WAN, given(**_FLOW)),
    "ChronoEditTransformer3DModel": (_WAN, given(**_TEXT)),
    "CogVideoXTransformer3DModel": (
        _COG,
        given(**{**_FRAMES_FIRST, "encoder_hidden_states": (N, 12, 16)}),
    ),
    "ConsisIDTransformer3DModel": (
        _COG,
        given(**{**_FRAMES_FIRST, "encoder_hidden_states": (N, 12, 16)}),
    ),
    "CosmosTransformer3DModel": (
        dict(**_CHANNELS, **_COSMOS, num_layers=2, concat_padding_mask=False),
        given(**_TEXT, fps=30),
    ),
    "EasyAnimateTransformer3DModel": (
        dict(**_HEADS, **_CHANNELS, patch_size=2, sample_width=8, sample_height=8, time_embed_dim=8, text_embed_dim=16),
        given(**_TEXT),
    ),
    "HeliosTransformer3DModel": (
        {**_WAN, "rope_dim": (4, 6, 6)},
        given(
            **_TEXT,
            indices_hidden_states=lambda rows, length: torch.arange(2).expand(rows, -1),
            indices_latents_history_short=lambda rows, length: torch.arange(2).expand(rows, -1),
            latents_history_short=(N, 4, 2, 8, 8),
        ),
    ),
    "HunyuanVideoTransformer3DModel": (
        dict(**_HUNYUAN, **_CHANNELS, num_single_layers=1, pooled_projection_dim=16),
        given(**_TEXT, **_MASK, pooled_projections=(N, 16), guidance=times),
    ),
    "HunyuanVideo15Transformer3DModel": (
        dict(**_HUNYUAN, **_CHANNELS, text_embed_2_dim=16, image_embed_dim=16),
        given(
            **{**_TEXT, "timestep": (N,)},
            **_MASK,
            encoder_hidden_states_2=(N, 4, 16),
            encoder_attention_mask_2=ones(N, 4, dtype=torch.long),
            image_embeds=(N, 3, 16),
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        dict(
            **_HUNYUAN,
            **_CHANNELS,
            num_single_layers=1,
            pooled_projection_dim=16,
            image_proj_dim=16,
            has_image_proj=True,
            has_clean_x_embedder=True,
        ),
        given(
            **_TEXT,
            **_MASK,
            pooled_projections=(N, 16),
            image_embeds=(N, 3, 16),
            indices_latents=torch.arange(2),
            latents_clean=(N, 4, 1, 8, 8),
            indices_latents_clean=indices(2, 1),
            latents_history_2x=(N, 4, 2, 8, 8),
            indices_latents_history_2x=indices(2, 2),
            latents_history_4x=(N, 4, 4, 8, 8),
            indices_latents_history_4x=indices(2, 4),
            guidance=times,
        ),
    ),
    "JoyImageEditTransformer3DModel": (_JOY, given(**_TEXT)),
    "JoyImageEditPlusTransformer3DModel": (
        _JOY,
        given(
            hidden_states=(N, 16, 4, 1, 2, 2),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            encoder_hidden_states_mask=ones(N, L),
            shape_list=lambda rows, length: [[(1, 4, 4)]] * rows,
        ),
    ),
    "Kandinsky5Transformer3DModel": (
        _KANDINSKY,
        given(
            hidden_states=(N, 2, 8, 8, 4),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            pooled_projections=(N, 16),
            visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
            text_rope_pos=lambda rows, length: torch.arange(length),
        ),
    ),
    "Kandinsky6Transformer3DModel": (
        dict(**_KANDINSKY, visual_cond=False, in_audio_dim=4, out_audio_dim=4),
        given(
            hidden_states=(N, 2, 8, 8, 4),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            pooled_projections=(N, 16),
            audio_hidden_states=(N, 6, 4),
        ),
    ),
    "LTXVideoTransformer3DModel": (
        dict(**_HEADS, **_CHANNELS, cross_attention_dim=32, caption_channels=16),
        given(
            hidden_states=(N, 32, 4),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            **_MASK,
            num_frames=2,
            height=4,
            width=4,
        ),
    ),
    "LTX2VideoTransformer3DModel": (
        dict(**_HEADS, **_CHANNELS, **_SOUND, cross_attention_dim=32, caption_channels=16),
        given(
            hidden_states=(N, 32, 4),
            timestep=times,
            audio_hidden_states=(N, 6, 4),
            encoder_hidden_states=(N, L, 16),
            audio_encoder_hidden_states=(N, L, 16),
            **_MASK,
            audio_encoder_attention_mask=ones(N, L, dtype=torch.long),
            num_frames=2,
            height=4,
            width=4,
            audio_num_frames=6,
        ),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": (
        dict(**_HEADS, **_CHANNELS, **_SOUND, cross_attention_dim=32, caption_channels=16),
        given(
            hidden_states=(N, 32, 4),
            timestep=times,
            encoder_hidden_states=(N, L, 16),
            video_rotary_emb=lambda rows, length: (torch.rand(rows, 32, 32),) * 2,
            **_MASK,
        ),
    ),
    "LatteTransformer3DModel": (
        dict(
            **_HEADS,
            **_CHANNELS,
            patch_size=2,
            sample_size=8,
            video_length=2,
            cross_attention_dim=32,
            caption_channels=16,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            activation_fn="gelu-approximate",
            attention_bias=True,
        ),
        given(**_TEXT),
    ),
    "MiniMaxH3Transformer3DModel": (
        dict(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=64,
            in_channels=4,
            audio_in_channels=4,
            text_dim=16,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=32,
            rope_freq_dim=2,
        ),
        given(
            hidden_states=(N, 8, 16),
            audio_hidden_states=(N, 4, 4),
            encoder_hidden_states=(N, L, 16),
            timestep=ones(1),
            timestep_indices=lambda rows, length: torch.zeros(length + 12, dtype=torch.long),
            token_tags=lambda rows, length: torch.tensor([0] * length + [1] * 8 + [2] * 4),
            position_ids=lambda rows, length: torch.arange(length + 12)[:, None].expand(-1, 3),
            text_indices=lambda rows, length: torch.arange(length),
            video_indices=lambda rows, length: torch.arange(8) + length,
            audio_indices=lambda rows, length: torch.arange(4) + length + 8,
        ),
    ),
    "MochiTransformer3DModel": (
        {**_HEADS, "in_channels": 4, "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 8},
        given(**_TEXT, encoder_attention_mask=ones(N, L, dtype=torch.bool)),
    ),
    "MotifVideoTransformer3DModel": (
        dict(
            num_attention_heads=2,
            attention_head_dim=16,
            **_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            text_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        given(**_TEXT, **_MASK),
    ),
    "SanaVideoTransformer3DModel": (
        dict(
            **_HEADS,
            **_CHANNELS,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
            sample_size=8,
        ),
        given(**_TEXT),
    ),
    "SanaWMTransformer3DModel": (
        dict(
            in_channels=4,
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            softmax_every_n=2,
            linear_head_dim=16,
            caption_channels=16,
            chunk_plucker_post_attn_blocks=2,
        ),
        given(**{**_LATENT, "timestep": indices(9, N, 1, 2)}, encoder_hidden_states=(N, 1, L, 16), **_MASK),
    ),
    "SkyReelsV2Transformer3DModel": (_WAN, given(**_TEXT)),
    "WanTransformer3DModel": (_WAN, given(**_TEXT)),
    "WanVACETransformer3DModel": (
        {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 6},
        given(**_TEXT, control_hidden_states=(N, 6, 2, 8, 8)),
    ),
    "WanAnimateTransformer3DModel": (
        {
            **_WAN,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 16,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 1,
        },
        given(
            **{**_TEXT, "hidden_states": (N, 12, 3, 8, 8)},
            encoder_hidden_states_image=(N, 4, 16),
            pose_hidden_states=(N, 4, 2, 8, 8),
            face_pixel_values=(N, 3, 5, 16, 16),
        ),
    ),
}
