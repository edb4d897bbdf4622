"""Models of other libraries, tiny or on small images: ``library:name``.

timm imports torchvision for its data sets alone, and torchvision's wheels load beside its own build of torch only: a
package that gives anything it is asked for stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from schedule.capture.examples.inputs import REFUSALS, Inputs
from tests import beyond as own

LIBRARIES = ("timm", "diffusers", "x_transformers")
MAX_PARAMETERS = 30_000_000
IMAGE = 64
_SMALL = ("test_", "atto", "femto", "pico", "nano", "tiny", "_s0", "_a0", "_b0", "small", "18", "26", "_s", "50")
"""Parts of names of timm's small models, the smallest first."""


class Unavailable(Exception):
    """There is no such model here; ``kind`` says why."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why
        super().__init__(f"{kind}: {why}")


@dataclass(frozen=True)
class Case:
    """A model, and what it is called with for a number of rows and a length."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Inputs]


_CASES: WeakKeyDictionary[nn.Module, Case] = WeakKeyDictionary()


def names() -> list[str]:
    """All models of the libraries that are installed."""
    found = [f"torch:{name}" for name in _TORCH]
    if importlib.util.find_spec("timm") is not None:
        found += [f"timm:{family}" for family in _timm().list_modules()]
    for library, cases in (("diffusers", _DIFFUSERS), ("x_transformers", _FLAGS)):
        if importlib.util.find_spec(library) is not None:
            found += [f"{library}:{name}" for name in cases]
    return sorted(found)


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """Make a model and its example.

    Raises:
        Unavailable: there is none that runs.
    """
    library, _, which = name.partition(":")
    case = {"torch": _of_torch, "timm": _of_timm, "diffusers": _of_diffusers, "x_transformers": _of_flags}[library]
    torch.manual_seed(seed)
    try:
        made = case(which)
        model = made.make()
    except (*REFUSALS, ImportError) as error:
        raise Unavailable("not built", f"{type(error).__name__}: {error}") from error
    if sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
        raise Unavailable("too large", f"more than {MAX_PARAMETERS:,} parameters")
    _CASES[model] = made
    return model, made.batch(2, 12)


def inputs_of(model: nn.Module, rows: int, length: int) -> Inputs | None:
    """Return an example of these sizes for a model of :func:`build`, or None for another model."""
    return _CASES[model].batch(rows, length) if model in _CASES else None


def sources(name: str) -> list[str]:
    """The files that a result depends on besides ours: the version of the library."""
    library, _, _ = name.partition(":")
    spec = importlib.util.find_spec(library)
    return [str(Path(spec.origin).parent / "__init__.py")] if spec and spec.origin else []


