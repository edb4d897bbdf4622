"""Reduction of any model config to a tiny one, by the names and types of its fields.

Only :data:`EXCEPTIONS` are listed by architecture. Related fields stay consistent: equal head counts stay equal, the
hidden size is heads times head size, all kinds of layers in a list are preserved, and a token id in two configs is
replaced by the same new id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, INNER, HEADS, HEAD_SIZE, LAYERS = 64, 128, 4, 16, 2
VOCABULARY, POSITIONS = 128, 128
IMAGE, PATCH = 32, 8

# Fields with interdependent or missing values, specific to one architecture.
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "align": {"projection_dim": 32},
    "align_vision_model": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"use_cache": False},
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 16},
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 28}},
    "clap_audio_model": {"spec_size": 128, "num_mel_bins": 32},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": HEADS // 2, "clip_qkv": 8, "rope_theta": 10_000.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101, "<|visual token 000000|>": 102}},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 128},
    "esm": {"pad_token_id": 1, "mask_token_id": 32},
    "fastspeech2_conformer_hifigan": {"model_in_dim": 16},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {"intermediate_size": 4 * WIDTH},
    "mllama_vision_model": {"vision_output_dim": 6 * WIDTH},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "muse_spark_audio": {"out_hidden_size": WIDTH},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_SIZE,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False},
    "sam2_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sapiens2_head": {
        "upsample_out_channels": [32],
        "upsample_kernel_sizes": [4],
        "conv_out_channels": [32],
        "conv_kernel_sizes": [1],
    },
    "xmod": {"default_language": "en_XX"},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "zamba": {
        "attention_hidden_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],  # at least two layers share their weights
    },
    "zamba2": {"mamba_headdim": WIDTH // 2, "attention_hidden_size": 2 * WIDTH, "hybrid_layer_ids": [1]},
}

# Required fields without a default.
REQUIRED: Mapping[str, int] = {
    "num_experts_per_tok": 2,
    "prediction_length": 4,
    "vocab_size": VOCABULARY,
    "image_token_index": VOCABULARY - 28,
    "video_token_index": VOCABULARY - 27,
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": HEADS,
}

# Replacement of backbones from a package not needed elsewhere by backbones of transformers.
SUBSTITUTES: Mapping[str, Mapping[str, Any]] = {
    "timm_backbone": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 64, 128],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
    }
}

Config = dict[str, Any]


def shrink(config: Config, keep: frozenset[str] = frozenset()) -> Config:
    """Return a copy of ``config`` with all sizes reduced, including its sub-configs.

    Args:
        config: the result of ``to_dict()``.
        keep: categories of :data:`RULES` to leave unchanged.
    """
    return _Shrinking(keep).config(config)


class _Shrinking:
    def __init__(self, keep: frozenset[str]) -> None:
        self.keep, self.ids = keep, dict[int, int]()

    def config(self, config: Config) -> Config:
        substitute = SUBSTITUTES.get(str(config.get("model_type")))
        if substitute is not None:
            stages = [stage for stage in config.get("out_indices") or [4] if stage > 0] or [4]
            return {**substitute, "out_features": [f"stage{stage}" for stage in stages]}
        layers = self.chosen_layers(config)
        small: Config = {}
        for name, value in config.items():
            nested = self.nested(name, value, config, layers) if isinstance(value, dict) else None
            small[name] = self.value(name, value, config, layers) if nested is None else nested
        if _staged(config) and "layers" not in self.keep:
            small.pop("stage_names")
            small.pop("out_indices", None)
            read = len(config.get("out_indices") or [0])
            small["out_features"] = [f"stage{1 + layer}" for layer in range(len(layers))][-read:]
        exceptions = EXCEPTIONS.get(str(config.get("model_type")), {})
        return {**small, **_first_stages(config, small), **exceptions}

    def nested(self, name: str, value: dict[Any, Any], config: Config, layers: list[int]) -> dict[Any, Any] | None:
        """Return a reduced copy of a dict in a config, or None if it is an ordinary value."""
        if name == "per_layer_config":
            return {new: self.config(value[old]) for new, old in enumerate(layers) if old in value}
        if "model_type" in value or name.endswith("config"):
            return self.config(value)
        if name.startswith("rope"):
            return value if "heads" in self.keep else _rope(value, _has_sections(config))
        return None

    def chosen_layers(self, config: Config) -> list[int]:
        """Return the indices of layers to keep: one of each kind, at least two, and enough for all layer indices."""
        count = next((config[n] for n in _DEPTH_NAMES if _whole(config.get(n))), 0)
        kinds = [v for v in config.values() if isinstance(v, list) and len(v) == count > 0 and not _nested(v)]
        seen: dict[Any, int] = {}
        for index, kind in enumerate(zip(*kinds, strict=True)):
            seen.setdefault(kind, index)
        chosen = sorted(seen.values()) or [0]
        asked = max((len(v) for n, v in config.items() if _is_indices(n, v)), default=0)
        asked = max(asked, len(config.get("out_indices") or ())) if _staged(config) else asked
        wanted = max(LAYERS, asked, len(chosen))
        chosen += [i for i in range(count) if i not in chosen][: wanted - len(chosen)]
        return sorted(chosen)

    def value(self, name: str, value: Any, config: Config, layers: list[int]) -> Any:
        if isinstance(value, list):
            return self.list(name, value, config, layers)
        if name in _DEPTH_NAMES and _whole(value) and "layers" not in self.keep:
            return min(value, len(layers))
        if value is None:
            return REQUIRED.get(name)
        if not _whole(value) or value < 2:
            return value
        if _TOKEN.search(name):
            return self.token(value)
        for pattern, category, small in RULES:
            if pattern.search(name):
                return value if category in self.keep else min(value, small(value, config))
        return value

    def token(self, value: int) -> int:
        """Return a token id within the small vocabulary.

        Ids in the lower half are unchanged. Others are replaced by new ids, counted down from its end.
        """
        if "vocabulary" in self.keep or value < VOCABULARY // 2:
            return value
        return self.ids.setdefault(value, VOCABULARY - 1 - len(self.ids))

    def list(self, name: str, value: list[Any], config: Config, layers: list[int]) -> Any:
        if "layers" not in self.keep and (chosen := self.by_layer(name, value, config, layers)) is not None:
            return chosen
        if not value or not all(_whole(v) for v in value):
            return value
        if _TOKEN.search(name):
            return [self.token(v) for v in value]
        if re.search(r"suppress", name):
            return None
        if name.endswith("codes") and "vocabulary" not in self.keep:
            return [v % VOCABULARY for v in value]
        for pattern, category, small in LISTS:
            if pattern.search(name):
                return value if category in self.keep else small(value)
        return value

    @staticmethod
    def by_layer(name: str, value: Sequence[Any], config: Config, layers: Sequence[int]) -> Sequence[Any] | None:
        """Return a shortened list of layer indices or per-layer values, or None for any other list."""
        count = next((config[n] for n in _DEPTH_NAMES if _whole(config.get(n))), 0)
        if _is_indices(name, value):
            return [min(v, number) if v >= 0 else v for number, v in enumerate(value)]
        return [value[i] for i in layers] if len(value) == count > len(layers) else None


_DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")
_TOKEN = re.compile(r"(token_id|token_ids|token_index|token_idx)$|^(image|video|audio)_token$")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nested(value: list[Any]) -> bool:
    return any(isinstance(item, (list, dict)) for item in value)


def _staged(config: Config) -> bool:
    """Check whether each layer is a stage with an output for a head."""
    return "stage_names" in config and any(_whole(config.get(name)) for name in _DEPTH_NAMES) and "depths" not in config


def _first_stages(config: Config, small: Config) -> Config:
    """Return the widths equal to the width of the first of several stages, reduced to match it."""
    stages = {v[0]: small[n][0] for n, v in config.items() if isinstance(v, list) and v and re.search(r"dim|chan", n)}
    return {n: stages[config[n]] for n in ("hidden_size", "embed_dim") if _whole(config.get(n)) and config[n] in stages}


def _is_indices(name: str, value: Any) -> bool:
    """Check whether a field holds indices of layers, such as the layers read by a head."""
    named = re.search(r"(index|indexes|indices|index_list|feature_layer|hidden_layers|_layers)$", name)
    whole = isinstance(value, list) and bool(value) and all(_whole(v) for v in value)
    return bool(named and whole and name != "out_indices" and sorted(set(value)) == sorted(value))


def _as_it_is(value: int, config: Config) -> int:
    return value


def _to(size: int) -> Callable[[int, Config], int]:
    return lambda value, config: size


def _key_value_heads(value: int, config: Config) -> int:
    return HEADS if value in (config.get(n) for n in ("num_attention_heads", "n_head", "n_heads")) else HEADS // 2


def _head_size(value: int, config: Config) -> int:
    """Return the head size.

    The heads of state space layers divide an expanded width, larger than the width of the model.
    """
    expand = config.get("expand") or config.get("mamba_expand") or 1
    return int(expand * WIDTH) // HEADS


def _width(value: int, config: Config) -> int:
    """Return the width, a smaller one for pyramids.

    A pyramid doubles its width from stage to stage.
    """
    return WIDTH // 4 if _is_pyramid(config) else WIDTH


def _is_pyramid(config: Config) -> bool:
    return any(isinstance(config.get(n), list) for n in ("depths", "hidden_sizes", "embed_dims", "num_heads"))


def _image(value: int, config: Config) -> int:
    """Return the image size: four patches per side, or twice as many for pyramids and models without patches.

    A pyramid halves its resolution at each stage.
    """
    return 2 * IMAGE if _is_pyramid(config) or "patch_size" not in config else IMAGE


def _window(value: int, config: Config) -> int:
    """Return the window size, for pyramids the largest one to fit their last stage."""
    return 2 if _is_pyramid(config) else value


# The first pattern matching the name of a field gives its maximum value.
RULES: list[tuple[re.Pattern[str], str, Callable[[int, Config], int]]] = [
    (re.compile(pattern), category, small)
    for pattern, category, small in (
        (r"^window_size$", "image", _window),
        (r"image_embedding_size", "image", _to(IMAGE // PATCH)),
        (r"feat_extract", "none", _as_it_is),
        (r"num_pos_feats", "dims", _to(WIDTH // 2)),
        (r"upsample_groups", "dims", _to(WIDTH)),
        (r"^num_groups$", "dims", _to(4)),
        (r"spec_size", "audio", _to(2 * IMAGE)),
        (r"(^|_)n_groups$", "heads", _to(1)),
        (r"type_vocab|num_labels|num_channels|in_chans|audio_channels", "none", _as_it_is),
        (r"vocab", "vocabulary", _to(VOCABULARY)),
        (r"codebook_size|num_codevectors|num_embeddings|^bandwidth", "vocabulary", _to(32)),
        (r"(key_value|kv)_heads|num_kv|multi_query_group", "heads", _key_value_heads),
        (r"head_(dim|size|channels)|d_head|dim_head|d_kv|^kv_channels|rope_head_dim", "heads", _head_size),
        (r"rotary_dim", "heads", _to(HEAD_SIZE // 2)),
        (r"(^|_)(n_heads?|num_heads?|heads)$", "heads", _to(HEADS)),
        (r"experts_per_tok|top_?k$|moe_k$|num_selected", "experts", _to(2)),
        (r"topk_group", "experts", _to(1)),
        (r"n_group$|expert_group", "experts", _to(2)),
        (r"shared_experts$", "experts", _to(1)),
        (r"experts?$", "experts", _to(4)),
        (r"first_k_dense|dense_layers$|kv_shared_layers|num_nextn", "layers", _to(1)),
        (r"(^|_)layers?$|(^|_)depth$|num_.*(layers|blocks)$|^n_layers?$|num_stages_decoder", "layers", _to(LAYERS)),
        (r"max_source_positions", "positions", _to(POSITIONS // 4)),
        (r"position|max_seq|max_length|context_length|seq_len|max_target|n_ctx", "positions", _to(POSITIONS)),
        (r"tokens_per_image|image_seq|num_patches", "image", _to(4)),
        (r"(image|img|input|crop|sample)_size$", "image", _image),
        (r"patch_(size|stride)$", "image", _to(PATCH)),
        (r"mel|feature_size|input_feat", "audio", _to(16)),
        (r"quer(y|ies)|latents|num_points|denoising|num_proposals", "queries", _to(8)),
        (
            r"kernel|window|chunk|stride|pool|sampl|rate|merge|block|crop|bins|hop|fft|length|scale|group",
            "none",
            _as_it_is,
        ),
        (r"intermediate|ffn|inner|mlp_dim|d_ff|ff_dim|feed_?forward|ffw|expansion_dim", "dims", _to(INNER)),
        (r"rank$|low_rank|lora", "dims", _to(HEAD_SIZE)),
        (r"hidden|embd?|d_model|dim|size|channels|width|features|proj|filters", "dims", _width),
    )
]


def _in_proportion(values: list[int]) -> list[int]:
    """Return reduced sizes of stages: the smallest is half of ``WIDTH``, the others keep their ratio to it.

    Sizes that are small enough already are unchanged; the others become multiples of 8.
    """
    least = min(values)
    if least <= WIDTH // 2:
        return values
    return [max(1, v * (WIDTH // 2) // least // 8) * 8 for v in values]


def _heads(values: list[int]) -> list[int]:
    return [max(1, v // min(values)) for v in values]


LISTS: list[tuple[re.Pattern[str], str, Callable[[list[int]], list[int]]]] = [
    (re.compile(pattern), category, small)
    for pattern, category, small in (
        (r"(image|img|input)_size$", "image", lambda values: [min(v, 2 * IMAGE) for v in values]),
        (r"depths|num_blocks|layers|block_repeats", "layers", lambda values: [min(v, LAYERS) for v in values]),
        (r"head", "heads", _heads),
        (r"kernel|stride|pool|scale|ratio|dilation|factor|padding|window|patch|indice", "none", lambda values: values),
        (r"hidden|dim|channel|size|width|embed|filter", "dims", _in_proportion),
    )
]


def _has_sections(config: Config) -> bool:
    """Check whether positions have several axes with shared rotary dimensions."""
    known = CONFIG_MAPPING[config["model_type"]] if config.get("model_type") in CONFIG_MAPPING else None
    return "mrope_section" in getattr(known, "ignore_keys_at_rope_validation", ())


def _rope(rope: Config, sections: bool) -> Config:
    """Return rotary settings for the small head size.

    The sections add up to half of the rotary dimensions.
    """
    if any(isinstance(value, dict) for value in rope.values()):  # one per layer type
        return {name: _rope(v, sections) if isinstance(v, dict) else v for name, v in rope.items()}
    if not rope:
        return rope
    small = dict(rope)
    half = HEAD_SIZE // 2
    if "mrope_section" in small or sections:
        factor = small.get("partial_rotary_factor")
        if factor is not None:
            small["partial_rotary_factor"] = factor = max(factor, 0.5)
        axes = len(small.get("mrope_section") or (1, 1, 1))
        total = int(half * (factor or 1.0))
        small["mrope_section"] = [total // axes + (axis < total % axes) for axis in range(axes)]
    for name in ("long_factor", "short_factor"):
        if isinstance(small.get(name), list):
            small[name] = small[name][:half]
    return small


CATEGORIES = ("dims", "heads", "image", "layers", "audio", "positions", "queries", "experts", "vocabulary")
