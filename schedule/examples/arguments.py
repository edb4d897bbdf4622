"""How each argument of a forward is made from a config, by the argument's name.

An argument's layout is not written in its name: ``input_features`` is ``[batch, mel, frames]`` for one model and
``[batch, frames, mel]`` for the next. So a maker gives all layouts in use, likeliest first, and the model decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from schedule.examples.configs import AUDIO, TEXT, VISION, Configs

Layouts = list[torch.Tensor]


@dataclass
class Sizes:
    """What is asked for.

    Attributes:
        configs: of the model.
        rows: batch size.
        length: tokens of a sequence.
        names: the arguments that the forward takes.
        device: of the model.
    """

    configs: Configs
    rows: int
    length: int
    names: Sequence[str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(97 * self.rows + self.length)

    def normal(self, *shape: int) -> torch.Tensor:
        """Floating numbers, the same ones each time."""
        return torch.randn(*shape, generator=self._generator).to(self.device)

    def whole(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        """Whole numbers from ``low`` to below ``high``."""
        return torch.randint(low, max(high, low + 1), shape, generator=self._generator).to(self.device)

    def ones(self, *shape: int) -> torch.Tensor:
        """A mask that hides nothing."""
        return torch.ones(*shape, dtype=torch.long, device=self.device)

    def repeated(self, *values: int) -> torch.Tensor:
        """``values`` for every row."""
        return torch.tensor([values] * self.rows, device=self.device)

    def tokens(self, vocabulary: int, length: int) -> torch.Tensor:
        """Ids ``[rows, length]`` of ordinary tokens."""
        special = self.configs.special_ids
        ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
        return torch.tensor(ordinary, device=self.device)[self.whole(len(ordinary), self.rows, length)]


def make(name: str, sizes: Sizes) -> Layouts:
    """Every layout that argument ``name`` may have; none if nothing is known about it."""
    maker = MAKERS.get(name)
    return maker(sizes) if maker is not None else []


# -- text ---------------------------------------------------------------------------------------------------


def _input_ids(sizes: Sizes) -> Layouts:
    configs = sizes.configs
    vocabulary = configs.number("vocab_size", near=(*TEXT[:3], ""), default=256)  # of bytes, if nothing is said
    if configs.find("is_encoder_decoder", default=False):
        vocabulary = configs.number("vocab_size", "src_vocab_size", "encoder_vocab_size", default=vocabulary)
    return [sizes.tokens(vocabulary, sizes.length)] if vocabulary > 1 else []


def _query_ids(sizes: Sizes) -> Layouts:
    return [sizes.tokens(sizes.configs.number("vocab_size", near=("qformer", "text"), default=256), sizes.length)]


def _decoder_input_ids(sizes: Sizes) -> Layouts:
    names = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
    vocabulary = sizes.configs.number(*names, near=("decoder", "text", "generator", ""), default=0)
    if vocabulary < 2:
        return []
    flat = sizes.tokens(vocabulary, sizes.length)
    codebooks = sizes.configs.number("num_codebooks", "num_channels", near=("decoder",), default=1)
    deep = sizes.whole(vocabulary, sizes.rows, sizes.length, codebooks)
    return [flat, deep] if codebooks > 1 else [flat]


def _attention_mask(sizes: Sizes) -> Layouts:
    mask = sizes.ones(sizes.rows, sizes.length)
    if sizes.rows > 1 and sizes.length > 3:
        padded = mask.clone()
        padded[-1, -2:] = 0
        return [padded, mask]
    return [mask]


def _hidden(sizes: Sizes) -> Layouts:
    width = sizes.configs.number("hidden_size", "d_model", "embed_dim", "dim", "n_embd", default=0)
    return [sizes.normal(sizes.rows, sizes.length, width)] if width else []


def _bbox(sizes: Sizes) -> Layouts:
    high = sizes.configs.number("max_2d_position_embeddings", default=64)
    corner = sizes.whole(high // 2, sizes.rows, sizes.length, 2)
    boxes = torch.cat([corner, corner + min(8, high // 4)], dim=-1)
    corners = sizes.normal(sizes.rows, sizes.length, 8)
    return [boxes, corners]


# -- images -------------------------------------------------------------------------------------------------


def image_size(configs: Configs) -> tuple[int, int]:
    """Height and width that the model was made for, or a small one that every pyramid divides."""
    names = ("image_size", "img_size", "pretrain_image_size", "sample_size", "input_size", "image_input_size")
    return configs.pair(*names, near=VISION, default=64)


def channels(configs: Configs) -> int:
    """Colours."""
    return configs.number("num_channels", "in_channels", "in_chans", "image_channels", near=VISION, default=3)


def patch_grid(configs: Configs) -> tuple[int, int, int]:
    """Frames, height and width of an image in patches: two merged ones each way."""
    merge = configs.number("spatial_merge_size", "merge_kernel_size", "merge_size", near=VISION, default=2)
    return 1, 2 * merge, 2 * merge


def _patches(sizes: Sizes) -> Layouts:
    """Images cut up, all rows in one list ``[patches, values]``."""
    configs = sizes.configs
    patch = configs.number("patch_size", near=VISION, default=16)
    frames = configs.number("temporal_patch_size", near=VISION, default=1)
    count = sizes.rows * math.prod(patch_grid(configs))
    colours = channels(configs)
    flat = sizes.normal(count, colours * frames * patch * patch)
    return [flat, flat.view(count, colours * frames, patch, patch)[:, :colours], flat[None]]


def _pixel_values(sizes: Sizes) -> Layouts:
    configs, rows = sizes.configs, sizes.rows
    if {"grid_thw", "image_grid_thw", "image_grid_hw"} & set(sizes.names):
        return _patches(sizes)
    height, width = image_size(configs)
    colours = channels(configs)
    image = sizes.normal(rows, colours, height, width)
    frames = configs.number("num_frames", near=VISION, default=2)
    video = sizes.normal(rows, frames, colours, height, width)
    layouts = [image, image[:, None], video]
    if "spatial_shapes" in sizes.names:
        patch, count = configs.number("patch_size", near=VISION, default=16), _siglip_side(configs) ** 2
        layouts.insert(0, sizes.normal(rows, count, colours * patch * patch))
    return layouts


def _siglip_side(configs: Configs) -> int:
    return max(1, math.isqrt(configs.number("num_patches", near=VISION, default=16)))


def _spatial_shapes(sizes: Sizes) -> Layouts:
    side = _siglip_side(sizes.configs)
    return [sizes.repeated(side, side)]


def _pixel_attention_mask(sizes: Sizes) -> Layouts:
    height, width = image_size(sizes.configs)
    by_pixel = sizes.ones(sizes.rows, height, width)
    by_patch = sizes.ones(sizes.rows, _siglip_side(sizes.configs) ** 2)
    return [by_patch] if "spatial_shapes" in sizes.names else [by_pixel, by_pixel[:, None]]


def _video(sizes: Sizes) -> Layouts:
    height, width = image_size(sizes.configs)
    frames = sizes.configs.number("frames_per_clip", "num_frames", near=VISION, default=4)
    return [sizes.normal(sizes.rows, frames, channels(sizes.configs), height, width)]


def _flattened_patches(sizes: Sizes) -> Layouts:
    configs = sizes.configs
    patch, count = configs.number("patch_size", near=VISION, default=16), 16
    places = torch.arange(count, device=sizes.device).expand(sizes.rows, count)
    where = torch.stack([places // 4 + 1, places % 4 + 1], dim=-1)
    return [torch.cat([where.float(), sizes.normal(sizes.rows, count, channels(configs) * patch * patch)], dim=-1)]


def _grid(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*patch_grid(sizes.configs))]


def _grid_hw(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*patch_grid(sizes.configs)[1:])]


def _image_sizes(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*image_size(sizes.configs))]


def _merges(sizes: Sizes) -> Layouts:
    return [sizes.repeated(patch_grid(sizes.configs)[1] // 2)[:, 0]]


def _hidden_or_patches(sizes: Sizes) -> Layouts:
    return _patches(sizes) if "grid_thw" in sizes.names else _hidden(sizes)


# -- sound --------------------------------------------------------------------------------------------------


def _bins(configs: Configs) -> int:
    names = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "num_mels", "n_mels", "mel_bins")
    return configs.number(*names, near=AUDIO, default=80)


def _frames(configs: Configs) -> int:
    positions = configs.number("max_source_positions", near=AUDIO, default=0)
    whole = configs.number("max_length", "spec_size", "n_frames", near=AUDIO, default=0)
    return min(2 * positions, 3000) if positions else min(whole, 1024) or 64


def _input_features(sizes: Sizes) -> Layouts:
    bins, rows = _bins(sizes.configs), sizes.rows
    layouts: Layouts = []
    for frames in dict.fromkeys((_frames(sizes.configs), 64)):
        by_frame = sizes.normal(rows, frames, bins)
        layouts += [by_frame.transpose(1, 2).contiguous(), by_frame, by_frame[:, None]]
    return layouts


def _feature_mask(sizes: Sizes) -> Layouts:
    frames = dict.fromkeys((_frames(sizes.configs), 64))
    return [mask for count in frames for mask in (sizes.ones(sizes.rows, count), sizes.ones(sizes.rows, count).bool())]


def _input_values(sizes: Sizes) -> Layouts:
    configs, rows = sizes.configs, sizes.rows
    strides = configs.find(
        "conv_stride", "upsampling_ratios", "downsampling_ratios", "strides", near=AUDIO, default=[64]
    )
    samples = 16 * math.prod(strides if isinstance(strides, (list, tuple)) else [strides])
    wave = sizes.normal(rows, min(max(samples, 1024), 32_000))
    layouts = [wave, wave[:, None]]
    bins = configs.number("num_mel_bins", near=AUDIO, default=0)
    if bins:
        by_frame = sizes.normal(rows, _frames(configs), bins)
        layouts += [by_frame, by_frame[:, None]]
    return layouts


# -- series -------------------------------------------------------------------------------------------------


def _series_length(configs: Configs) -> int:
    lags = configs.find("lags_sequence", default=[0])
    return configs.number("context_length", "prediction_length", default=32) + max(lags)


def _past_values(sizes: Sizes) -> Layouts:
    length = _series_length(sizes.configs)
    width = sizes.configs.number("num_input_channels", "input_size", default=1)
    many = sizes.normal(sizes.rows, length, width)
    return [many, many[..., 0].contiguous()] if width > 1 else [many[..., 0].contiguous(), many]


def _observed(sizes: Sizes) -> Layouts:
    return [torch.ones_like(values) for values in _past_values(sizes)]


def _time_features(length: Callable[[Configs], int]) -> Callable[[Sizes], Layouts]:
    def make(sizes: Sizes) -> Layouts:
        width = sizes.configs.number("num_time_features", default=0)
        return [sizes.normal(sizes.rows, length(sizes.configs), width)]

    return make


def _horizon(configs: Configs) -> int:
    return configs.number("prediction_length", default=1)


def _future_values(sizes: Sizes) -> Layouts:
    width = sizes.configs.number("num_input_channels", "input_size", default=1)
    values = sizes.normal(sizes.rows, _horizon(sizes.configs), width)
    return [values] if width > 1 else [values[..., 0].contiguous(), values]


def _static(sizes: Sizes) -> Layouts:
    width = sizes.configs.number("num_static_real_features", default=0)
    return [sizes.normal(sizes.rows, width)] if width else []


def _categories(sizes: Sizes) -> Layouts:
    cardinality = sizes.configs.find("cardinality", default=[])
    chosen = [sizes.whole(count, sizes.rows, 1) for count in cardinality if count]
    return [torch.cat(chosen, dim=-1)] if chosen and sizes.configs.number("num_static_categorical_features") else []


def _steps(*width: str) -> Callable[[Sizes], Layouts]:
    """One vector for each step of an episode."""

    def make(sizes: Sizes) -> Layouts:
        return [sizes.normal(sizes.rows, sizes.length, sizes.configs.number(*width, default=1))]

    return make


def _timesteps(sizes: Sizes) -> Layouts:
    return [torch.arange(sizes.length, device=sizes.device).expand(sizes.rows, -1).contiguous()]


def _queries(sizes: Sizes) -> Layouts:
    count = sizes.configs.number("num_query_tokens", "num_queries", default=8)
    width = sizes.configs.number("hidden_size", "d_model", near=("qformer",), default=0)
    return [sizes.normal(sizes.rows, count, width)] if width else []


MAKERS: Mapping[str, Callable[[Sizes], Layouts]] = {
    "input_ids": _input_ids,
    "decoder_input_ids": _decoder_input_ids,
    "qformer_input_ids": _query_ids,
    "attention_mask": _attention_mask,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden_or_patches,
    "bbox": _bbox,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "pixel_values_images": _pixel_values,
    "pixel_attention_mask": _pixel_attention_mask,
    "spatial_shapes": _spatial_shapes,
    "flattened_patches": _flattened_patches,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "image_grid_hw": _grid_hw,
    "image_sizes": _image_sizes,
    "merge_sizes": _merges,
    "input_features": _input_features,
    "input_features_mask": _feature_mask,
    "feature_attention_mask": _feature_mask,
    "input_values": _input_values,
    "past_values": _past_values,
    "past_observed_mask": _observed,
    "past_time_features": _time_features(_series_length),
    "future_time_features": _time_features(_horizon),
    "future_values": _future_values,
    "static_categorical_features": _categories,
    "static_real_features": _static,
    "states": _steps("state_dim"),
    "actions": _steps("act_dim"),
    "rewards": _steps(),
    "returns_to_go": _steps(),
    "timesteps": _timesteps,
    "query_embeds": _queries,
}


def labels_like(logits: Any, tokens: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor | None:
    """Labels for ``logits``: a token at each place, or a class for each row; None for anything else."""
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        return None
    for ids in tokens.values():
        if logits.ndim == 3 and logits.shape[:2] == ids.shape:
            special = torch.tensor(sorted(sizes.configs.special_ids), device=ids.device)
            hidden = torch.isin(ids, special) | (ids >= logits.shape[-1])
            return ids.masked_fill(hidden, -100)
    if logits.ndim == 2 and logits.shape[0] == sizes.rows and logits.shape[1] > 1:
        return sizes.whole(logits.shape[1], sizes.rows)
    return None
