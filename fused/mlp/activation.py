"""Activation between the two layers: bias, activation, gate and per-token scale, fused or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fused.activations import bias_activation, new_gelu
from fused.gated import gated, settings
from fused.gated_megatron import quick_gelu
from fused.mlp.config import TransformerConfig

Tensor = torch.Tensor

_NAMES: dict[Any, str] = {
    F.gelu: "gelu",
    new_gelu: "gelu_tanh",
    quick_gelu: "quick_gelu",
    F.silu: "silu",
    F.relu: "relu",
    torch.relu: "relu",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
}
_MODULES: dict[type, str] = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """Return the name of an activation in `bias_activation`, or None.

    ``F.gelu`` is the erf form; the tanh form is ``functools.partial(F.gelu, approximate="tanh")``,
    ``nn.GELU("tanh")`` or `fused.new_gelu`.
    """
    approximate = None
    if isinstance(function, functools.partial) and function.func is F.gelu and not function.args:
        approximate = function.keywords.get("approximate") if function.keywords.keys() == {"approximate"} else None
    elif type(function) is nn.GELU:
        approximate = function.approximate
    if approximate is not None:
        return {"tanh": "gelu_tanh", "none": "gelu"}.get(approximate)
    return _MODULES.get(type(function)) if isinstance(function, nn.Module) else _NAMES.get(function)


def activate(config: TransformerConfig, y: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Compute act(y + bias), gated or not, times the scale, in the dtype of y + bias.

    Args:
        config: sets the activation, gated or not, fused or not.
        y: ``[..., ffn]``, or ``[..., 2·ffn]`` for a gated unit, the gate first.
        bias: the last dimension of y, or None.
        scale: ``[..., 1]``, or None.
    """
    name = activation_name(config.activation_func) if config.bias_activation_fusion else None
    if name is None:
        return _scaled(_plain(config, y if bias is None else y + bias), scale)
    if not config.gated_linear_unit:
        return _scaled(bias_activation(y, bias, name), scale)
    how = settings(
        "MLP",
        name,
        config.activation_func_clamp_value,
        config.activation_func_fp8_input_store,
        config.glu_linear_offset,
    )
    return gated("MLP", y, bias, scale, how)


def _plain(config: TransformerConfig, z: Tensor) -> Tensor:
    if not config.gated_linear_unit:
        return config.activation_func(z)
    gate, up = z.chunk(2, -1)
    if (clamp := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return config.activation_func(gate) * (up + config.glu_linear_offset)


def _scaled(z: Tensor, scale: Tensor | None) -> Tensor:
    return z if scale is None else (z * scale).to(z.dtype)
