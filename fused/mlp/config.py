"""Settings of an MLP."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fused.mlp.protocols import Initializer

Tensor = torch.Tensor


@dataclass(frozen=True)
class TransformerConfig:
    """Fields of Megatron's configuration used by an MLP, under the same names, so Megatron's object works as well.

    Args:
        hidden_size: h.
        num_layers: of the whole model; scales down the initial weight of the second layer.
        ffn_hidden_size: width between the two layers, by default 4·h.
        add_bias_linear: whether the layers have biases.
        gated_linear_unit: whether the activation of one half of the first layer's output gates the other.
        activation_func: applied to the first layer's output, or to its first half if gated.
        bias_activation_fusion: bias, activation, gate and per-token scale in one pass, for the activations of
            `fused.bias_activation`. Others run in plain torch.
        activation_func_clamp_value: c, at which the gate is clamped from above, and the other half to −c … c.
        glu_linear_offset: added to the other half.
        activation_func_fp8_input_store: save a fused gated activation's input in 8 bits.
        use_te_activation_func: the activation is the submodule `activation_func`.
        delay_wgrad_compute: the backward pass leaves the weight gradients of the layers to ``backward_dw()``.
        params_dtype: of the parameters.
        init_method_std: standard deviation of the first layer's weight; the second's is 1/√(2·num_layers) of it.
        init_method, output_layer_init_method: fill the two weights in place, by default with normal numbers.

    Raises:
        ValueError: for a size that is not positive.

    Source: Megatron-LM ``TransformerConfig``.
    """

    hidden_size: int
    num_layers: int = 1
    ffn_hidden_size: int | None = None
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    bias_activation_fusion: bool = True
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    activation_func_fp8_input_store: bool = False
    use_te_activation_func: bool = False
    delay_wgrad_compute: bool = False
    params_dtype: torch.dtype = torch.float32
    init_method_std: float = 0.02
    init_method: Initializer | None = None
    output_layer_init_method: Initializer | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "ffn_hidden_size"):
            size = getattr(self, name)
            if size is not None and size <= 0:
                raise ValueError(f"TransformerConfig: {name} must be positive, got {size}")

    @classmethod
    def of(cls, config: object) -> TransformerConfig:
        """Read the settings from the attributes of any object, with defaults for missing ones.

        Raises:
            TypeError: if the object has no `hidden_size`.
        """
        if isinstance(config, cls):
            return config
        names = [field.name for field in dataclasses.fields(cls) if hasattr(config, field.name)]
        if "hidden_size" not in names:
            raise TypeError(f"MLP: the config needs an attribute hidden_size, {type(config).__name__} has none")
        return cls(**{name: getattr(config, name) for name in names})

    @property
    def ffn_size(self) -> int:
        """`ffn_hidden_size`, or its default 4·h."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def initializers(self) -> tuple[Initializer, Initializer]:
        """Return the functions to fill the weights of the first and of the second layer."""
        std = self.init_method_std
        return (
            self.init_method or _normal(std),
            self.output_layer_init_method or _normal(std / math.sqrt(2 * self.num_layers)),
        )


def _normal(std: float) -> Initializer:
    def fill(tensor: Tensor) -> Tensor:
        return torch.nn.init.normal_(tensor, std=std)

    return fill
