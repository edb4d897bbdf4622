"""x-transformers, tiny, over its options."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.sweep.beyond.case import Case, L, N, given, indices, ones

_SIZES = dict(dim=32, depth=2, heads=2, attn_dim_head=16)
_TOKENS = dict(num_tokens=32, max_seq_len=16)

_SWITCHES = (
    "add_value_residual",
    "attn_add_zero_kv",
    "attn_cog_signed",
    "attn_data_dependent_alibi",
    "attn_gate_value_heads",
    "attn_hard",
    "attn_head_learned_sink",
    "attn_head_scale",
    "attn_inverted_attention",
    "attn_k_rmsnorm",
    "attn_l2_distance",
    "attn_laser",
    "attn_orthog_projected_values",
    "attn_output_gate",
    "attn_pre_scale_post_talking_heads",
    "attn_qk_rmsnorm",
    "attn_selective",
    "attn_sigmoid",
    "attn_softclamp_logits",
    "attn_swiglu_values",
    "attn_use_cope",
    "attn_use_rel_proj_pos_bias",
    "attn_value_rmsnorm",
    "depth_scale_residual",
    "dynamic_pos_bias",
    "ff_glu",
    "ff_no_bias",
    "ff_post_act_ln",
    "ff_solu",
    "ff_swish",
    "gate_residual",
    "integrate_layers",
    "mv_split_residual",
    "only_attn",
    "orthog_residual",
    "polar_pos_emb",
    "pre_and_post_norm",
    "reinject_input",
    "rotary_pos_emb",
    "rotary_xpos",
    "scale_residual",
    "softclamp_output",
    "unet_skips",
    "use_derf",
    "use_dynamic_tanh",
    "use_layerscale",
    "use_rmsnorm",
    "weight_tie_layers",
)
"""Options of the layers that are on or off, ``attn_`` those of the attention, ``ff_`` those of the feed-forward."""

_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True, "rotary_pos_emb": True},
    "simple rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "qk norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "grouped qk norm": {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "relative bias": {"rel_pos_bias": True},
    "log distance": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
    "partial rotary": {"rotary_pos_emb": True, "rotary_emb_dim": 8},
    "flash": {"attn_flash": True},
    "flash alibi": {"attn_flash": True, "alibi_pos_bias": True},
    "squared relu": {"ff_relu_squared": True},
    "glu bias": {"ff_glu": True, "ff_glu_mult_bias": True},
    "clamped glu": {"ff_glu": True, "ff_glu_softclamp": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "grouped": {"attn_kv_heads": 1},
    "one kv head": {"attn_one_kv_head": True},
    "top-k": {"attn_sparse_topk": 4},
    "window": {"attn_max_attend_past": 4},
    "latent attention": {
        "attn_use_latent_q": True,
        "attn_dim_latent_q": 8,
        "attn_use_latent_kv": True,
        "attn_dim_latent_kv": 8,
    },
    "wide values": {"attn_value_dim_head": 24},
    "sandwich": {"sandwich_norm": True},
    "post norm": {"pre_norm": False},
    "residual attention": {"residual_attn": True},
    "post norm with residual attention": {"pre_norm": False, "residual_attn": True},
    "gated values": {"attn_gate_values": True},
    "gated values by head": {"attn_gate_values": True, "attn_gate_values_headwise": True},
    "memory": {"attn_num_mem_kv": 2},
    "shift tokens": {"shift_tokens": 1},
    "adaptive norm": {"use_adaptive_layernorm": True, "dim_condition": 16},
    "adaptive rmsnorm": {"use_adaptive_rmsnorm": True, "dim_condition": 16, "adaptive_condition_mlp": True},
    "adaptive norm zero": {"use_adaptive_layernorm": True, "use_adaptive_layerscale": True, "dim_condition": 16},
    "macaron": {"macaron": True},
    "parallel layers": {"par_ratio": 2, "depth": 4},
    "sandwich of layers": {"sandwich_coef": 1},
    "hyper connections": {"num_residual_streams": 2},
    "diff residuals": {"num_residual_streams": 2, "qkv_receive_diff_residuals": True},
    **{name: {name: True} for name in _SWITCHES},
}


def _tokens(layers: str, flags: dict[str, Any], **options: Any) -> nn.Module:
    library = importlib.import_module("x_transformers")
    attention = getattr(library, layers)(**{**_SIZES, **flags})
    model: nn.Module = library.TransformerWrapper(**_TOKENS, attn_layers=attention, **options)
    return model


def _of(cls: str, layers: str = "Encoder", **options: Any) -> Callable[[], nn.Module]:
    """A wrapper of what is no text."""

    def make() -> nn.Module:
        library = importlib.import_module("x_transformers")
        model: nn.Module = getattr(library, cls)(attn_layers=getattr(library, layers)(**_SIZES), **options)
        return model

    return make


def _sequence_to_sequence() -> nn.Module:
    library = importlib.import_module("x_transformers")
    sizes = {**_TOKENS, **{name: size for name, size in _SIZES.items() if name != "dim"}}
    sides = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
    model: nn.Module = library.XTransformer(dim=_SIZES["dim"], **sides)
    return model


_IDS = indices(32, N, L)
_CONTEXT = dict(context=(N, 5, 32))
_WRAPPED: dict[str, Case] = {
    "encoder": Case(lambda: _tokens("Encoder", {}), given(x=_IDS, mask=ones(N, L, dtype=torch.bool))),
    "encoder of pooled tokens": Case(lambda: _tokens("Encoder", {}, average_pool_embed=True), given(x=_IDS)),
    "encoder with a class token": Case(lambda: _tokens("Encoder", {}, use_cls_token=True), given(x=_IDS)),
    "encoder with pooled attention": Case(lambda: _tokens("Encoder", {}, attn_pool=True), given(x=_IDS)),
    "prefix decoder": Case(lambda: _tokens("PrefixDecoder", {}), given(x=_IDS)),
    "cross-attending encoder": Case(lambda: _tokens("Encoder", {"cross_attend": True}), given(x=_IDS, **_CONTEXT)),
    "cross-attending decoder": Case(lambda: _tokens("Decoder", {"cross_attend": True}), given(x=_IDS, **_CONTEXT)),
    "cross-attender": Case(lambda: _tokens("CrossAttender", {}), given(x=_IDS, **_CONTEXT)),
    "tied embedding": Case(lambda: _tokens("Decoder", {}, tie_embedding=True), given(x=_IDS)),
    "normed embedding": Case(lambda: _tokens("Decoder", {}, post_emb_norm=True, emb_dim=16), given(x=_IDS)),
    "l2-normed embedding": Case(lambda: _tokens("Decoder", {}, l2norm_embed=True), given(x=_IDS)),
    "sinusoidal embedding": Case(lambda: _tokens("Decoder", {}, scaled_sinu_pos_emb=True), given(x=_IDS)),
    "memory tokens": Case(lambda: _tokens("Decoder", {}, num_memory_tokens=2), given(x=_IDS)),
    "mixture of softmax": Case(lambda: _tokens("Decoder", {}, mixture_of_softmax=True), given(x=_IDS)),
    "deep embedding": Case(lambda: _tokens("Decoder", {}, ff_deep_embed=True), given(x=_IDS)),
    "images": Case(
        _of("ViTransformerWrapper", image_size=16, patch_size=4, num_classes=7, num_register_tokens=2),
        given(img=(N, 3, 16, 16)),
    ),
    "continuous": Case(
        _of("ContinuousTransformerWrapper", "Decoder", max_seq_len=16, dim_in=8, dim_out=8), given(x=(N, L, 8))
    ),
    "sequence to sequence": Case(_sequence_to_sequence, given(src=indices(32, N, 7), tgt=_IDS)),
}

X_TRANSFORMERS = (*_FLAGS, *_WRAPPED)


def of_flags(name: str) -> Case:
    """A decoder with the options of this name, or another model of the library."""
    if name in _WRAPPED:
        return _WRAPPED[name]
    flags = _FLAGS[name]
    condition = {"condition": (N, 16)} if "dim_condition" in flags else {}
    return Case(lambda: _tokens("Decoder", flags), given(x=_IDS, **condition))
