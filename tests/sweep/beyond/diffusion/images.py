"""Transformers of diffusers that make images: a tiny config and what it is called with."""

from __future__ import annotations

from typing import Any

import torch

from tests.sweep.beyond.case import L, N, given, indices, ones, times

_HEADS = dict(num_attention_heads=2, attention_head_dim=8, num_layers=2)
_JOINT = {**_HEADS, "joint_attention_dim": 16}
_STREAMS = {**_JOINT, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (2, 2, 4)}
_PATCHES = dict(patch_size=2, in_channels=4)
_LATENT = dict(hidden_states=(N, 4, 8, 8), timestep=times)
_TEXT = dict(**_LATENT, encoder_hidden_states=(N, L, 16))
_PACKED = dict(hidden_states=(N, 16, 4), timestep=times, encoder_hidden_states=(N, L, 16))
_GRID = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
_IDS = dict(img_ids=_GRID, txt_ids=lambda rows, length: torch.zeros(length, 3))
_FOUR = dict(img_ids=ones(16, 4), txt_ids=ones(L, 4))
_MASK = dict(encoder_attention_mask=ones(N, L, dtype=torch.bool))
_SHAPES = dict(img_shapes=lambda rows, length: [[(1, 4, 4)]] * rows)
_SIZES = dict(target_size=ones(N, 2), crop_coords=ones(N, 2))
_HUNYUAN = dict(
    **_PATCHES,
    num_attention_heads=2,
    attention_head_dim=8,
    sample_size=8,
    hidden_size=16,
    cross_attention_dim=16,
    cross_attention_dim_t5=16,
    pooled_projection_dim=8,
    text_len=4,
    text_len_t5=6,
)
_TWO_TEXTS = dict(
    hidden_states=(N, 4, 8, 8),
    timestep=ones(N),
    encoder_hidden_states=(N, 4, 16),
    text_embedding_mask=ones(N, 4),
    encoder_hidden_states_t5=(N, 6, 16),
    text_embedding_mask_t5=ones(N, 6),
    image_meta_size=ones(N, 6),
    style=indices(1, N),
    image_rotary_emb=[(16, 8), (16, 8)],
)
_QWEN = dict(**_JOINT, in_channels=16, out_channels=4, axes_dims_rope=(2, 2, 4))
_QWEN_TEXT = {
    **_PACKED,
    **_SHAPES,
    "hidden_states": (N, 16, 16),
    "encoder_hidden_states_mask": ones(N, L, dtype=torch.long),
}
_SD3 = dict(**_JOINT, **_PATCHES, sample_size=8, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4)
_SANA = dict(
    **_HEADS,
    in_channels=4,
    out_channels=4,
    num_cross_attention_heads=2,
    cross_attention_head_dim=8,
    cross_attention_dim=16,
    caption_channels=16,
    sample_size=8,
)


def _positions(width: int) -> Any:
    """Of the text and then the image, in the order of the joint sequence."""
    return lambda rows, length: torch.cat([torch.arange(length)[:, None].expand(-1, width), _GRID.long() + length])


