"""Megatron's MLP: two linear layers, each built by a spec, and a fused activation between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fused.checks import MismatchError, shape
from fused.mlp.activation import activate
from fused.mlp.config import TransformerConfig
from fused.mlp.megatron_checkpoint import mlp_state
from fused.mlp.mlp_linear import Linear, column_parallel_linear, row_parallel_linear
from fused.mlp.protocols import LinearFc1Builder, LinearFc2Builder, ProcessGroup, TEActivationFunctionBuilder
from fused.mlp.split_checkpoint import apply_swiglu_sharded_factory, on_mesh

Tensor = torch.Tensor


@dataclass(frozen=True)
class MLPSubmodules:
    """Builders of the parts of an `MLP`, functions or classes.

    Args:
        linear_fc1, linear_fc2: the two layers, by default on plain torch.
        activation_func: an activation including the gating, used if ``config.use_te_activation_func``.
    """

    linear_fc1: LinearFc1Builder = column_parallel_linear
    linear_fc2: LinearFc2Builder = row_parallel_linear
    activation_func: TEActivationFunctionBuilder | None = None


class MLP(nn.Module):
    """MLP h → ffn → h with a gated or plain activation in between.

    Takes ``[seq, batch, hidden]`` in the dtype of its parameters, and returns the result and the second layer's bias,
    ``[hidden]``, which is not added.

    Args:
        config: a `TransformerConfig`, or any object with attributes of these names (such as Megatron's own).
        submodules: builders of the parts; by default plain torch.
        is_expert: whether it is an expert of a mixture; `ffn_hidden_size` must be given then.
        input_size: of the input, by default ``config.hidden_size``.
        ffn_hidden_size: width between the layers, by default ``config.ffn_hidden_size``; a gated unit's first
            layer has twice that many outputs.
        tp_group: the tensor-parallel ranks: the first layer's outputs and the second's inputs are sharded. An object
            with ``size()`` and ``rank()`` is enough to build and save them; several ranks need a group of torch to
            compute.
        name: accepted for Megatron's callers, and ignored.
        pg_collection: an object whose `tp`, for an expert `expt_tp`, is the group if `tp_group` is None.

    Raises:
        TypeError: if the config has no `hidden_size`.
        ValueError: for an expert without `ffn_hidden_size`, or ``use_te_activation_func`` without a builder.

    Unlike in Megatron, fusing never changes the result: ``F.gelu`` stays the erf form, and an activation without a
    fused form runs in plain torch.

    Source: Megatron-LM ``core.transformer.mlp``.
    """

    def __init__(
        self,
        config: Any,
        submodules: MLPSubmodules | None = None,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        parts = MLPSubmodules() if submodules is None else submodules
        self.config = config
        self.settings = settings = TransformerConfig.of(config)
        if is_expert and ffn_hidden_size is None:
            raise ValueError("MLP: an expert needs ffn_hidden_size, which was not given")
        if settings.use_te_activation_func and parts.activation_func is None:
            raise ValueError("MLP: use_te_activation_func needs a builder MLPSubmodules(activation_func=...)")
        ffn = settings.ffn_size if ffn_hidden_size is None else ffn_hidden_size
        if tp_group is None:
            tp_group = getattr(pg_collection, "expt_tp" if is_expert else "tp", None)
        self.tp_group = tp_group
        halves = 2 if settings.gated_linear_unit else 1
        first, second = settings.initializers()
        common: dict[str, Any] = {
            "config": config,
            "bias": settings.add_bias_linear,
            "skip_bias_add": True,
            "is_expert": is_expert,
            "tp_group": tp_group,
        }
        self.linear_fc1: Any = parts.linear_fc1(
            settings.hidden_size if input_size is None else input_size,
            halves * ffn,
            init_method=first,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            stride=halves,
            **common,
        )
        own = parts.activation_func if settings.use_te_activation_func else None
        self.activation_func: Any = settings.activation_func if own is None else own(config=config)
        self.linear_fc2: Any = parts.linear_fc2(
            ffn,
            settings.hidden_size,
            init_method=second,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    @classmethod
    def as_mlp_submodule(
        cls,
        submodules: MLPSubmodules | None = None,
        *,
        config: Any,
        pg_collection: Any,
        is_mtp_layer: bool = False,
        **settings: Any,
    ) -> MLP:
        """Build the MLP of Megatron's transformer layer, as called by it with its process groups.

        Args:
            submodules, config: as for the class.
            pg_collection: any object whose `tp` is the tensor-parallel group.
            is_mtp_layer: accepted, and ignored.
            settings: further arguments of the class.

        Source: Megatron-LM ``MLP.as_mlp_submodule``.
        """
        return cls(config, submodules, tp_group=pg_collection.tp, pg_collection=pg_collection, **settings)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, *, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output, and return it with the second layer's bias not added.

        Args:
            hidden_states: ``[s, b, h]``; any leading dimensions are accepted.
            per_token_scale: ``[s, b]``, factors of each token's activations, or None.
            padding_mask: accepted for Megatron's transformer layer, and ignored: only the router of a mixture of
                experts reads it. Megatron ignores keywords of any other name too; here they raise a TypeError.

        Returns:
            ``[s, b, h]``, and the bias ``[h]`` or None. With a scale, the bias times the scale is added to the output,
            and None is returned for it.

        Raises:
            ValueError: for a scale that is not one number per token.
        """
        scale = _column(hidden_states, per_token_scale)
        y, bias = _call(self.linear_fc1, hidden_states)
        if self.settings.use_te_activation_func:
            y = _call(self.activation_func, y if bias is None else y + bias)
            y = y if scale is None else (y * scale).to(y.dtype)
        else:
            y = activate(self.settings, y, bias, scale)
        output, output_bias = _call(self.linear_fc2, y)
        if scale is None or output_bias is None:
            return output, output_bias
        return (output + output_bias * scale).to(output.dtype), None

    def backward_dw(self) -> None:
        """Compute the weight gradients deferred by the backward pass (``config.delay_wgrad_compute``)."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state for `torch.distributed.checkpoint`, to save and to load into, or for Megatron.

        The halves of a gated first layer are stored separately (`apply_swiglu_sharded_factory`), and tensor-parallel
        shards are DTensors: a checkpoint saved at one size of the group loads at another. The tensors share the
        memory of the parameters: loading into them loads the module.

        For offsets, for a metadata with `dp_cp_group`, which Megatron's layers pass, and for layers of Megatron's own,
        the state is that of Megatron's MLP, for ``megatron.core.dist_checkpointing``: either MLP loads what the other
        has saved.

        Args:
            prefix: of every name.
            sharded_offsets: ``(axis, offset, size)`` of further dimensions in front, such as the pipeline stages.
            metadata: Megatron's; ignored without `dp_cp_group` in torch's format.

        Raises:
            NotImplementedError: for Megatron's format, if megatron.core cannot be imported.
        """
        gated = self.settings.gated_linear_unit
        if sharded_offsets or "dp_cp_group" in (metadata or {}) or self._has_megatrons_layers():
            return mlp_state(self, gated, prefix, sharded_offsets, metadata)
        state: dict[str, Tensor] = {}
        for name, tensor in self.state_dict(prefix=prefix).items():
            part, _, own = name.removeprefix(prefix).partition(".")
            layer = getattr(self, part, None)
            axis = getattr(layer, "cut", {}).get(own)
            mesh = None if axis is None else _mesh_of(layer)
            if gated and part == "linear_fc1":
                state.update(apply_swiglu_sharded_factory(name, tensor, mesh=mesh).build())
            else:
                state[name] = tensor if axis is None else on_mesh(tensor.detach(), mesh, axis)
        return state

    def _has_megatrons_layers(self) -> bool:
        layers = (layer for layer in self.children() if not isinstance(layer, Linear))
        return any(hasattr(layer, "sharded_state_dict") for layer in layers)


def _mesh_of(layer: Any) -> DeviceMesh:
    """Return the group of a tensor-parallel layer as a mesh."""
    return DeviceMesh.from_group(layer.shares.process_group, layer.weight.device.type)


def _column(hidden_states: Tensor, per_token_scale: Tensor | None) -> Tensor | None:
    if per_token_scale is None:
        return None
    if per_token_scale.shape != hidden_states.shape[:-1]:
        raise MismatchError(
            f"MLP: per_token_scale {shape(per_token_scale)} must be one number for each token of the hidden states "
            f"{shape(hidden_states)}"
        )
    return per_token_scale.unsqueeze(-1)


def _call(part: Any, x: Tensor) -> Any:
    """Call a module, so its hooks run, or the `forward` of any other part."""
    return part(x) if isinstance(part, nn.Module) else part.forward(x)
