"""UNets of diffusers, their ControlNets and adapters: a tiny config and what it is called with."""

from __future__ import annotations

import torch

from tests.sweep.beyond.case import L, N, given, indices, ones, times

_BLOCKS = dict(block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1)
_ATTENTION = dict(cross_attention_dim=16, attention_head_dim=8)
_TEXT = dict(sample=(N, 4, 8, 8), timestep=times, encoder_hidden_states=(N, L, 16))
_VIDEO = {**_TEXT, "sample": (N, 4, 2, 8, 8)}
_FRAMES = {**_VIDEO, "encoder_hidden_states": lambda rows, length: torch.randn(rows * 2, length, 16)}


def _crossing(kind: str = "2D") -> dict[str, tuple[str, str]]:
    """Two levels each way, the outer one with cross-attention."""
    return dict(
        down_block_types=(f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"),
        up_block_types=(f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"),
    )


_CONTROL = {
    **_BLOCKS,
    **_ATTENTION,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "conditioning_embedding_out_channels": (8, 16),
}
_CONDITION = (N, 3, 16, 16)  # the embedding halves it once

UNETS = {
    "UNet1DModel": (
        dict(sample_size=64, time_embedding_dim=16, extra_in_channels=16),
        given(sample=(N, 2, 64), timestep=times),
    ),
    "UNet2DConditionModel": ({**_BLOCKS, **_ATTENTION, **_crossing()}, given(**_TEXT)),
    "UNet2DModel": (
        {
            **_BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "resnet_time_scale_shift": "scale_shift",
        },
        given(sample=(N, 3, 8, 8), timestep=times),
    ),
    "UNet3DConditionModel": ({**_BLOCKS, **_ATTENTION, **_crossing("3D")}, given(**_VIDEO)),
    "I2VGenXLUNet": (
        {**_BLOCKS, **_ATTENTION, **_crossing("3D")},
        given(**_VIDEO, fps=times, image_latents=(N, 4, 2, 8, 8), image_embeddings=(N, 16)),
    ),
    "UNetMotionModel": (
        {**_BLOCKS, **_crossing("Motion"), "cross_attention_dim": 16, "num_attention_heads": 2},
        given(**_FRAMES),
    ),
    "UNetSpatioTemporalConditionModel": (
        dict(
            **_crossing("SpatioTemporal"),
            block_out_channels=(32, 64),
            layers_per_block=1,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            cross_attention_dim=16,
            num_attention_heads=(2, 4),
        ),
        given(sample=(N, 2, 8, 8, 8), timestep=times, encoder_hidden_states=(N, 1, 16), added_time_ids=(N, 3)),
    ),
    "DreamLiteUNetModel": (
        {
            **_BLOCKS,
            **_ATTENTION,
            "down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        },
        given(**_TEXT),
    ),
    "Kandinsky3UNet": (
        dict(
            time_embedding_dim=32,
            groups=8,
            attention_head_dim=8,
            layers_per_block=2,
            block_out_channels=(16, 16, 16, 16),
            cross_attention_dim=16,
            encoder_hid_dim=16,
        ),
        given(**{**_TEXT, "sample": (N, 4, 16, 16)}, encoder_attention_mask=ones(N, L)),
    ),
    "UVit2DModel": (
        dict(
            hidden_size=32,
            cond_embed_dim=16,
            micro_cond_encode_dim=8,
            micro_cond_embed_dim=40,
            encoder_hidden_size=16,
            vocab_size=40,
            codebook_size=32,
            in_channels=32,
            block_out_channels=32,
            num_res_blocks=1,
            block_num_heads=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            sample_size=8,
        ),
        given(
            input_ids=indices(32, N, 8, 8),
            encoder_hidden_states=(N, L, 16),
            pooled_text_emb=(N, 16),
            micro_conds=(N, 5),
        ),
    ),
    "StableCascadeUNet": (
        dict(
            in_channels=4,
            out_channels=4,
            timestep_ratio_embedding_dim=8,
            conditioning_dim=32,
            block_out_channels=(32, 32),
            num_attention_heads=(2, 2),
            down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1),
            clip_text_in_channels=16,
            clip_text_pooled_in_channels=16,
            clip_image_in_channels=16,
            dropout=(0.0, 0.0),
        ),
        given(
            sample=(N, 4, 8, 8),
            timestep_ratio=(N,),
            clip_text_pooled=(N, 1, 16),
            clip_text=(N, L, 16),
            clip_img=(N, 1, 16),
        ),
    ),
    "ControlNetModel": (_CONTROL, given(**_TEXT, controlnet_cond=_CONDITION)),
    "ControlNetUnionModel": (
        {
            **_CONTROL,
            "addition_time_embed_dim": 8,
            "num_trans_channel": 16,
            "num_trans_head": 2,
            "num_proj_channel": 16,
        },
        given(
            **_TEXT,
            controlnet_cond=[_CONDITION],
            control_type=ones(N, 6),
            control_type_idx=[0],
        ),
    ),
    "SparseControlNetModel": (
        {
            **_CONTROL,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "conditioning_channels": 4,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
        },
        given(**_FRAMES, controlnet_cond=(N, 4, 2, 8, 8), conditioning_mask=ones(N, 1, 2, 8, 8)),
    ),
    "UNetControlNetXSModel": (
        dict(
            **_crossing(),
            sample_size=8,
            block_out_channels=(16, 32),
            norm_num_groups=8,
            cross_attention_dim=16,
            num_attention_heads=2,
            ctrl_conditioning_embedding_out_channels=(8, 16),
            ctrl_block_out_channels=(8, 8),
            ctrl_num_attention_heads=2,
            ctrl_max_norm_num_groups=4,
        ),
        given(**_TEXT, controlnet_cond=_CONDITION),
    ),
    "T2IAdapter": (dict(channels=(16, 32), num_res_blocks=1, downscale_factor=2), given(x=_CONDITION)),
    "DreamLiteTransformer2DModel": (
        dict(in_channels=16, num_attention_heads=2, norm_num_groups=8, **_ATTENTION),
        given(hidden_states=(N, 16, 8, 8), encoder_hidden_states=(N, L, 16)),
    ),
    "Transformer2DModel": (
        dict(in_channels=16, num_attention_heads=2, norm_num_groups=8, **_ATTENTION),
        given(hidden_states=(N, 16, 8, 8), encoder_hidden_states=(N, L, 16)),
    ),
    "DualTransformer2DModel": (
        dict(in_channels=16, num_attention_heads=2, norm_num_groups=8, **_ATTENTION),
        given(hidden_states=(N, 16, 8, 8), encoder_hidden_states=(N, 77 + 257, 16)),
    ),
    "TransformerTemporalModel": (
        dict(in_channels=16, num_attention_heads=2, attention_head_dim=8, norm_num_groups=8),
        given(hidden_states=lambda rows, length: torch.randn(rows * 2, 16, 4, 4), num_frames=2),
    ),
    "Kandinsky6SRLatentUpscalerBank": (
        dict(in_channels=4, stage_channels=(16, 16, 8), num_pre_blocks=1, num_mid_blocks=1, num_post_blocks=1),
        given(latents=(N, 4, 2, 8, 8), scale=2),
    ),
}