IMAGES = {
    "AuraFlowTransformer2DModel": (
        {
            **_PATCHES,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "joint_attention_dim": 16,
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        given(**_TEXT),
    ),
    "BriaFibo2Transformer2DModel": (
        dict(
            **_PATCHES,
            dim=16,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=16,
            injection_layer_ids=(0, 1),
            perceiver_num_layers=1,
            min_num_gist_tokens=2,
            max_num_gist_tokens=4,
            gist_step=1,
            gist_min_text_len=2,
            gist_max_text_len=32,
            axes_dims=(2, 2, 4),
            axes_lens=(64, 16, 16),
        ),
        given(**{**_TEXT, "encoder_hidden_states": (N, 3, L, 16)}, **_MASK),
    ),
    "BriaFiboTransformer2DModel": (
        {**_STREAMS, "text_encoder_dim": 12},
        given(**_PACKED, **_IDS, text_encoder_layers=[(N, L, 12)] * 2),
    ),
    "BriaTransformer2DModel": (_STREAMS, given(**_PACKED, **_IDS)),
    "ChromaTransformer2DModel": (
        {**_STREAMS, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        given(**_PACKED, **_IDS),
    ),
    "CogView3PlusTransformer2DModel": (
        dict(
            **_HEADS, **_PATCHES, out_channels=4, text_embed_dim=16, time_embed_dim=16, condition_dim=8, sample_size=8
        ),
        given(**_TEXT, **_SIZES, original_size=ones(N, 2)),
    ),
    "CogView4Transformer2DModel": (
        dict(
            **_HEADS,
            **_PATCHES,
            out_channels=4,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
        given(**_TEXT, **_SIZES, original_size=ones(N, 2)),
    ),
    "DiTTransformer2DModel": (
        dict(**_HEADS, **_PATCHES, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10),
        given(**_LATENT, class_labels=indices(10, N)),
    ),
    "ErnieImageTransformer2DModel": (
        dict(
            hidden_size=16,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=32,
            in_channels=4,
            out_channels=4,
            text_in_dim=16,
            rope_axes_dim=(2, 2, 4),
        ),
        given(**_LATENT, text_bth=(N, L, 16), text_lens=lambda rows, length: torch.full((rows,), length)),
    ),
    "FluxTransformer2DModel": (
        {**_STREAMS, "pooled_projection_dim": 16},
        given(**_PACKED, **_IDS, pooled_projections=(N, 16)),
    ),
    "Flux2Transformer2DModel": (
        {**_STREAMS, "axes_dims_rope": (2,) * 4, "timestep_guidance_channels": 8},
        given(**_PACKED, **_FOUR, guidance=times),
    ),
    "Flux3Transformer2DModel": (
        {**_STREAMS, "axes_dims_rope": (2,) * 4, "cond_in_channels": 4, "timestep_channels": 8},
        given(**_PACKED, **_FOUR),
    ),
    "GlmImageTransformer2DModel": (
        dict(
            **_HEADS,
            **_PATCHES,
            out_channels=4,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=16,
        ),
        given(
            **_TEXT,
            **_SIZES,
            prior_token_id=indices(16, N, 16),
            prior_token_drop=lambda rows, length: torch.arange(rows) % 2 == 0,
        ),
    ),
    "HiDreamImageTransformer2DModel": (
        {
            **_HEADS,
            **_PATCHES,
            "num_layers": 1,
            "num_single_layers": 1,
            "caption_channels": [16, 16],
            "text_emb_dim": 16,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
        },
        given(
            hidden_states=(N, 4, 8, 8),
            timesteps=times,
            encoder_hidden_states_t5=(N, L, 16),
            encoder_hidden_states_llama3=(2, N, L, 16),
            pooled_embeds=(N, 16),
        ),
    ),
    "HunyuanDiT2DModel": (dict(**_HUNYUAN, num_layers=2), given(**_TWO_TEXTS)),
    "HunyuanImageTransformer2DModel": (
        dict(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            rope_axes_dim=(4, 4),
        ),
        given(**{**_TEXT, "timestep": (N,)}, **_MASK),
    ),
    "Ideogram4Transformer2DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "intermediate_size": 32,
            "adaln_dim": 8,
            "llm_features_dim": 16,
            "mrope_section": (2, 1, 1),
        },
        given(
            hidden_states=(N, L, 4),
            timestep=(N,),
            encoder_hidden_states=(N, L, 16),
            position_ids=indices(8, N, L, 3),
            segment_ids=ones(N, L, dtype=torch.long),
            indicator=lambda rows, length: (torch.arange(length) % 2 + 2).expand(rows, length),
        ),
    ),
    "Krea2Transformer2DModel": (
        dict(
            **_HEADS,
            in_channels=4,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=8,
            text_hidden_dim=16,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(2, 2, 4),
        ),
        given(**{**_PACKED, "encoder_hidden_states": (N, L, 3, 16)}, position_ids=_positions(3)),
    ),
    "LongCatImageTransformer2DModel": ({**_STREAMS, "pooled_projection_dim": 16}, given(**_PACKED, **_IDS)),
    "Lumina2Transformer2DModel": (
        dict(
            **_PATCHES,
            sample_size=8,
            hidden_size=16,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(64, 16, 16),
            cap_feat_dim=16,
        ),
        given(**_TEXT, **_MASK),
    ),
    "LuminaNextDiT2DModel": (
        dict(
            **_PATCHES,
            sample_size=8,
            hidden_size=16,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=16,
        ),
        given(
            **_TEXT,
            encoder_mask=ones(N, L, dtype=torch.bool),
            image_rotary_emb=lambda rows, length: torch.polar(torch.ones(4, 4, 4), torch.rand(4, 4, 4)),
            cross_attention_kwargs=lambda rows, length: {},
        ),
    ),
    "NucleusMoEImageTransformer2DModel": (
        dict(
            **_JOINT,
            in_channels=16,
            out_channels=4,
            axes_dims_rope=(2, 2, 4),
            dense_moe_strategy="leave_first_block_dense",
            num_experts=4,
            moe_intermediate_dim=16,
            capacity_factors=[2.0, 2.0],
        ),
        given(**{**_PACKED, "hidden_states": (N, 16, 16)}, img_shapes=lambda rows, length: [(1, 4, 4)] * rows),
    ),
    "OmniGenTransformer2DModel": (
        dict(
            **_PATCHES,
            hidden_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            num_layers=2,
            pad_token_id=0,
            vocab_size=32,
            max_position_embeddings=64,
            original_max_position_embeddings=64,
            rope_scaling={"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
            pos_embed_max_size=16,
            time_step_dim=8,
        ),
        given(
            **_LATENT,
            input_ids=indices(32, N, L),
            input_img_latents=[],
            input_image_sizes=lambda rows, length: {},
            attention_mask=lambda rows, length: torch.ones(rows, length + 17, length + 17),
            position_ids=lambda rows, length: torch.arange(length + 17).expand(rows, -1),
        ),
    ),
    "OvisImageTransformer2DModel": ({**_STREAMS, "out_channels": 4}, given(**_PACKED, **_IDS)),
    "PRXTransformer2DModel": (
        dict(**_PATCHES, context_in_dim=16, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[4, 4]),
        given(**_TEXT, attention_mask=ones(N, L, dtype=torch.bool)),
    ),
    "PixArtTransformer2DModel": (
        dict(**_HEADS, **_PATCHES, sample_size=8, cross_attention_dim=16, caption_channels=16),
        given(**_TEXT, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "PriorTransformer": (
        dict(**_HEADS, embedding_dim=16, num_embeddings=6),
        given(hidden_states=(N, 16), timestep=times, proj_embedding=(N, 16), encoder_hidden_states=(N, 6, 16)),
    ),
    "QwenImageTransformer2DModel": (_QWEN, given(**_QWEN_TEXT)),
    "QwenImage21Transformer2DModel": (
        dict(**_HEADS, in_channels=4, out_channels=4, context_in_dim=16, axes_dims_rope=(2, 2, 4)),
        given(
            **_PACKED,
            **_SHAPES,
            img_mask=lambda rows, length: (torch.arange(length + 4) >= length).expand(rows, -1),
        ),
    ),
    "SD3Transformer2DModel": (
        dict(**_SD3, dual_attention_layers=(0,), qk_norm="rms_norm"),
        given(**_TEXT, pooled_projections=(N, 16)),
    ),
    "SanaTransformer2DModel": (_SANA, given(**_TEXT)),
    "ZImageTransformer2DModel": (
        dict(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
        given(
            x=lambda rows, length: [torch.randn(4, 1, 8, 8) for _ in range(rows)],
            t=(N,),
            cap_feats=lambda rows, length: [torch.randn(length, 16) for _ in range(rows)],
        ),
    ),
    # -- ControlNets of transformers --------------------------------------------------------------------------
    "FluxControlNetModel": (
        {**_STREAMS, "pooled_projection_dim": 16},
        given(**_PACKED, **_IDS, pooled_projections=(N, 16), controlnet_cond=(N, 16, 4)),
    ),
    "HunyuanDiT2DControlNetModel": (
        dict(**_HUNYUAN, transformer_num_layers=4),
        given(**_TWO_TEXTS, controlnet_cond=(N, 4, 8, 8)),
    ),
    "QwenImageControlNetModel": (_QWEN, given(**_QWEN_TEXT, controlnet_cond=(N, 16, 16))),
    "SD3ControlNetModel": (_SD3, given(**_TEXT, pooled_projections=(N, 16), controlnet_cond=(N, 4, 8, 8))),
    "SanaControlNetModel": (_SANA, given(**_TEXT, controlnet_cond=(N, 4, 8, 8))),
}
