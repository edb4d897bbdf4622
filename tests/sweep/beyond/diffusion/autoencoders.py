"""Autoencoders of diffusers: a tiny config and what it is called with."""

from __future__ import annotations

from tests.sweep.beyond.case import L, N, given

_IMAGE = (N, 3, 16, 16)
_FILM = (N, 3, 5, 16, 16)


def _levels(down: str, up: str, levels: int = 2, groups: int = 8) -> dict[str, object]:
    return dict(
        down_block_types=(down,) * levels,
        up_block_types=(up,) * levels,
        block_out_channels=(16,) * levels,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=groups,
    )


_2D = _levels("DownEncoderBlock2D", "UpDecoderBlock2D")

AUTOENCODERS = {
    "AutoencoderKL": (_2D, given(sample=_IMAGE)),
    "AutoencoderKLFlux2": ({**_2D, "sample_size": 16}, given(sample=_IMAGE)),
    "VQModel": ({**_2D, "num_vq_embeddings": 16}, given(sample=_IMAGE)),
    "AsymmetricAutoencoderKL": (
        dict(
            down_block_types=("DownEncoderBlock2D",) * 2,
            down_block_out_channels=(16, 16),
            up_block_types=("UpDecoderBlock2D",) * 2,
            up_block_out_channels=(16, 32),
            norm_num_groups=8,
        ),
        given(sample=_IMAGE),
    ),
    "AutoencoderKLTemporalDecoder": (
        dict(down_block_types=("DownEncoderBlock2D",) * 2, block_out_channels=(32, 32)),
        given(sample=_IMAGE),
    ),
    "AutoencoderTiny": (
        dict(
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        given(sample=_IMAGE),
    ),
    "AutoencoderDC": (
        dict(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
        ),
        given(sample=_IMAGE),
    ),
    "ConsistencyDecoderVAE": (
        dict(
            encoder_block_out_channels=(16, 32),
            encoder_down_block_types=("DownEncoderBlock2D",) * 2,
            encoder_layers_per_block=1,
            encoder_norm_num_groups=8,
            decoder_block_out_channels=(16, 32),
            decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
            decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
            decoder_layers_per_block=1,
            decoder_norm_num_groups=8,
        ),
        given(sample=_IMAGE),
    ),
    "AutoencoderKLKVAE": (
        dict(channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 2)),
        given(sample=_IMAGE),
    ),
    "AutoencoderKLHunyuanImage": (
        dict(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 64),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=16,
        ),
        given(sample=_IMAGE),
    ),
    "AutoencoderRAE": (
        dict(
            encoder_hidden_size=64,
            encoder_patch_size=4,
            encoder_num_hidden_layers=1,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
            patch_size=4,
            encoder_input_size=16,
            image_size=16,
        ),
        given(sample=_IMAGE),
    ),
    # -- of films ---------------------------------------------------------------------------------------------
    "AutoencoderKLCogVideoX": (
        {**_levels("CogVideoXDownBlock3D", "CogVideoXUpBlock3D", 3), "sample_height": 16, "sample_width": 16},
        given(sample=_FILM),
    ),
    "AutoencoderKLCosmos": (
        dict(
            latent_channels=4,
            encoder_block_out_channels=(16, 16, 16),
            decode_block_out_channels=(16, 16, 16),
            attention_resolutions=(8,),
            resolution=16,
            num_layers=1,
            patch_size=2,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
            latents_mean=None,
            latents_std=None,
        ),
        given(sample=_FILM),
    ),
    "AutoencoderKLHunyuanVideo": (
        {**_levels("HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D", 4)},
        given(sample=_FILM),
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        dict(
            latent_channels=4,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        given(sample=_FILM),
    ),
    "AutoencoderKLHunyuanVideo15": (
        dict(
            latent_channels=4,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        given(sample=(1, 3, 5, 16, 16)),
    ),
    "AutoencoderKLKVAEVideo": (
        dict(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=4, temporal_compress_times=2),
        given(sample=_FILM),
    ),
    "AutoencoderKLLTXVideo": (
        dict(
            latent_channels=8,
            block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            down_block_types=("LTXVideoDownBlock3D",) * 2,
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False),
            decoder_inject_noise=(False,) * 3,
            downsample_type=("conv", "conv"),
            upsample_residual=(False, False),
            upsample_factor=(1, 1),
            patch_size=2,
        ),
        given(sample=_FILM),
    ),
    "AutoencoderKLLTX2Video": (
        dict(
            latent_channels=8,
            block_out_channels=(8, 16),
            decoder_block_out_channels=(8,),
            down_block_types=("LTX2VideoDownBlock3D",) * 2,
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True, True),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial", "spatiotemporal"),
            upsample_type=("spatiotemporal",),
            upsample_residual=(True,),
            upsample_factor=(2,),
            patch_size=2,
        ),
        given(sample=_FILM),
    ),
    "AutoencoderKLMagvit": (
        {**_levels("SpatialTemporalDownBlock3D", "SpatialTemporalUpBlock3D")},
        given(sample=_FILM),
    ),
    "AutoencoderKLMiniMaxH3": (
        dict(
            latent_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2),
            temporal_downsample_factors=(2, 2),
            norm_num_groups=8,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            clip_length=5,
            token_drop=0,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        given(sample=_FILM),
    ),
    "AutoencoderKLMochi": (
        dict(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            latent_channels=4,
            layers_per_block=(1, 1, 1, 1, 1),
            temporal_expansions=(1, 2, 3),
            latents_mean=None,
            latents_std=None,
        ),
        given(sample=(N, 3, 7, 16, 16)),
    ),
    "AutoencoderKLQwenImage": (
        dict(base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]),
        given(sample=_FILM),
    ),
    "AutoencoderKLQwenImage21": (
        dict(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
        ),
        given(sample=(N, 4, 1, 16, 16)),
    ),
    "AutoencoderKLWan": (
        dict(base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]),
        given(sample=_FILM),
    ),
    "AutoencoderVidTok": (
        dict(ch=32, ch_mult=[1, 2, 2], num_res_blocks=1),
        given(sample=_FILM, sample_posterior=False),
    ),
    "Kandinsky6SRVAE": (
        dict(
            latent_channels=4,
            encoder_block_out_channels=(32, 32, 32),
            decoder_block_out_channels=(32, 32, 32),
            layers_per_block=1,
        ),
        given(sample=_FILM),
    ),
    # -- of sound ---------------------------------------------------------------------------------------------
    "AutoencoderOobleck": (
        dict(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=8,
            decoder_input_channels=4,
        ),
        given(sample=(N, 2, 64)),
    ),
    "AutoencoderKLKVAEAudio": (
        dict(
            encoder_dim=8,
            encoder_rates=[2, 4],
            latent_dim=32,
            codebook_dim=4,
            decoder_dim=32,
            decoder_rates=[4, 2],
            attn_num_heads=2,
        ),
        given(sample=(N, 1, 64)),
    ),
    "AutoencoderKLLTX2Audio": (
        dict(base_channels=32, ch_mult=(1, 2), num_res_blocks=1, latent_channels=4, mel_bins=16),
        given(sample=(N, 2, 16, 16)),
    ),
    "AutoencoderKLMiniMaxH3Audio": (
        dict(
            encoder_dim=8,
            encoder_rates=(2, 4),
            latent_dim=32,
            latent_channels=4,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(4, 2),
            decoder_kernel_sizes=(8, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
        given(sample=(N, 1, 64)),
    ),
    "AutoencoderSAME": (
        dict(
            patch_size=4,
            encoder_channels=16,
            encoder_c_mults=(2,),
            encoder_strides=(2,),
            encoder_transformer_depths=(2,),
            latent_dim=8,
            dim_heads=8,
        ),
        given(sample=(N, 2, 64)),
    ),
    "Cosmos3AVAEAudioTokenizer": (
        dict(
            vocoder_input_dim=8,
            dec_dim=8,
            dec_c_mults=(1, 2),
            dec_strides=(2, 4),
            enc_dim=16,
            enc_intermediate_dim=32,
            enc_num_layers=1,
            enc_num_blocks=1,
            enc_n_fft=16,
            enc_hop_length=4,
            enc_latent_dim=16,
            enc_c_mults=(1, 2),
            enc_strides=(2, 1),
        ),
        given(sample=(N, 2, 64)),
    ),
    "LongCatAudioDiTVae": (
        dict(channels=8, c_mults=[1, 2], strides=[2, 2], latent_dim=4, encoder_latent_dim=8, downsampling_ratio=4),
        given(sample=(N, 1, 64)),
    ),
    "MMAudioVAE": (
        dict(mel_bins=8, latent_channels=4, hidden_channels=16, layers_per_block=1, n_fft=64, hop_length=16),
        given(sample=(N, 512)),
    ),
    "MMAudioVocoder": (
        dict(
            num_mels=8,
            upsample_initial_channel=16,
            upsample_rates=(2, 2),
            upsample_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
        given(mel=(N, 8, 16)),
    ),
    "MiniMaxMusic3Vocoder": (
        dict(latent_channels=8, decoder_input_dim=16, decoder_hidden_dim=32, upsampling_ratios=(4, 2)),
        given(latents=(N, 8, L)),
    ),
}
