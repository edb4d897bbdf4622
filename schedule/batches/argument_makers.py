"""Makers of the arguments of a forward from a config, by the argument's name.

The name does not determine the layout: ``input_features`` is ``[batch, mel, frames]`` for one model and
``[batch, frames, mel]`` for another. So a maker returns all layouts in use, the most likely first, to be tried in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from schedule.batches.config_values import TEXT
from schedule.batches.images import IMAGES, patches
from schedule.batches.requested_sizes import Layouts, Makers, Sizes
from schedule.batches.signals import SIGNALS


def make(name: str, sizes: Sizes) -> Layouts:
    """Return all layouts of argument ``name``, or an empty list if it is unknown."""
    maker = MAKERS.get(name) or sizes.further.get(name)
    return maker(sizes) if maker is not None else []


# -- text ---------------------------------------------------------------------------------------------------


def _input_ids(sizes: Sizes) -> Layouts:
    configs = sizes.configs
    vocabulary = configs.number("vocab_size", near=(*TEXT[:3], ""), default=256)  # of bytes, if nothing is said
    if configs.find("is_encoder_decoder", default=False):
        vocabulary = configs.number("vocab_size", "src_vocab_size", "encoder_vocab_size", default=vocabulary)
    return _by_codebook(sizes, vocabulary) if vocabulary > 1 else []


def _by_codebook(sizes: Sizes, vocabulary: int, *others: str) -> Layouts:
    """Return ids ``[rows, length]``, or for several codebooks: side by side, with one for text, or row by row."""
    flat = sizes.tokens(vocabulary, sizes.length)
    books = sizes.configs.number("num_codebooks", *others, near=("decoder",), default=1)
    if books == 1:
        return [flat]
    deep = (sizes.whole(vocabulary, sizes.rows, sizes.length, count) for count in (books, books + 1))
    return [flat, *deep, sizes.whole(vocabulary, sizes.rows * books, sizes.length)]


def _query_ids(sizes: Sizes) -> Layouts:
    return [sizes.tokens(sizes.configs.number("vocab_size", near=("qformer", "text"), default=256), sizes.length)]


def _decoder_input_ids(sizes: Sizes) -> Layouts:
    names = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
    vocabulary = sizes.configs.number(*names, near=("decoder", "text", "generator", ""), default=0)
    if vocabulary < 2:
        return []
    return _by_codebook(sizes, vocabulary, "num_channels")


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


def _hidden_or_patches(sizes: Sizes) -> Layouts:
    return patches(sizes) if "grid_thw" in sizes.names else _hidden(sizes)


def _queries(sizes: Sizes) -> Layouts:
    count = sizes.configs.number("num_query_tokens", "num_queries", default=8)
    width = sizes.configs.number("hidden_size", "d_model", near=("qformer",), default=0)
    return [sizes.normal(sizes.rows, count, width)] if width else []


MAKERS: Makers = {
    "input_ids": _input_ids,
    "decoder_input_ids": _decoder_input_ids,
    "qformer_input_ids": _query_ids,
    "attention_mask": _attention_mask,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden_or_patches,
    "bbox": _bbox,
    "query_embeds": _queries,
    **IMAGES,
    **SIGNALS,
}


def labels_like(logits: Any, tokens: Mapping[str, torch.Tensor], sizes: Sizes) -> torch.Tensor | None:
    """Return labels for ``logits``: a token for each position or a class for each row, else None."""
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