# -- timm -----------------------------------------------------------------------------------------------------


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def _timm() -> Any:
    parts = ("transforms", "transforms.functional", "datasets", "datasets.folder", "ops", "ops.misc", "models")
    for name in ("torchvision", *(f"torchvision.{part}" for part in (*parts, "models.feature_extraction"))):
        if name in sys.modules:
            continue
        module = _StandIn(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return importlib.import_module("timm")


def _of_timm(family: str) -> Case:
    timm = _timm()
    models = timm.list_models(module=family)
    if not models:
        raise Unavailable("no model", "the file registers none")
    name = next((each for part in _SMALL for each in models if part in each), models[0])

    def make() -> nn.Module:
        options = {"num_classes": 7}
        try:
            model = timm.create_model(name, img_size=IMAGE, **options)
        except TypeError:
            model = timm.create_model(name, **options)
        for module in model.modules():
            if isinstance(getattr(module, "drop_prob", None), float):
                module.drop_prob = 0.0  # what is drawn for whole samples is compared elsewhere
        return model

    def batch(rows: int, length: int) -> Inputs:
        return {"x": torch.randn(rows + 2, 3, IMAGE, IMAGE)}  # batch norms of single values refuse to train

    model = make()
    argument = next(iter(inspect.signature(model.forward).parameters))
    return Case(lambda: model, lambda rows, length: {argument: batch(rows, length)["x"]})


# -- diffusers ------------------------------------------------------------------------------------------------


def _image(rows: int, channels: int, width: int) -> torch.Tensor:
    return torch.randn(rows, channels, width, width)


def _context(rows: int, length: int, features: int = 16) -> torch.Tensor:
    return torch.randn(rows, length, features)


_DOWN = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
_HEADS = {"num_attention_heads": 2, "num_layers": 2, "patch_size": 2, "sample_size": 8, "in_channels": 4}
_DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[int, int], Inputs]]] = {
    "UNet2DConditionModel": (
        {
            **_DOWN,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 8,
        },
        lambda rows, length: {
            "sample": _image(rows, 4, 8),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": _context(rows, length),
        },
    ),
    "UNet2DModel": (
        {
            **_DOWN,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "resnet_time_scale_shift": "scale_shift",
            "attention_head_dim": 8,
        },
        lambda rows, length: {"sample": _image(rows, 3, 8), "timestep": torch.tensor(5)},
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (32, 32),
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda rows, length: {"sample": _image(rows, 3, 16)},
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "attention_head_dim": 16, "norm_num_groups": 4, "num_embeds_ada_norm": 10},
        lambda rows, length: {
            "hidden_states": _image(rows, 4, 8),
            "timestep": torch.arange(rows),
            "class_labels": torch.arange(rows),
        },
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "attention_head_dim": 8, "out_channels": 8, "cross_attention_dim": 16, "caption_channels": 12},
        lambda rows, length: {
            "hidden_states": _image(rows, 4, 8),
            "encoder_hidden_states": _context(rows, length, 12),
            "timestep": torch.arange(rows),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            **_HEADS,
            "attention_head_dim": 8,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        lambda rows, length: {
            "hidden_states": _image(rows, 4, 8),
            "encoder_hidden_states": _context(rows, length),
            "pooled_projections": torch.randn(rows, 16),
            "timestep": torch.arange(rows),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda rows, length: {
            "hidden_states": torch.randn(rows, 16, 4),
            "encoder_hidden_states": _context(rows, length),
            "pooled_projections": torch.randn(rows, 16),
            "timestep": torch.rand(rows),
            "img_ids": torch.rand(16, 3),
            "txt_ids": torch.rand(length, 3),
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
        },
        lambda rows, length: {
            "hidden_states": torch.randn(rows, 4, 2, 8, 8),
            "timestep": torch.arange(rows),
            "encoder_hidden_states": _context(rows, length),
        },
    ),
}


def _of_diffusers(name: str) -> Case:
    config, batch = _DIFFUSERS[name]
    cls = getattr(importlib.import_module("diffusers"), name)
    return Case(lambda: cls(**config), batch)


# -- x-transformers -------------------------------------------------------------------------------------------

_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True, "rotary_pos_emb": True},
    "simple rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "qk norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "relative bias": {"rel_pos_bias": True},
    "flash": {"attn_flash": True},
    "squared relu": {"ff_relu_squared": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "grouped": {"attn_kv_heads": 1},
    "sandwich": {"sandwich_norm": True},
    "residual attention": {"residual_attn": True},
    "gated values": {"attn_gate_values": True},
    "memory": {"attn_num_mem_kv": 2},
    "shift tokens": {"shift_tokens": 1},
    "adaptive norm": {"use_adaptive_layernorm": True, "dim_condition": 16},
    "macaron": {"macaron": True},
}


def _of_flags(name: str) -> Case:
    library, flags = importlib.import_module("x_transformers"), _FLAGS[name]

    def make() -> nn.Module:
        layers = library.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **flags)
        model: nn.Module = library.TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)
        return model

    def batch(rows: int, length: int) -> Inputs:
        tokens = {"x": torch.randint(0, 32, (rows, length))}
        return tokens | ({"condition": torch.randn(rows, 16)} if "dim_condition" in flags else {})

    return Case(make, batch)


# -- torch.nn -------------------------------------------------------------------------------------------------

_TORCH: dict[str, Case] = {
    "ResNet": Case(own.ResNet, lambda rows, length: {"pixel_values": torch.randn(rows, 3, 8, 8)}),
    "EfficientNet": Case(own.EfficientNet, lambda rows, length: {"pixel_values": torch.randn(rows, 3, 8, 8)}),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2),
        lambda rows, length: {"src": torch.randn(rows, length, 16)},
    ),
    "TransformerDecoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2),
        lambda rows, length: {"tgt": torch.randn(rows, length, 16), "memory": torch.randn(rows, 5, 16)},
    ),
}


def _of_torch(name: str) -> Case:
    return _TORCH[name]
