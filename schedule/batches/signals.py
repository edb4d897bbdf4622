"""Sound, time series and episodes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from schedule.batches.config_values import AUDIO, Configs
from schedule.batches.requested_sizes import Layouts, Makers, Sizes

# -- sound --------------------------------------------------------------------------------------------------


_BINS = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "num_mels", "n_mels", "mel_bins")


def _bins(configs: Configs, default: int = 80) -> int:
    return configs.number(*_BINS, "input_feat_size", "model_in_dim", near=AUDIO, default=default)


def _frames(configs: Configs) -> int:
    positions = configs.number("max_source_positions", near=AUDIO, default=0)
    whole = configs.number("max_length", "spec_size", "n_frames", near=AUDIO, default=0)
    return min(2 * positions, 3000) if positions else min(whole, 1024) or 64


def _input_features(sizes: Sizes) -> Layouts:
    bins, rows = _bins(sizes.configs), sizes.rows
    layouts: Layouts = [sizes.normal(bins, rows * 64)] if "feature_lens" in sizes.names else []  # one after the other
    for frames in dict.fromkeys((_frames(sizes.configs), 64)):
        by_frame = sizes.normal(rows, frames, bins)
        layouts += [by_frame.transpose(1, 2).contiguous(), by_frame, by_frame[:, None]]
    return layouts if _bins(sizes.configs, 0) else [*layouts, sizes.normal(rows, 64, 128)]


def _spectrogram(sizes: Sizes) -> Layouts:
    return [sizes.normal(sizes.rows, 64, _bins(sizes.configs))]


def _lengths(sizes: Sizes) -> Layouts:
    return [sizes.repeated(64)[:, 0]]


def _lengths_after_convolution(sizes: Sizes) -> Layouts:
    """Return the lengths after a convolution of stride 2: half of them."""
    return [sizes.repeated(32)[:, 0]]


def _padding(sizes: Sizes) -> Layouts:
    """Return a mask without padding."""
    return [mask == 0 for mask in _feature_mask(sizes)[-1:]]


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
    """Return one vector for each step of an episode."""

    def make(sizes: Sizes) -> Layouts:
        count = sizes.configs.number("chunk_size", default=sizes.length) if "state" in sizes.names else sizes.length
        return [sizes.normal(sizes.rows, count, sizes.configs.number(*width, default=1))]

    return make


def _state(sizes: Sizes) -> Layouts:
    return [sizes.normal(sizes.rows, sizes.configs.number("state_dim", "max_state_dim", default=1))]


def _timesteps(sizes: Sizes) -> Layouts:
    return [torch.arange(sizes.length, device=sizes.device).expand(sizes.rows, -1).contiguous()]


SIGNALS: Makers = {
    "input_features": _input_features,
    "input_features_mask": _feature_mask,
    "feature_attention_mask": _feature_mask,
    "feature_lens": _lengths,
    "aftercnn_lens": _lengths_after_convolution,
    "audio_mel": _spectrogram,
    "audio_mel_mask": _padding,
    "spectrogram": _spectrogram,
    "mel_spectrogram": _spectrogram,
    "input_values": _input_values,
    "past_values": _past_values,
    "past_observed_mask": _observed,
    "past_time_features": _time_features(_series_length),
    "future_time_features": _time_features(_horizon),
    "future_values": _future_values,
    "static_categorical_features": _categories,
    "static_real_features": _static,
    "state": _state,
    "states": _steps("state_dim"),
    "actions": _steps("act_dim", "max_action_dim"),
    "rewards": _steps(),
    "returns_to_go": _steps(),
    "timesteps": _timesteps,
}
