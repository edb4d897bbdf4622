"""Images and videos, with their masks, sizes and positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from schedule.batches.config_values import VISION, Configs
from schedule.batches.requested_sizes import Layouts, Makers, Sizes

SMALL = 64  # pixels


def image_size(configs: Configs, default: int = SMALL) -> tuple[int, int]:
    """Return the height and width in the config, or a small size divisible by those of every pyramid."""
    names = ("image_size", "img_size", "pretrain_image_size", "sample_size", "input_size", "image_input_size")
    return configs.pair(*names, near=VISION, default=default)


def channels(configs: Configs) -> int:
    """Return the number of color channels."""
    return configs.number("num_channels", "in_channels", "in_chans", "image_channels", near=VISION, default=3)


def patch_grid(configs: Configs) -> tuple[int, int, int]:
    """Return frames, height and width of an image in patches: two merged patches each way."""
    merge = configs.number("spatial_merge_size", "merge_kernel_size", "merge_size", near=VISION, default=2)
    return 1, 2 * merge, 2 * merge


def patches(sizes: Sizes) -> Layouts:
    """Return the patches of the images, of all rows in one tensor ``[patches, values]``."""
    configs = sizes.configs
    patch = configs.number("patch_size", near=VISION, default=16)
    frames = configs.number("temporal_patch_size", near=VISION, default=1)
    count = sizes.rows * math.prod(patch_grid(configs))
    colors = channels(configs)
    flat = sizes.normal(count, colors * frames * patch * patch)
    return [flat, flat.view(count, colors * frames, patch, patch)[:, :colors], flat[None]]


def _pixel_values(sizes: Sizes) -> Layouts:
    configs, rows = sizes.configs, sizes.rows
    if {"grid_thw", "image_grid_thw", "image_grid_hw"} & set(sizes.names):
        return patches(sizes)
    height, width = image_size(configs)
    colors = channels(configs)
    image = sizes.normal(rows, colors, height, width)
    frames = configs.number("num_frames", near=VISION, default=2)
    video = sizes.normal(rows, frames, colors, height, width)
    larger = sizes.normal(rows, colors, 4 * height, 4 * width)
    layouts = [image, image[:, None], video, video.flatten(0, 1), *([larger] if height <= SMALL else [])]
    if "target_sizes" in sizes.names:  # all images cut up, one patch beside the other
        patch = configs.number("patch_size", near=VISION, default=16)
        layouts.insert(0, sizes.normal(1, colors, patch, rows * (height // patch) * width))
    if _POSITIONS & set(sizes.names):
        patch = configs.number("patch_size", near=VISION, default=16)
        layouts.insert(0, sizes.normal(rows, _pooled_side(configs) ** 2, colors * patch * patch))
    if "aspect_ratio_ids" in sizes.names:  # large images come in tiles
        layouts.insert(0, sizes.normal(rows, 1, configs.number("max_num_tiles", default=1), colors, height, width))
    if "spatial_shapes" in sizes.names:
        patch, count = configs.number("patch_size", near=VISION, default=16), _siglip_side(configs) ** 2
        layouts.insert(0, sizes.normal(rows, count, colors * patch * patch))
    return layouts


_POSITIONS = {"pixel_position_ids", "image_position_ids"}


def _pooled_side(configs: Configs) -> int:
    """Return the number of patches each way that gives two after pooling."""
    return 2 * configs.number("pooling_kernel_size", near=VISION, default=1)


def _positions(sizes: Sizes) -> Layouts:
    """Return column and row of each patch."""
    side = _pooled_side(sizes.configs)
    positions = torch.arange(side * side, device=sizes.device)
    return [torch.stack([positions % side, positions // side], dim=-1).expand(sizes.rows, -1, -1).contiguous()]


def _target_sizes(sizes: Sizes) -> Layouts:
    """Return height and width in patches."""
    height, width = image_size(sizes.configs)
    patch = sizes.configs.number("patch_size", near=VISION, default=16)
    return [sizes.repeated(height // patch, width // patch)]


def _siglip_side(configs: Configs) -> int:
    return max(1, math.isqrt(configs.number("num_patches", near=VISION, default=16)))


def _spatial_shapes(sizes: Sizes) -> Layouts:
    side = _siglip_side(sizes.configs)
    return [sizes.repeated(side, side)]


def _pixel_attention_mask(sizes: Sizes) -> Layouts:
    height, width = image_size(sizes.configs)
    by_pixel = sizes.ones(sizes.rows, height, width)
    by_patch = sizes.ones(sizes.rows, _siglip_side(sizes.configs) ** 2)
    by_frame = sizes.ones(sizes.rows, sizes.configs.number("num_frames", near=VISION, default=2))
    return [by_patch] if "spatial_shapes" in sizes.names else [by_pixel, by_pixel[:, None], by_frame]


def _video(sizes: Sizes) -> Layouts:
    height, width = image_size(sizes.configs)
    frames = sizes.configs.number("frames_per_clip", "num_frames", near=VISION, default=4)
    return [sizes.normal(sizes.rows, frames, channels(sizes.configs), height, width)]


def _flattened_patches(sizes: Sizes) -> Layouts:
    configs = sizes.configs
    patch, count = configs.number("patch_size", near=VISION, default=16), 16
    positions = torch.arange(count, device=sizes.device).expand(sizes.rows, count)
    where = torch.stack([positions // 4 + 1, positions % 4 + 1], dim=-1)
    width = configs.number("patch_embed_hidden_size", default=channels(configs) * patch * patch)
    return [torch.cat([where.float(), sizes.normal(sizes.rows, count, width)], dim=-1)]


def _grid(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*patch_grid(sizes.configs))]


def _grid_hw(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*patch_grid(sizes.configs)[1:])]


def _image_of_token(sizes: Sizes) -> Layouts:
    """Return the mask of the images that a token attends to, ``[rows, tokens, images]``: the only one."""
    return [sizes.ones(sizes.rows, sizes.length, 1)]


def _image_positions(sizes: Sizes) -> Layouts:
    """Mark the tokens taken from the image."""
    marks = sizes.ones(sizes.rows, sizes.length) * 0
    marks[:, 1 : 1 + sizes.configs.number("latent_query_num", default=1)] = 1
    return [marks]


def _tiles(*shape: str) -> Callable[[Sizes], Layouts]:
    """Return a maker of masks and ids of tiled images: all ones, so that the first aspect ratio is meant."""

    def make(sizes: Sizes) -> Layouts:
        tiles = sizes.configs.number("max_num_tiles", default=1)
        known = {"rows": sizes.rows, "images": 1, "tiles": tiles, "length": sizes.length}
        return [sizes.ones(*(known[name] for name in shape))]

    return make


def _image_sizes(sizes: Sizes) -> Layouts:
    return [sizes.repeated(*image_size(sizes.configs))]


def _merges(sizes: Sizes) -> Layouts:
    return [sizes.repeated(patch_grid(sizes.configs)[1] // 2)[:, 0]]


IMAGES: Makers = {
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "pixel_values_images": _pixel_values,
    "image": _pixel_values,
    "image_attention_mask": _image_of_token,
    "image_embeds_position_mask": _image_positions,
    "aspect_ratio_ids": _tiles("rows", "images"),
    "aspect_ratio_mask": _tiles("rows", "images", "tiles"),
    "cross_attention_mask": _tiles("rows", "length", "images", "tiles"),
    "pixel_attention_mask": _pixel_attention_mask,
    "spatial_shapes": _spatial_shapes,
    "pixel_position_ids": _positions,
    "image_position_ids": _positions,
    "target_sizes": _target_sizes,
    "flattened_patches": _flattened_patches,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "image_grid_hw": _grid_hw,
    "image_sizes": _image_sizes,
    "merge_sizes": _merges,
}
